"""Refill rounds: how many prompts are asked in place of filtered groups, under which names and seeds, and what is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RLConfig
from data_feeds.sampler import ShuffledPrompts
from orchestration.evaluation import evaluation_tally
from orchestration.metrics import Tally
from orchestration.refill import StepFeed
from orchestration.rollout_group import Rollouts, step_askings
from orchestration.rollout_metrics import rollout_tally
from orchestration.run_directory import RunDirectory, read_metrics, read_samples
from rollouts.records import Group, Prompt, Trajectory
from rollouts.sampling import Sampling

SAMPLES = 4


class ScriptedRollouts:
    """Answers from a script: `passes(prompt id, round)` responses of a group are paid 1, the others 0."""

    def __init__(self, passes: Callable[[str, int], int]) -> None:
        self.passes = passes
        self.rounds: list[list[str]] = []  # ids asked, per call
        self.group_ids: list[str] = []
        self.seeds: list[int] = []

    def generate(
        self, prompts: list[Prompt], samples: int, sampling: Sampling, step: int, label: str,
        earlier: Sequence[Prompt] = (),
    ) -> Rollouts:  # fmt: skip
        groups = []
        for asking in step_askings(prompts, samples, f"{label}-{step}", earlier):
            right = self.passes(asking.prompt.prompt_id, len(self.rounds))
            made = [response(asking.prompt, asking.group_id, i, float(i < right)) for i in range(samples)]
            groups.append(Group(asking.group_id, asking.prompt, made))
            self.group_ids.append(asking.group_id)
            self.seeds += [
                sampling.request_seed(step, asking.prompt.prompt_id, asking.first_sample + i) for i in range(samples)
            ]
        self.rounds.append([p.prompt_id for p in prompts])
        return Rollouts(groups, generate_seconds=2.0, reward_seconds=0.5)


def response(prompt: Prompt, group_id: str, sample: int, reward: float) -> Trajectory:
    one = np.zeros(1, np.int32)
    return Trajectory(
        prompt, group_id, sample, one, one, np.zeros(1, np.float32), one, np.ones(1, np.bool_), one, reward=reward,
        reward_parts={"right": reward}, finish_reason="stop",
    )  # fmt: skip


def feed(
    passes: Callable[[str, int], int], filters: list[Any], prompts: int = 40, step_prompts: int = 4, **rollout: Any
) -> tuple[StepFeed, ScriptedRollouts, list[str]]:
    config = RLConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"sources": [{"reasoning_gym": "chain_sum"}]},
            "algorithm": {"name": "grpo"},
            "rollout": {
                "prompts_per_step": step_prompts, "responses_per_prompt": SAMPLES, "filters": filters, **rollout,
            },
            "reward": {"parts": [{"function": "last_number"}]},
        }
    )  # fmt: skip
    notes: list[str] = []
    scripted = ScriptedRollouts(passes)
    sampler = ShuffledPrompts([Prompt(f"p/{i}", []) for i in range(prompts)], seed=0)
    sampling = Sampling(max_new_tokens=8, seeded=True)
    return StepFeed(config, scripted, sampler, sampling, notes.append), scripted, notes  # type: ignore[arg-type]


def trained(made: Rollouts) -> int:
    return sum(bool(group.trained) for group in made.groups)


def test_without_filters_one_round_and_nothing_said() -> None:
    one, scripted, notes = feed(lambda prompt, turn: SAMPLES, [])
    made, tally = one.gather(1)
    assert len(made.groups) == 4 and trained(made) == 4 and len(scripted.rounds) == 1
    assert tally.means() == {} and notes == []


def test_exactly_the_missing_are_asked_until_the_batch_is_full() -> None:
    # Round 0 loses 3 of 4, round 1 loses 2 of 3, round 2 loses none of 2.
    lost = {0: 3, 1: 2, 2: 0}
    counts: dict[int, int] = {}

    def passes(prompt: str, turn: int) -> int:
        counts[turn] = counts.get(turn, 0) + 1
        return SAMPLES if counts[turn] <= lost[turn] else 1

    one, scripted, notes = feed(passes, ["zero_variance"])
    made, tally = one.gather(1)
    assert [len(ids) for ids in scripted.rounds] == [4, 3, 2] and trained(made) == 4 and notes == []
    assert tally.means() == {
        "rollout/dropped_responses": 5 * SAMPLES, "rollout/dropped_in_baseline": 0, "rollout/filtered_groups": 5,
        "rollout/filtered/zero_variance": 5 * SAMPLES, "rollout/refill_rounds": 2, "rollout/refilled_groups": 5,
        "rollout/unfilled_groups": 0,
    }  # fmt: skip
    assert (made.generate_seconds, made.reward_seconds) == (6.0, 1.5)


def test_rewards_and_responses_are_counted_before_filtering() -> None:
    one, _, _ = feed(lambda prompt, turn: SAMPLES if turn == 0 else 1, ["zero_variance"])
    made, filtered = one.gather(1)
    means = rollout_tally(made.groups, 0.5).merge(filtered).means()
    assert means["rollout/responses"] == 8 * SAMPLES and means["rollout/zero_variance_groups"] == 4
    assert means["reward/mean"] == pytest.approx((1 + 1 / SAMPLES) / 2)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_the_cap_holds_and_what_is_missing_is_said_once(cap: int) -> None:
    one, scripted, notes = feed(lambda prompt, turn: 0, ["pass_rate"], max_refill_rounds=cap)
    for step in (1, 2):
        made, tally = one.gather(step)
        assert trained(made) == 0
        assert tally.means()["rollout/unfilled_groups"] == 4 and tally.means()["rollout/refill_rounds"] == cap
    assert len(scripted.rounds) == 2 * (1 + cap)
    assert len(notes) == 1 and f"step 1: 4 of 4 groups are missing after {cap} refill rounds" in notes[0]


def test_a_filter_that_does_not_refill_leaves_the_step_smaller() -> None:
    one, scripted, notes = feed(lambda prompt, turn: 0, [{"function": "zero_variance", "refill": False}])
    made, tally = one.gather(1)
    assert len(scripted.rounds) == 1 and trained(made) == 0 and notes == []
    assert tally.means()["rollout/filtered_groups"] == 4 and "rollout/unfilled_groups" not in tally.means()


def test_a_prompt_asked_again_in_a_step_gets_other_samples() -> None:
    one, scripted, _ = feed(lambda prompt, turn: 0, ["zero_variance"], prompts=3)
    one.gather(5)
    assert len(scripted.group_ids) == len(set(scripted.group_ids)) == 16
    assert len(scripted.seeds) == len(set(scripted.seeds)) == 16 * SAMPLES, "3 prompts were asked 16 times"
    first = Sampling(max_new_tokens=8, seeded=True)
    assert scripted.seeds[0] == first.request_seed(5, scripted.rounds[0][0], 0), "a first asking is seeded as ever"


def test_the_sampler_sees_every_round() -> None:
    one, scripted, _ = feed(lambda prompt, turn: SAMPLES if turn == 0 else 1, ["zero_variance"])
    seen: list[list[str]] = []
    one.sampler.observe = lambda groups: seen.append([g.prompt.prompt_id for g in groups])  # type: ignore[method-assign]
    one.gather(1)
    assert seen == scripted.rounds and len(seen) == 2


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_trained_and_unfilled_make_a_step(step_prompts: int, cap: int, random: Any) -> None:
    one, scripted, _ = feed(
        lambda prompt, turn: random.randrange(SAMPLES + 1), ["pass_rate"], step_prompts=step_prompts,
        max_refill_rounds=cap,
    )  # fmt: skip
    made, tally = one.gather(1)
    means = Tally.merged([tally]).means()
    assert trained(made) + means["rollout/unfilled_groups"] == step_prompts, "never a surplus"
    assert len(made.groups) == step_prompts + means["rollout/refilled_groups"]
    assert len(scripted.rounds) == 1 + means["rollout/refill_rounds"] <= 1 + cap


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("error")
def test_rewards_that_are_not_finite_pass_through_tallies_filters_and_files(reward: float, tmp_path: Path) -> None:
    one, scripted, _ = feed(lambda prompt, turn: 1, ["zero_variance", "pass_rate", "overlong"])
    generate = scripted.generate

    def broken(*arguments: Any, **named: Any) -> Rollouts:
        made = generate(*arguments, **named)
        for t in made.groups[0].trajectories:
            t.reward, t.reward_parts = reward, {"right": reward}
        return made

    scripted.generate = broken  # type: ignore[method-assign]
    one.sampler = ShuffledPrompts([Prompt(f"p/{i}", [], source="p") for i in range(9)], 0, retire_pass_rate=0.5)
    made, filtered = one.gather(1)
    assert len(made.groups) == 4 and trained(made) == 4, "the update has to see it"
    tally = rollout_tally(made.groups, 0.5).merge(filtered)
    assert not math.isfinite(tally.means()["reward/mean"]) and tally.means()["rollout/zero_variance_groups"] == 0
    run = RunDirectory.create(tmp_path / "run", "x: 1\n")
    run.write_metrics(1, tally.means())
    run.write_samples(1, made.trajectories)
    written = {math.nan: "NaN", math.inf: "Infinity", -math.inf: "-Infinity"}
    said = next(text for value, text in written.items() if str(value) == str(reward))
    assert {record["reward"] for record in read_samples(run.path, 1)} == {said, 0.0, 1.0}
    assert not math.isfinite(read_metrics(run.path)[0]["reward/right"])
    assert evaluation_tally(made.groups, 0.5, greedy=True).means()["eval/prompts"] == 4
