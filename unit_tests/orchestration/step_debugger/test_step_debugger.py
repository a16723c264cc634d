"""A captured optimizer step runs again, bit-equal, without anything of the run; its table and comparisons say what is
so."""

import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from playwright.sync_api import sync_playwright
from transformers import AutoModelForCausalLM

from orchestration.step_debugger import page
from orchestration.step_debugger.token_table import TokenTable
from unit_tests.orchestration.ranks.step_debugger_rank import CASES, TEMPERATURE
from unit_tests.orchestration.step_debugger.captured_steps import (
    CAP,
    LOSS_WEIGHT,
    commands,
    members,
    packed,
    run_commands,
    step_of,
    trajectories,
)
from unit_tests.tiny_model import WORDS, write_tiny_model

CLIP = 0.2


@pytest.fixture(scope="module")
def results(tmp_path_factory, rank_groups):
    folder = tmp_path_factory.mktemp("captured")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    shutil.copytree(folder / "model", folder / "base")
    for ranks in (1, 2):
        (folder / f"packed_{ranks}.pkl").write_bytes(pickle.dumps(packed(ranks)))
        rank_groups[ranks].run("unit_tests.orchestration.ranks.step_debugger_rank", folder)
    shutil.rmtree(folder / "model")  # nothing of the run may be needed, but for the base of a LoRA
    asked = commands(folder)
    (folder / "commands.pkl").write_bytes(pickle.dumps(list(asked.values())))
    run_commands(folder)
    found = pickle.loads((folder / "results.pkl").read_bytes())
    return folder, dict(zip(asked, found, strict=True))


@pytest.fixture(scope="module")
def exact(results):
    """Update 1 of case grpo from the formulas, in float64: numbers of its tokens, and gradients of GRPO and CISPO."""
    folder, _ = results
    model = AutoModelForCausalLM.from_pretrained(
        step_of(folder, "grpo") / "policy", dtype=torch.float64, attn_implementation="eager"
    )
    (step, _, _) = pickle.loads((step_of(folder, "grpo") / "rank_0.pkl").read_bytes())
    numbers, losses = [], {"grpo": 0.0, "cispo": 0.0}
    made = trajectories(1)
    for batch in step.batches:
        for row, index in enumerate(batch.trajectory_index):
            own, t = batch.sequence == row, made[index]
            ids = torch.tensor(np.concatenate([t.prompt_ids, t.token_ids])[None].astype(np.int64))
            logits = model(ids, use_cache=False).logits[0, len(t.prompt_ids) - 1 : -1] / TEMPERATURE
            logprob = torch.log_softmax(logits, -1).gather(1, torch.tensor(t.token_ids[:, None].astype(np.int64)))[:, 0]
            ratio = torch.exp(logprob - torch.tensor(batch.columns["old_logprobs"][own]).double())
            a = torch.tensor(batch.columns["advantages"][own]).double()
            surrogate = torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
            losses["grpo"] += -LOSS_WEIGHT * torch.where(a < 0, surrogate.maximum(3 * a), surrogate).sum()
            losses["cispo"] += -LOSS_WEIGHT * (ratio.detach().clamp(max=CAP) * a * logprob).sum()
            rho = batch.columns["old_logprobs"][own] - batch.columns["behavior_logprobs"][own]
            for position in range(len(a)):
                one = {"advantage": a[position], "logprob": logprob[position], "ratio": ratio[position]}
                numbers.append(
                    (int(index), position, {k: v.item() for k, v in one.items()} | {"rho": np.exp(rho[position])})
                )
    gradients = {}
    for name, loss in losses.items():
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        gradients[name] = torch.cat([g.flatten() for g in found])
    numbers.sort(key=lambda item: item[:2])
    return {k: np.array([one[k] for _, _, one in numbers]) for k in numbers[0][2]}, gradients


def table(result, which: int = 0):
    return result["tables"][which]


def live_norm(result) -> float:
    return float(re.search(r"train/gradient_norm +(\S+)", result["out"])[1])


