import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from eval import report
from eval.report import LiveReport, collect_samples, main, phase_seconds, thinned_rows, write_report
from orchestration.metrics.tally import time_metrics
from orchestration.run.directory import RunDirectory
from orchestration.run.samples import samples_path
from records.rollout import Prompt, Trajectory

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> <!-- & \u2028 \udc80"
CONFIG = "model: {path: models/tiny}\nalgorithm: {name: grpo}\ntrain: {steps: %d}\nreward: {pass_threshold: 0.5}\n"


def make_trajectory(step: int, index: int, response: str, reward: float | None = 1.0) -> Trajectory:
    prompt = Prompt(f"sum/{index}", [{"role": "user", "content": f"question <b>{index}</b>"}], answer="4", source="sum")
    return Trajectory(
        prompt=prompt,
        group_id=f"{step}/{index // 4}",
        sample=index % 4,
        prompt_ids=np.arange(3, dtype=np.int32),
        token_ids=np.arange(index + 1, dtype=np.int32),
        behavior_logprobs=np.zeros(index + 1, dtype=np.float32),
        versions=np.full(index + 1, step, dtype=np.int32),
        is_action=np.ones(index + 1, dtype=np.bool_),
        turn=np.zeros(index + 1, dtype=np.int32),
        response=response,
        finish_reason="stop" if index % 3 else "length",
        reward=reward,
        reward_parts={} if reward is None else {"last_number": reward},
        reward_error=None if reward is not None else "TimeoutError: <i>late</i>",
    )


def make_run(path: Path, steps: int, total: int | None = None, samples_every: int = 1) -> RunDirectory:
    """A synthetic run: accuracy rises from 0.25 to 0.75 in `steps` steps of 2 seconds after 10 seconds of start-up."""
    run = RunDirectory.create(path, CONFIG % (total or steps), seeds={"run": 0})
    run.write_metrics(0, {"eval/accuracy": 0.25, "time/eval_seconds": 1.0, "time/since_start_seconds": 11.0})
    run.write_samples(0, [make_trajectory(0, i, f"held-out {i}") for i in range(4)], heldout=True)
    for step in range(1, steps + 1):
        times = time_metrics(2.0, {"generate": 0.8, "train": 1.0, "sync": 0.15}, 11.0 + 2.0 * step)
        metrics = {
            "reward/mean": 0.2 + 0.6 * step / steps,
            "train/entropy_nats": 1 / step,
            "method/ratio": 1.0,
            **times,
        }
        if step == steps:
            metrics["eval/accuracy"] = 0.75
        run.write_metrics(step, metrics)
        if step % samples_every == 0:
            texts = [f"response {i} of step {step} {HOSTILE if i == 0 else ''}" for i in range(8)]
            rewards = [None if i == 7 else float(i % 2) for i in range(8)]
            written = [make_trajectory(step, i, *pair) for i, pair in enumerate(zip(texts, rewards, strict=True))]
            run.write_samples(step, written)
    return run


@dataclass
class Opened:
    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        if path is None and os.path.exists(playwright.chromium.executable_path):
            path = playwright.chromium.executable_path
        assert path is not None, "no Chromium found: install the system package chromium, or run playwright install"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        launched = playwright.chromium.launch(executable_path=path, args=flags)
        yield launched
        launched.close()


@pytest.fixture
def open_report(browser: Browser) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1366, "height": 850})

    def open_it(run: RunDirectory) -> Opened:
        opened = Opened(context.new_page())
        opened.page.on("console", lambda m: opened.errors.append(m.text) if m.type in ("error", "warning") else None)
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(write_report(run.path).resolve().as_uri())
        return opened

    yield open_it
    context.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("runs") / "a <b> & {{data}}", steps=12)


def test_the_page_draws_every_curve_without_errors_or_network(run: RunDirectory, open_report: Any) -> None:
    opened = open_report(run)
    assert opened.errors == []
    assert all(url.startswith(("file:", "data:")) for url in opened.requests)
    assert opened.texts("h1") == [run.path.name] and opened.page.title() == run.path.name
    drawn = {f.get_attribute("data-chart"): f for f in opened.page.locator("#charts figure").all()}
    assert {"Held-out accuracy", "Reward", "Entropy", "Probability ratio", "Share of other time"} <= set(drawn)
    for figure in drawn.values():
        assert figure.locator("svg path[d^='M']").count() >= 1
    tiles = opened.texts(".tile")
    assert any("0.250 → 0.750" in tile and "+0.500" in tile for tile in tiles)
    assert any("35 s" in tile and "start-up 10 s" in tile for tile in tiles)
    assert any("2.4 %" in tile for tile in tiles), "12 x 0.05 s of 25 s"
    assert any("2.0 s" in tile and "mean of 12" in tile for tile in tiles)
    assert opened.texts("#phase-table tbody tr")[0].split("\t")[:3] == ["train", "12 s", "34.3 %"]
    assert not opened.page.locator("#warnings").is_visible()
    assert not opened.page.locator("#reload-label").is_visible(), "the run is over"


