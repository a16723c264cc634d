"""A comparison of methods, on run directories made here; in place of main_rl.py stands a program that copies them."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from benchmarks.compare_methods import Job, eval_every, main, parsed, planned, seconds_left, sole_user, train, waiting
from benchmarks.comparison_figure import band, draw
from benchmarks.comparison_report import Run, finished, markdown_table, report
from configs.blocks.rl import RLConfig
from configs.reading.load import load, to_yaml
from orchestration.metrics.tally import time_metrics
from orchestration.run.directory import RunDirectory

ROOT = Path(__file__).parent.parent.parent
STEPS = 10
FAKE_TRAINER = """
import pathlib, shutil, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
with open("order.txt", "a") as file:
    print(run.name, file=file)
prepared = pathlib.Path("prepared") / run.name
if not prepared.exists():
    run.mkdir(parents=True)
    sys.exit("the model caught fire")
shutil.copytree(prepared, run)
"""


@cache
def config_of(method: str, seed: int, steps: int) -> RLConfig:
    overrides = [
        f"run.seed={seed}",
        f"train.steps={steps}",
        "train.updates_per_step=2",
        f"eval.every={eval_every(steps)}",
    ]
    return load(ROOT / "configs" / f"{method}.yaml", RLConfig, overrides)


def make_run(
    path: Path, final: float, half: float = 0.5, steps: int = STEPS, stop_after: int | None = None, scale: float = 1.0
) -> Path:
    """<method>_seed<seed> with accuracies 0.25, `half`, `final`, rewards step/10, 4 s a step, evaluations 1 s."""
    method, seed = re.fullmatch(r"(\w+)_seed(\d+)", path.name).groups()
    run = RunDirectory.create(path, to_yaml(config_of(method, int(seed), steps)))
    judged = {0: 0.25, steps // 2: half, steps: final}
    for step in range((steps if stop_after is None else stop_after) + 1):
        evaluated = step in judged
        values = time_metrics(4.0 + evaluated, {"generate": 2.0, "eval": float(evaluated)}, 20.0 + 5.0 * step)
        if evaluated:
            values |= {"eval/accuracy": judged[step], "eval/greedy_accuracy": judged[step], "eval/prompts": 84.0}
        if step > 0:
            values |= {
                "reward/mean": scale * step / 10,
                "reward/pass_rate": step / 20,
                "rollout/responses": 128.0,
                "rollout/entropy_nats": 1.0 / step,
                "rollout/response_tokens": 8.0,
                "rollout/zero_variance_share": math.nan if step == steps else 0.25,
            }
            if method != "rloo":
                values["method/clip_fraction"] = 0.01 * step
        run.write_metrics(step, values)
    return path


def options_for(folder: Path, *arguments: str) -> argparse.Namespace:
    return parsed(["--steps", str(STEPS), "--out", str(folder), *arguments])


def read(path: Path) -> Run:
    method, seed = path.name.split("_seed")
    run = finished(path, method, int(seed))
    assert run is not None
    return run


@pytest.fixture
def three(tmp_path: Path) -> list[Run]:
    """grpo better than rloo with seed 0, worse with seed 1; dapo has seed 1 only and the highest accuracy."""
    finals = {"grpo_seed0": 0.8, "grpo_seed1": 0.6, "rloo_seed0": 0.75, "rloo_seed1": 0.7, "dapo_seed1": 0.9}
    return [read(make_run(tmp_path / name, final)) for name, final in finals.items()]


def cells(text: str, title: str) -> dict[str, dict[str, str]]:
    """The table below a heading: method -> column -> cell, rows in order."""
    section = text.split(f"## {title}")[1].split("##")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}


def test_accuracies_are_sorted_and_averaged_over_seeds(three: list[Run]) -> None:
    text = report(three, ["dapo seed 0"])
    table = cells(text, "Held-out greedy accuracy")
    assert list(table) == ["dapo", "rloo", "grpo"]
    assert table["rloo"] == {
        "method": "rloo", "final": "0.725", "seed 0": "0.750", "seed 1": "0.700", "at half": "0.500", "best": "0.725",
    }  # fmt: skip
    assert table["dapo"]["seed 0"] == "–" and table["dapo"]["final"] == "0.900"
    assert "1/84 = 0.012" in text and "Missing: dapo seed 0." in text
    assert "10 steps of 16 prompts x 8 responses, 2 updates each" in text


def test_best_is_each_runs_highest_evaluation(tmp_path: Path) -> None:
    runs = [read(make_run(tmp_path / f"grpo_seed{seed}", 0.6, half=half)) for seed, half in ((0, 0.9), (1, 0.5))]
    row = cells(report(runs, []), "Held-out")["grpo"]
    assert row["best"] == "0.750" and row["at half"] == "0.700" and row["final"] == "0.600"


def test_half_of_the_budget_never_looks_ahead(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "grpo_seed0", 0.6, half=0.9, steps=9))
    assert [step for step, _ in run.accuracy] == [0, 4, 9]
    assert cells(report([run], []), "Held-out")["grpo"]["at half"] == "0.900"


def test_differences_are_taken_seed_by_seed(three: list[Run]) -> None:
    table = cells(report(three, []), "Difference from grpo")
    assert list(table) == ["dapo", "rloo"]
    assert table["rloo"] == {
        "method": "rloo", "seed 0": "-0.050", "seed 1": "+0.100", "mean": "+0.025", "in prompts": "+2.1",
    }  # fmt: skip
    assert (table["dapo"]["seed 0"], table["dapo"]["mean"]) == ("–", "+0.300"), "seed 0 of dapo is missing, not 0"


def test_without_the_baseline_there_is_no_difference(three: list[Run]) -> None:
    assert "No run of grpo is there." in report([run for run in three if run.method != "grpo"], [])


def test_cost_and_behaviour(three: list[Run]) -> None:
    table = cells(report(three, []), "Cost and behaviour")
    assert table["grpo"] == {
        "method": "grpo",
        "whole, s": "70",
        "per step, s": "4.00",  # evaluations are left out
        "responses": "1280",
        "reward": "0.800",  # of steps 6 to 10
        "pass rate": "0.400",
        "entropy, nats": f"{(1 / 6 + 1 / 7 + 1 / 8 + 1 / 9 + 1 / 10) / 5:.3f}",
        "clip fraction": "0.0550",  # of all steps
        "response tokens": "8.0",
        "zero-variance share": "0.25",  # the NaN of the last step is left out
    }
    assert table["rloo"]["clip fraction"] == "–"


def test_rewards_of_other_parts_and_critic_warmup_are_noted(tmp_path: Path, three: list[Run]) -> None:
    text = report([*three, read(make_run(tmp_path / "ppo_seed0", 0.5))], [])
    assert "- dapo: the reward is made of other parts" in text
    warmup = config_of("ppo", 0, STEPS).critic.warmup_steps
    assert f"- ppo: only the critic learns in the first {warmup} steps" in text


def test_runs_of_other_budgets_are_not_put_in_one_table(tmp_path: Path) -> None:
    runs = [read(make_run(tmp_path / "grpo_seed0", 0.5)), read(make_run(tmp_path / "rloo_seed0", 0.5, steps=20))]
    with pytest.raises(ValueError, match=r"train.steps: \[10, 20\]"):
        report(runs, [])
    with pytest.raises(ValueError, match="no run is finished"):
        report([], [])


def test_tables_line_up() -> None:
    lines = markdown_table(["method", "a"], [["x", "1.00"], ["longer_name", "–"]])
    assert lines == [
        "| method      |    a |",
        "| ----------- | ---: |",
        "| x           | 1.00 |",
        "| longer_name |    – |",
    ]


def test_runs_are_interleaved_by_seed() -> None:
    jobs = planned(parsed(["--methods", "grpo,dapo", "--seeds", "0,3", "--set", "train.learning_rate=1e-5"]))
    assert [job.name for job in jobs] == ["grpo seed 0", "dapo seed 0", "grpo seed 3", "dapo seed 3"]
    assert jobs[1].path == Path("runs/compare/dapo_seed0")
    assert jobs[1].overrides == (
        "run.seed=0", "train.steps=30", "train.updates_per_step=2", "eval.every=5", "train.learning_rate=1e-5",
    )  # fmt: skip


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (2, 1), (20, 5), (30, 5), (80, 10), (34, 17)])
def test_half_of_the_budget_is_evaluated(steps: int, every: int) -> None:
    assert eval_every(steps) == every
    assert steps < 2 or (steps // 2) % every == 0


def test_time_left_goes_by_method_where_it_is_known() -> None:
    assert seconds_left(["grpo", "ppo", "ppo"], {"ppo": [100.0, 300.0]}) == 600.0
    assert seconds_left(["grpo", "ppo"], {"ppo": [100.0], "dapo": [300.0]}) == 300.0
    assert seconds_left(["grpo"], {}) is None


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the repository's configs and the program that copies prepared/<run>."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "main_rl.py").write_text(FAKE_TRAINER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_finished_runs_are_kept_and_half_finished_ones_made_again(workplace: Path) -> None:
    options = options_for(Path("out"), "--methods", "grpo,rloo,dapo,gspo", "--seeds", "0")
    make_run(workplace / "out" / "grpo_seed0", 0.8)
    make_run(workplace / "out" / "rloo_seed0", 0.8, stop_after=7)
    make_run(workplace / "out" / "dapo_seed0", 0.8, stop_after=STEPS)  # whole, but its last line is cut off
    metrics = workplace / "out" / "dapo_seed0" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert [job.method for job in waiting(planned(options))] == ["rloo", "dapo", "gspo"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "20"], "train.steps is 10, not 20"),
        (["--updates-per-step", "1"], "train.updates_per_step is 2, not 1"),
        (["--set", "train.learning_rate=1e-5"], "train.learning_rate is 3e-05, not 1e-05"),
    ],
)
def test_finished_runs_with_other_settings_are_never_mixed_in(
    workplace: Path, arguments: list[str], complaint: str
) -> None:
    make_run(workplace / "out" / "grpo_seed0", 0.8)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        waiting(planned(options_for(Path("out"), "--methods", "grpo", "--seeds", "0", *arguments)))


def test_a_failing_run_is_shown_and_the_others_go_on(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("grpo_seed0", "dapo_seed0", "rloo_seed1", "dapo_seed1"):
        make_run(workplace / "prepared" / name, 0.8)
    make_run(workplace / "prepared" / "grpo_seed1", 0.8, stop_after=6)  # ends with exit code 0 all the same
    command = ["--methods", "grpo,rloo,dapo", "--seeds", "0,1", "--steps", str(STEPS), "--out", "out"]
    assert main(command) == 1
    order = ["grpo_seed0", "rloo_seed0", "dapo_seed0", "grpo_seed1", "rloo_seed1", "dapo_seed1"]
    assert Path("order.txt").read_text().split() == order
    shown = capsys.readouterr()
    assert "    | the model caught fire" in shown.out and "FAILED with exit code 1" in shown.out
    assert "failed: rloo seed 0, grpo seed 1" in shown.err
    assert "Missing: rloo seed 0, grpo seed 1." in Path("out/comparison.md").read_text()
    assert "left for all" in shown.out

    for name in ("rloo_seed0", "grpo_seed1"):
        shutil.rmtree(workplace / "prepared" / name, ignore_errors=True)
        make_run(workplace / "prepared" / name, 0.8)
    Path("order.txt").unlink()
    assert main([*command, "--plot", "docs/methods.svg"]) == 0
    assert Path("order.txt").read_text().split() == ["rloo_seed0", "grpo_seed1"], "the others were finished"
    assert Path("out/rloo_seed0.unfinished1").is_dir()
    assert "caught fire" in Path("out/rloo_seed0.unfinished1.log").read_text()
    assert "Missing" not in capsys.readouterr().out
    assert Path("docs/methods.svg").is_file()


def test_report_only_runs_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(workplace / "runs" / "compare" / "grpo_seed0", 0.8)
    assert main(["--report-only"]) == 0  # its steps are 10, not the default 30: what is there counts
    assert not Path("order.txt").exists()
    text = Path("runs/compare/comparison.md").read_text()
    assert text in capsys.readouterr().out and cells(text, "Held-out")["grpo"]["final"] == "0.800"


def test_mistakes_end_it_before_anything_runs(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--methods", "grpo,gsppo", "--out", "out"]) == 2
    assert "configs/gsppo.yaml" in capsys.readouterr().err
    assert main(["--methods", "grpo", "--updates-per-step", "3", "--out", "out"]) == 2
    assert "do not split evenly" in capsys.readouterr().err
    assert main(["--report-only", "--out", "nowhere"]) == 2
    assert not Path("order.txt").exists() and not Path("out").exists()
    for arguments in (["--seeds", "0,x"], ["--methods", ","], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            parsed(arguments)


def test_two_comparisons_do_not_share_a_folder(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sole_user(workplace / "out"):
        assert main(["--methods", "grpo", "--seeds", "0", "--out", "out"]) == 2
    assert "another comparison is running in out" in capsys.readouterr().err
    assert not Path("order.txt").exists()


def test_an_interrupted_comparison_ends_its_run(workplace: Path) -> None:
    (workplace / "main_rl.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('ended', 'w').close(), sys.exit(130)))\n"
        "open('began', 'w').close()\n"
        "time.sleep(60)\n"
    )

    def interrupt_once_begun(*_: object) -> None:
        if Path("began").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt_once_begun)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    Path("out").mkdir()
    try:
        with pytest.raises(KeyboardInterrupt):
            train(Job("grpo", 0, Path("out/grpo_seed0"), "configs/grpo.yaml", ()))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert Path("ended").exists()


def test_the_figure_has_every_method_and_is_the_same_every_time(three: list[Run]) -> None:
    svg = draw(three)
    assert svg == draw(list(reversed(three)))
    texts = [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    for title in ("dapo 0.900", "rloo 0.725", "grpo 0.700", "held-out accuracy", "other reward parts"):
        assert texts.count(title) == 1, title
    assert any("mean of 2 seeds" in text and "Grey: grpo" in text for text in texts)
    assert "<dc:date>" not in svg and "Matplotlib v" not in svg


def test_a_band_reaches_from_the_lowest_to_the_highest_seed() -> None:
    curves = [[(0, 0.25), (5, 0.5)], [(0, 0.25), (5, 0.75), (10, 1.0)]]
    assert band(curves) == [(0, 0.25, 0.25, 0.25), (5, 0.625, 0.5, 0.75), (10, 1.0, 1.0, 1.0)]


def test_one_run_can_be_drawn(tmp_path: Path) -> None:
    assert "one seed" in draw([read(make_run(tmp_path / "grpo_seed0", 0.8))])


def test_help_says_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for word in ("Cost:", "Budget:", "--report-only", "runs/compare", "docs/methods_compare.svg"):
        assert word in shown
