"""Methods do three real steps on two trainer ranks and an engine; so does what may stand around a method. `make test` takes
one method of each shape, `make soak` every one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from algs.introspection.method_facts import made_up_tokens, with_update_sums
from algs.method import PolicyMethod
from configs.reading.files import read_job
from configs.reading.load import method_for
from orchestration.run.samples import read_samples
from plugins.kinds import find, listed
from unit_tests.e2e.shared_stack import RANKS, ROOT, STEPS, UPDATES, Done, SharedStack, variant

pytestmark = pytest.mark.e2e

METHODS = sorted(name for name, entry in listed("method").items() if entry.has_advantages)
MAX_NEW_TOKENS = 8
PROBE_TOLERANCE_NATS = 0.002


def of_file(name: str) -> dict[str, Any]:
    """What configs/<name>.yaml says of the method and what stands around it, for the small job's data, model and reward.

    A method without such a file runs under its defaults.
    """
    default = read_job(ROOT / "configs" / "grpo.yaml")[0]
    own = ROOT / "configs" / f"{name}.yaml"
    job = read_job(own)[0] if own.is_file() else {"algorithm": {"name": name}, "reward": default["reward"]}
    block = {key: job[key] for key in ("algorithm", "objective", "critic") if key in job}
    for room, keys in {
        "rollout": ("filters", "max_refill_rounds"), "model": ("float32_head",), "data": ("retire_pass_rate",),
        "train": ("drop_zero_variance_groups",),
    }.items():  # fmt: skip
        block[room] = {key: job[room][key] for key in keys if key in job.get(room, {})}
    if "warmup_steps" in job.get("critic", {}):
        block["critic"]["warmup_steps"] = 1  # of three steps
    of_the_task = [part["function"] for part in default["reward"]["parts"]]
    shaping = [part for part in job["reward"]["parts"] if part["function"] not in of_the_task]
    for part in shaping:
        if "max_tokens" in part["params"]:
            part["params"] |= {"max_tokens": MAX_NEW_TOKENS, "buffer_tokens": MAX_NEW_TOKENS // 2}
    block["reward"] = {"parts": [{"function": "exact_match"}, *shaping]}
    return block


def check(done: Done, *promised: str) -> None:
    """Three whole steps: finite numbers, an engine that follows the trainer, weights that move when there is a signal."""
    method, rows = method_for(done.config), done.rows
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert max(row["sync/probe_gap_mean"] for row in rows) < PROBE_TOLERANCE_NATS
    names = {f"method/{name}" for name in method.loss(with_update_sums(method, made_up_tokens())).metrics} | set(
        promised
    )
    learned = [step for step in range(1, STEPS + 1) if rows[step]["train/empty_updates"] < UPDATES]
    assert len(learned) >= 2, "hardly any signal in the small batch: nothing is tested"
    has_critic = "values" in method.needs()
    warmup = done.config.critic.warmup_steps if has_critic else 0
    for step in range(1, STEPS + 1):
        moves = step in learned and step > warmup
        assert (done.weights[step] != done.weights[step - 1]) == moves
        assert rows[step].get("train/skipped_updates", 0) == 0
        if step in learned:
            assert names <= rows[step].keys()
        if moves and rows[step]["train/empty_updates"] == 0 and "method/ratio" in names:
            assert rows[step]["method/ratio"] != 1, "the second update meets other weights than pi_old"
        versions = {version for sample in read_samples(done.path, step) for version, _ in sample["versions"]}
        synced = sum(before < step for before in learned)
        assert versions == {synced}, "the engine answers with the last step's weights"
        assert rows[step].get("train/staleness_max", 0) == 0
    assert max(abs(rows[step]["train/loss"]) for step in learned) > 1e-6
    assert max(rows[step]["train/micro_batches"] for step in learned) > 1
    if has_critic:
        for step in learned:
            assert rows[step]["critic/loss"] > 0
            assert {"critic/explained_variance", "critic/value_mean"} <= rows[step].keys()
            assert ("critic/gradient_norm" in rows[step]) == (done.config.critic.kind == "separate")


def shape_of(name: str) -> str:
    """Return what a method asks of a job. Methods that ask the same differ in a formula, which unit tests hold."""
    block = of_file(name)
    cls = find("method", block.pop("algorithm")["name"])
    return f"{sorted(cls(cls.Params()).needs())} {cls.update_sums is PolicyMethod.update_sums} {block}"


def by_shape() -> list[Any]:
    """Return the methods, the first of each shape for `make test`."""
    first = {shape_of(name): name for name in reversed(METHODS)}
    return [name if name in first.values() else variant(name) for name in METHODS]


@pytest.mark.parametrize("name", by_shape())
def test_method(stack: SharedStack, name: str) -> None:
    """Alone catches a method whose needs, as its YAML file writes them, a real job does not meet."""
    done = stack.run(of_file(name))
    assert done.config.train.ranks == RANKS
    check(done)


VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # what is laid over the job, metrics it must then have
    "critic on the policy's trunk": (of_file("ppo") | {"critic": {"kind": "shared", "warmup_steps": 1}}, ()),
    "KL in the loss": ({"objective": {"kl": {"coef": 0.05, "estimator": "k2"}}}, ("objective/kl_ref_nats",)),
    "truncated importance sampling": (
        {"objective": {"corrections": [{"function": "token_truncate", "params": {"cap": 2.0}}]}},
        ("objective/correction_weight", "objective/rejected_share"),
    ),
    "old log-probabilities of the engine": ({"objective": {"old_logprobs": "engine"}}, ()),
    "ZeRO-3": ({"train": {"zero_stage": 3}}, ()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_around_a_method(stack: SharedStack, name: str) -> None:
    """Alone catches a part of the objective, a critic or a ZeRO stage that works in one process only."""
    block, promised = VARIANTS[name]
    done = stack.run(block)
    check(done, *promised)
    if name == "KL in the loss":
        kl = [row["objective/kl_ref_nats"] for row in done.rows[1:]]
        assert 0 < kl[0] < kl[-1], "the policy leaves the reference"


def test_kl_in_the_reward(stack: SharedStack) -> None:
    """Alone catches a penalty that does not reach the advantages once the policy has left the reference."""
    kl = {"coef": 1.0, "estimator": "k1", "placement": "reward"}
    done = stack.run({"algorithm": {"name": "rloo"}, "objective": {"kl": kl}})
    check(done)

    def spread(step: int) -> float:
        """Largest difference of advantages between two responses to a prompt that were paid alike."""
        alike: dict[tuple[str, float], list[float]] = {}
        for sample in read_samples(done.path, step):
            alike.setdefault((sample["group"], sample["reward"]), []).append(sample["advantage"])
        return max(max(found) - min(found) for found in alike.values())

    assert spread(1) < 1e-4
    assert spread(STEPS) > 0.01