@pytest.mark.parametrize("update", [0, 1])
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][-1] == 1])
def test_one_rank_is_bit_equal(results, case, update):
    result = results[1][f"{case} {update}"]
    assert result["code"] == 0, result["error"]
    assert re.search(r"All \d+ metrics are bit-equal to the live step's\.", result["out"])
    assert "differs" not in result["out"]
    for name in ("train/loss", "train/gradient_norm", *(["critic/loss"] if case.startswith("ppo") else [])):
        assert re.search(rf"{name} +\S+ +\S+ +bit-equal", result["out"])


@pytest.mark.parametrize("update", [0, 1])
def test_ranks_run_in_sequence_and_the_order_of_sums_is_told(results, update):
    result = results[1][f"two_ranks {update}"]
    assert result["code"] == 0
    assert "2 ranks ran one after the other" in result["out"]
    assert "train/micro_batches" not in result["out"]
    for amount in re.findall(r"differs by (\S+),", result["out"]):
        assert float(amount) < 1e-5
    assert len(table(result)) == sum(t.action_tokens for t in members(update, ranks=2))


@pytest.mark.parametrize("name", ["nudged", "weight"])
def test_a_step_that_was_changed_is_not_bit_equal(results, name):
    """One advantage by a ten-thousandth, or one weight."""
    result = results[1][name]
    assert result["code"] == 1
    assert "NOT bit-equal" in result["out"]
    assert re.search(r"train/\w+ +\S+ +\S+ +differs by", result["out"])