def test_a_curve_is_where_its_numbers_are(run: RunDirectory, open_report: Any) -> None:
    opened = open_report(run)
    figure = opened.page.locator("figure[data-chart='Reward']")
    path = figure.locator("svg path").first.get_attribute("d").replace("M", "L").split("L")[1:]
    points = np.array([[float(number) for number in point.split(",")] for point in path])
    assert len(points) == 12
    steps, rewards = np.arange(1, 13), 0.2 + 0.6 * np.arange(1, 13) / 12
    for drawn, logged, sign in ((points[:, 0], steps, 1), (points[:, 1], rewards, -1)):
        slope, rest = np.polyfit(logged, drawn, 1)
        assert slope * sign > 0
        assert np.abs(slope * logged + rest - drawn).max() < 0.11  # pixels, written with one decimal
    figure.locator("svg").hover()
    tip = figure.locator(".tip").inner_text()
    assert "step 5" in tip and "reward/mean" in tip and "0.450" in tip


def test_the_horizontal_axis_can_be_minutes(run: RunDirectory, open_report: Any) -> None:
    opened = open_report(run)
    opened.page.click("[data-axis=minutes]")
    figure = opened.page.locator("figure[data-chart='Held-out accuracy']")
    assert "0.5" in figure.locator("svg text").all_text_contents()
    circles = [float(c.get_attribute("cx")) for c in figure.locator("circle").all()]
    assert len(circles) == 2 and circles[0] < circles[1]
    assert opened.errors == []


def test_the_sample_browser_shows_the_chosen_step_and_escapes_html(run: RunDirectory, open_report: Any) -> None:
    opened = open_report(run)
    page = opened.page
    page.select_option("#sample-step", "5")
    assert page.locator("#sample-list .row").count() == 8
    shown = page.locator("#sample-response").evaluate("node => node.textContent")
    assert shown == f"response 0 of step 5 {HOSTILE}"
    assert page.locator("#sample-prompt").inner_text() == "user:\nquestion <b>0</b>"
    assert page.evaluate("window.hacked") is None
    assert page.locator("#sample img, #sample script, #sample b").count() == 0

    page.select_option("#sample-filter", "errors")
    assert page.locator("#sample-list .row").count() == 1
    assert page.locator("#sample-error").inner_text() == "TimeoutError: <i>late</i>"
    page.select_option("#sample-filter", "passed")
    assert page.locator("#sample-list .row").count() == 3
    page.select_option("#sample-filter", "all")
    page.fill("#sample-query", "response 6")
    assert opened.texts("#sample-count") == ["1 of 8 responses"]
    assert "response 6 of step 5" in page.locator("#sample-response").inner_text()
    page.select_option("#sample-kind", "true")
    page.select_option("#sample-step", "0")
    page.fill("#sample-query", "")
    assert page.locator("#sample-response").inner_text() == "held-out 0"
    assert opened.errors == []


def test_the_sample_browser_obeys_the_keyboard(run: RunDirectory, open_report: Any) -> None:
    page = open_report(run).page
    response = page.locator("#sample-response")
    assert response.inner_text().startswith("response 0 of step 12")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert response.inner_text().startswith("response 1 of step 12")
    page.keyboard.press("[")
    assert response.inner_text().startswith("response 0 of step 11")
    page.keyboard.press("]")
    page.keyboard.press("]")  # there is no later step
    assert response.inner_text().startswith("response 0 of step 12")
    page.locator(".siblings button").nth(2).click()
    assert response.inner_text().startswith("response 2 of step 12")
    page.focus("#sample-query")
    page.keyboard.press("j")
    assert page.locator("#sample-query").input_value() == "j", "typing is not a command"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_just_begun(steps: int, tmp_path: Path, open_report: Any) -> None:
    run = make_run(tmp_path / "a", steps, total=50) if steps else RunDirectory.create(tmp_path / "a", CONFIG % 50)
    opened = open_report(run)
    assert opened.errors == []
    assert f"step {steps} of 50" in opened.page.locator("#subtitle").inner_text()
    assert opened.page.locator("#reload-label").is_visible()
    if steps:
        reward = opened.page.locator("figure[data-chart='Reward'] circle")
        assert reward.count() == 1, "a single point is a dot"
    else:
        assert "No step is done yet." in opened.page.locator("#charts").inner_text()


def test_values_that_are_null_or_not_finite(tmp_path: Path, open_report: Any) -> None:
    run = make_run(tmp_path / "a", steps=3, total=5)
    run.write_metrics(4, {"train/loss": math.nan, "train/gradient_norm": math.inf, "reward/errors": 2})
    with open(run.path / "metrics.jsonl", "a") as file:
        nulls = dict.fromkeys(("reward/mean", "train/loss", "time/since_start_seconds", "time/train_seconds"))
        file.write(json.dumps({"step": 5, **nulls, "from/another_version": 1.0}) + "\n")
    opened = open_report(run)
    assert opened.errors == []
    warned = opened.page.locator("#warnings").inner_text()
    assert "train/loss is not finite at step 4." in warned
    assert "train/gradient_norm is not finite at step 4." in warned
    assert "2 responses could not be scored, at step 4." in warned
    assert opened.page.locator("figure[data-chart='Gradient norm'] .not-finite").count() == 1
    assert "no definition" in opened.page.locator("#table").evaluate("node => node.textContent")
    opened.page.click("[data-axis=minutes]")
    assert opened.errors == []


def test_a_thousand_steps_stay_small_and_say_what_is_left_out(tmp_path: Path, open_report: Any) -> None:
    run = make_run(tmp_path / "a", steps=1000, samples_every=20)
    opened = open_report(run)
    assert opened.errors == []
    assert (run.path / "report.html").stat().st_size < 3_000_000
    options = opened.page.locator("#sample-step option")
    assert options.count() == report.FULL_STEPS + report.THINNED_STEPS
    assert "The samples of 7 steps are not shown; samples/ has all of them." in opened.texts("#omitted")[0]
    figure = opened.page.locator("figure[data-chart='Reward'] svg path")
    assert figure.first.get_attribute("d").count("L") == 999
    opened.page.select_option("#sample-step", "20")
    assert opened.page.locator("#sample-response").inner_text().startswith("response 0 of step 20")


def test_samples_are_cut_to_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    for step in range(1, 7):
        run.write_samples(step, [make_trajectory(step, i, "x" * 50_000) for i in range(20)])
    kept, omitted = collect_samples(run.path)
    assert [(entry["step"], len(entry["records"]), entry["of"]) for entry in kept] == [
        *((step, 16, 20) for step in (1, 2, 3)),
        *((step, 20, 20) for step in (4, 5, 6)),
    ]
    assert omitted == ["Of steps before the latest 3, the first 16 responses are shown."]
    text = kept[0]["records"][0]["response"]
    assert "[... 30000 characters not shown ...]" in text and len(text) < 20_100

    monkeypatch.setattr(report, "MAX_SAMPLE_CHARACTERS", 900_000)
    kept, omitted = collect_samples(run.path)
    assert [entry["step"] for entry in kept] == [5, 6], "the latest come first"
    assert omitted == ["The samples of 4 steps are not shown; samples/ has all of them."]


def test_thinned_rows_keep_both_ends_and_evaluations() -> None:
    rows: list[dict[str, float]] = [
        {"step": i, **({"eval/accuracy": 0.5} if i % 777 == 0 else {})} for i in range(9001)
    ]
    steps = [row["step"] for row in thinned_rows(rows)]
    assert len(steps) <= report.MAX_ROWS + 20
    assert steps == sorted(set(steps)) and {0, 9000, 777, 7770} <= set(steps)
    assert np.diff(steps).max() <= 6


def test_time_between_steps_is_not_lost() -> None:
    rows = [
        {"step": 0, "time/step_seconds": 3.0, "time/eval_seconds": 2.0, "time/since_start_seconds": 13.0},
        {"step": 1, "time/step_seconds": 4.0, "time/train_seconds": 3.5, "time/since_start_seconds": 20.0},
    ]
    seconds = phase_seconds(rows)
    assert (seconds["start-up"], seconds["eval"], seconds["train"]) == (10.0, 2.0, 3.5)
    assert seconds["other"] == pytest.approx(20.0 - 10.0 - 5.5), "1 s in step 0, 0.5 s in step 1, 3 s between them"
    assert sum(seconds.values()) == pytest.approx(20.0)


def test_the_command_line(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.path / "report.html")
    assert main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    empty = RunDirectory.create(tmp_path / "empty", "")
    assert main([str(empty.path), "--curve", str(tmp_path / "curve.svg")]) == 2
    assert "no metrics to draw" in capsys.readouterr().err
    assert not (tmp_path / "curve.svg").exists()


def test_the_live_report_takes_a_bounded_share_of_the_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=1)
    live = LiveReport(share=0.01)
    path = live(run.path)
    assert path == run.path / "report.html" and path.exists()
    before = path.stat().st_mtime_ns
    run.write_metrics(2, {"reward/mean": 0.5})
    assert live(run.path) == path and path.stat().st_mtime_ns == before, "too soon"
    live.not_before = 0.0
    assert live(run.path) == path and path.stat().st_mtime_ns > before


def test_a_broken_samples_file_is_an_error_not_an_empty_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=1)
    path = samples_path(run.path, 1)
    path.write_text('{"half": ')
    with pytest.raises(json.JSONDecodeError):
        write_report(run.path)


def test_secrets_of_configuration_and_command_line_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["main_rl.py", "--set", "reward.parts.0.params.request.api_key=sk-word"])
    secret = "extra: {api_key: sk-file, base_url: 'https://user:pass@host/v1'}\n"
    run = RunDirectory.create(tmp_path / "run", CONFIG % 3 + secret, seeds={"run": 0})
    page = write_report(run.path).read_text()
    assert "sk-word" not in page and "sk-file" not in page and "user:pass" not in page
    assert "api_key=***" in page and "***@host" in page