def test_the_table_is_right(results, exact):
    numbers, gradients = exact
    found = table(results[1]["grpo 1"])
    made = trajectories(1)
    assert found["token"].tolist() == [WORDS[i] for t in made for i in t.token_ids]
    assert found["trajectory"].tolist() == [i for i, t in enumerate(made) for _ in t.token_ids]
    assert found["position"].tolist() == [p for t in made for p in range(len(t.token_ids))]
    assert found["group"].tolist() == [i // 3 for i, t in enumerate(made) for _ in t.token_ids]
    assert found["staleness"].tolist() == [2 - v for t in made for v in t.versions]
    assert found["reward"].tolist() == [t.reward for t in made for _ in t.token_ids]
    for name in ("advantage", "logprob", "ratio", "rho"):
        np.testing.assert_allclose(found[name], numbers[name], rtol=2e-5, atol=1e-5, err_msg=name)
    a, r = numbers["advantage"], numbers["ratio"]
    clipped = np.where(a > 0, r > 1 + CLIP, (r < 1 - CLIP) | (r > 3))
    assert 0 < clipped.sum() < len(a), "a step that shows both"
    assert (found["state"] == np.where(clipped, "clipped", "")).all()
    weight = np.where(clipped, 0, r * a)
    np.testing.assert_allclose(found["weight"], weight, rtol=5e-5, atol=1e-5)
    np.testing.assert_allclose(found["share"], np.abs(weight) / np.abs(weight).sum(), rtol=1e-4, atol=1e-6)
    surrogate = np.maximum(np.minimum(r * a, np.clip(r, 0.8, 1.2) * a), np.where(a < 0, 3 * a, -np.inf))
    np.testing.assert_allclose(found["loss"], -surrogate, rtol=5e-5, atol=1e-5)
    assert live_norm(results[1]["grpo 1"]) == pytest.approx(float(gradients["grpo"].norm()), rel=1e-4)


def test_another_method_on_the_same_batch(results, exact):
    numbers, gradients = exact
    result = results[1]["page"]
    told = re.search(
        r"cosine (\S+) over all trained parameters; norm (\S+) under GRPO, (\S+) under CISPO\(ratio_cap=1.05\)\.",
        result["out"],
    )
    cosine = torch.nn.functional.cosine_similarity(gradients["grpo"], gradients["cispo"], dim=0)
    expected = [float(x) for x in (cosine, gradients["grpo"].norm(), gradients["cispo"].norm())]
    assert [float(x) for x in told.groups()] == pytest.approx(expected, rel=1e-4)
    a, r = numbers["advantage"], numbers["ratio"]
    np.testing.assert_allclose(table(result, 1)["weight"], np.minimum(r, CAP) * a, rtol=5e-5, atol=1e-5)
    clipped = int((table(result)["state"] == "clipped").sum())
    assert (
        f"Of {len(a)} tokens that change side: {clipped} no longer clipped. Clipped or rejected: {clipped} → 0."
        in result["out"]
    )
    assert "Advantages and the weights of the aggregation are the live step's" in result["out"]


def test_a_method_that_needs_the_whole_step_gets_its_sums(results, exact):
    numbers, _ = exact
    rho = numbers["ratio"] * numbers["rho"]  # pi / mu
    ess = rho.sum() ** 2 / (len(rho) * np.square(rho).sum())
    weight = np.minimum(rho, ess) * numbers["advantage"] - (1 - ess) * rho * np.log(rho)
    np.testing.assert_allclose(table(results[1]["p3o instead"], 1)["weight"], weight, rtol=1e-3, atol=1e-3)


def test_methods_that_fit_and_those_that_do_not(results):
    _, found = results
    assert "Poisonable in place of GRPO: gradients of the policy loss have cosine 1 over" in found["own"]["out"]
    assert found["grpo instead"]["code"] == 0
    assert "gradients of the policy loss have cosine 1 over" in found["grpo of adapters"]["out"]
    assert live_norm(found["grpo of adapters"]) == pytest.approx(
        float(re.search(r"; norm (\S+) under", found["grpo of adapters"]["out"])[1]), rel=0.02
    )
    assert "off-policy corrections are left out for it" in found["aipo instead"]["out"]
    assert (table(found["aipo instead"])["state"] == "rejected").any()
    assert not (table(found["aipo instead"], 1)["state"] == "rejected").any()
    assert found["ppo instead"]["code"] == 2
    assert (
        "PPO needs a critic's values, which the captured step does not have: it ran GRPO"
        in found["ppo instead"]["error"]
    )


def test_what_is_not_finite_is_named_and_comes_first(results):
    _, found = results
    nonfinite = found["nonfinite 1"]
    said = re.search(
        r"The first number that is not finite: advantage of token (\d+) \('(\S+)'\) of response (\d+) is inf\. "
        r"The column advantage is not finite on 1 of \d+ tokens\.",
        nonfinite["out"],
    )
    rows = nonfinite["out"].split("state")[-1].split("\n")
    assert rows[1].split()[:3] == [said[3], said[1], f"'{said[2]}'"]
    assert "captured because it was not finite" in nonfinite["out"]
    assert "The first number that is not finite: reward of response " in found["reward"]["out"]
    assert "first number that is not finite: logprob of token 0" in found["nonfinite weight"]["out"]
    assert "so already before the step: model.norm.weight" in found["nonfinite weight"]["out"]
    assert re.search(
        r"the gradients of \d+ of \d+ parameters are not, the last of these being model\.", found["gradient"]["out"]
    )
    assert "train/gradient_norm alone is not: too large to be squared" in found["norm"]["out"]


def test_sorting_choosing_and_listing(results):
    folder, found = results
    ratios = sorted(table(found["sorted"])["ratio"])[:3]
    printed = [line.split()[1] for line in found["sorted"]["out"].splitlines()[-3:]]
    assert printed == [f"{ratio:.4g}" for ratio in ratios]
    assert (
        found["one response"]["out"].splitlines()[-trajectories(1)[4].action_tokens :]
        == ["         4"] * trajectories(1)[4].action_tokens
    )
    for update in (0, 1):
        assert str(step_of(folder, "grpo", update)) in found["list"]["out"]


def test_the_debugger_stops_before_the_largest_loss(results):
    _, found = results
    where, tokens = found["breakpoint"]["stopped"]
    losses = table(found["breakpoint"])["loss"]
    largest = np.abs(losses).argmax()
    assert where == "step_into"
    assert tokens.logprobs.requires_grad
    assert table(found["breakpoint"])["logprob"][largest] in tokens.logprobs.detach().numpy()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "absent holds no captured step"),
        ("half", "rank_1.pkl is missing: the step ran on 2 ranks"),
        ("older", "rank_0.pkl does not fit this version of the code ('MicroBatch' object has no attribute 'rewards')"),
        ("no column", "--sort shares: no such column here; there are token, trajectory"),
        ("no trajectory", "--trajectory 9: no such response; there are 0 to 8"),
        ("lone set", "--set gives a parameter of the method in --algorithm, which is missing"),
        ("no method", "cispo"),
    ],
)
def test_mistakes_are_explained(results, name, message):
    result = results[1][name]
    assert result["code"] == 2
    assert result["error"].splitlines()[-1].startswith("error: ")
    assert message in result["error"].splitlines()[-1]


def test_the_page_sorts_and_filters_and_asks_nobody(results):
    folder, found = results
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    path = next((p for name in names if (p := shutil.which(name))), None)
    requests, errors = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))

        def column(name: str) -> list[str]:
            return page.locator(f"#tokens td.{name}").all_inner_texts()

        page.goto((folder / "step.html").as_uri())
        live = table(found["page"])
        shares = [float(text.removesuffix(" %")) for text in column("share")]
        assert len(shares) == len(live)
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == pytest.approx(100 * live["share"].max(), abs=0.01)
        for _ in range(2):
            page.locator("#tokens th button", has_text=re.compile("^ratio$")).click()
        ratios = [float(text) for text in column("ratio")]
        assert ratios == sorted(ratios)
        page.select_option("#filter", "clipped or rejected")
        assert column("state") == ["clipped"] * (live["state"] == "clipped").sum()
        page.select_option("#filter", "advantage below 0")
        assert len(column("share")) == page.locator("#tokens tr.down").count() == (live["advantage"] < 0).sum()
        page.select_option("#filter", "all")
        page.select_option("#scope", "4")
        assert column("trajectory") == ["4"] * trajectories(1)[4].action_tokens
        page.locator("#tokens tbody tr").first.click()
        assert page.locator("#text span").all_inner_texts() == [WORDS[i] for i in trajectories(1)[4].token_ids]
        assert page.locator("#text .prompt").inner_text() == " ".join(WORDS[i] for i in trajectories(1)[4].prompt_ids)
        assert page.locator(".picked").count() == 2

        page.goto((folder / "nonfinite.html").as_uri())
        assert "advantage of token" in page.locator("#findings li.bad").inner_text()
        assert column("advantage")[0] == "Infinity"
        browser.close()
    assert errors == []
    assert all(url.startswith("file:") for url in requests)


def test_a_large_step_is_cut_to_whole_responses_by_share(monkeypatch):
    monkeypatch.setattr(page, "MAX_TOKENS", 5)
    numbers = {"trajectory": [0, 0, 1, 1, 2, 2], "share": [0.1, 0.2, 0.0, 0.1, 0.6, 0.0], "advantage": [1.0] * 6}
    table = TokenTable({name: np.array(values) for name, values in numbers.items()})
    assert page.rows_on_page(table).tolist() == [0, 1, 4, 5]
    monkeypatch.setattr(page, "MAX_TOKENS", 6)
    assert page.rows_on_page(table).tolist() == list(range(6))


def test_a_missing_reward_spoils_nothing_by_itself():
    numbers = {
        "trajectory": [0, 1, 2],
        "share": [0.5, 0.2, 0.3],
        "reward": [np.nan, 1, 1],
        "advantage": [1.0, 1.0, np.nan],
    }
    table = TokenTable({name: np.array(values) for name, values in numbers.items()})
    assert table.first_nonfinite() == ("advantage", 2)
    assert table.order("share").tolist() == [2, 0, 1]
    assert table.order("share", ascending=True).tolist() == [2, 1, 0]
