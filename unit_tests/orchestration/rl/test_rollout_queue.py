"""The feed: who is asked when, under which names and seeds; what is asked in place of filtered groups; what a batch holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_feeds.prompts.sampler import ShuffledPrompts
from orchestration.metrics.rollouts import evaluation_tally, rollout_tally
from orchestration.rl.rollout_queue import Batch, RolloutQueue
from orchestration.run.directory import RunDirectory, read_metrics
from orchestration.run.samples import read_samples
from records.rollout import Group, Prompt
from rollouts.vllm.sampling import Sampling
from unit_tests.orchestration.rl.scripted_queue import OVERLAP, SAMPLES, go_round, queue_of, take, trained


def test_without_filters_one_call_and_nothing_said() -> None:
    one, scripted, notes = queue_of(lambda prompt, number: SAMPLES, [])
    batch = take(one, 0)
    assert len(batch.groups) == 4 and trained(batch) == 4 and len(scripted.submitted) == 1
    assert one.tally(batch, 0).means() == {} and notes == []


def test_exactly_the_missing_are_asked_until_the_batch_is_full() -> None:
    # Of the first 4, 3 are lost; of the 3 asked in their place, 2; then none.
    is_lost = [True, True, True, False, True, True, False, False, False]
    one, scripted, notes = queue_of(lambda prompt, number: SAMPLES if is_lost[number] else 1, ["zero_variance"])
    batch = take(one, 0)
    assert [len(ids) for ids in scripted.submitted] == [4, 3, 2] and trained(batch) == 4 and notes == []
    assert one.tally(batch, 0).means() == {
        "rollout/dropped_responses": 5 * SAMPLES, "rollout/dropped_in_baseline": 0, "rollout/filtered_groups": 5,
        "rollout/filtered/zero_variance": 5 * SAMPLES, "rollout/refilled_groups": 5, "rollout/unfilled_groups": 0,
        "rollout/filtered_tokens": 5 * SAMPLES,
    }  # fmt: skip


def test_rewards_and_responses_are_counted_before_filtering() -> None:
    one, _, _ = queue_of(lambda prompt, number: SAMPLES if number < 4 else 1, ["zero_variance"])
    means = rollout_tally(take(one, 0).finished, 0.5).means()
    assert means["rollout/responses"] == 8 * SAMPLES and means["rollout/zero_variance_groups"] == 4
    assert means["reward/mean"] == pytest.approx((1 + 1 / SAMPLES) / 2)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_the_cap_holds_and_what_is_missing_is_said_once(cap: int) -> None:
    one, scripted, notes = queue_of(lambda prompt, number: 0, ["pass_rate"], max_refill_rounds=cap)
    for _ in (1, 2):
        batch = take(one, 0)
        one.trained(0)
        means = one.tally(batch, 0).means()
        assert trained(batch) == 0 and batch.groups == []
        assert means["rollout/unfilled_groups"] == 4 and means["rollout/refilled_groups"] == 4 * cap
    assert len(scripted.group_ids) == 2 * 4 * (1 + cap)
    assert len(notes) == 1 and f"step 1: 4 of 4 groups are missing after {4 * cap} further prompts" in notes[0]


def test_a_filter_that_does_not_refill_leaves_the_step_smaller() -> None:
    one, scripted, notes = queue_of(lambda prompt, number: 0, [{"function": "zero_variance", "refill": False}])
    batch = take(one, 0)
    means = one.tally(batch, 0).means()
    assert len(scripted.submitted) == 1 and trained(batch) == 0 and len(batch.groups) == 4 and notes == []
    assert means["rollout/filtered_groups"] == 4 and "rollout/unfilled_groups" not in means


def test_a_prompt_asked_again_in_a_step_gets_other_samples() -> None:
    one, scripted, _ = queue_of(lambda prompt, number: 0, ["zero_variance"], prompts=3)
    one.next_step = 5
    take(one, 0)
    assert len(scripted.group_ids) == len(set(scripted.group_ids)) == 16
    assert len(scripted.seeds) == len(set(scripted.seeds)) == 16 * SAMPLES, "3 prompts were asked 16 times"
    first = Sampling(max_new_tokens=8, seeded=True)
    assert scripted.seeds[0] == first.request_seed(5, scripted.prompt_ids[0][0], 0), "a first asking is seeded as ever"


def test_the_sampler_sees_every_group_in_order_of_asking() -> None:
    one, scripted, _ = queue_of(lambda prompt, number: SAMPLES if number < 4 else 1, ["zero_variance"])
    seen: list[str] = []
    one.sampler.observe = lambda groups: seen.extend(g.prompt.prompt_id for g in groups)  # type: ignore[method-assign]
    take(one, 0)
    assert sorted(seen) == sorted(name for call in scripted.prompt_ids for name in call) and len(seen) == 8


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_trained_and_unfilled_make_a_step(step_prompts: int, cap: int, random: Any) -> None:
    one, scripted, _ = queue_of(
        lambda prompt, number: random.randrange(SAMPLES + 1), ["pass_rate"], step_prompts=step_prompts,
        max_refill_rounds=cap,
    )  # fmt: skip
    batch = take(one, 0)
    means = one.tally(batch, 0).means()
    assert trained(batch) + means["rollout/unfilled_groups"] == step_prompts, "never a surplus"
    assert len(batch.finished) == step_prompts + means["rollout/refilled_groups"] == len(scripted.group_ids)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_which_groups_make_a_step_does_not_depend_on_who_finishes_first(cap: int) -> None:
    def steps(place: int) -> list[list[str]]:
        one, scripted, _ = queue_of(
            lambda prompt, number: 1 if number % 3 else SAMPLES, ["zero_variance"], hold=True, max_refill_rounds=cap
        )
        collect = scripted.collect

        def one_at_a_time(wait_seconds: float) -> list[Group]:
            if scripted._held:
                scripted.finish(scripted._held[place].group_id)
            return collect(wait_seconds)

        scripted.collect = one_at_a_time  # type: ignore[method-assign]
        found = []
        for scripted.version in range(3):
            found.append([group.prompt.prompt_id for group in take(one, scripted.version).fresh])
        return found

    assert steps(0) == steps(-1)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("error")
def test_rewards_that_are_not_finite_pass_through_tallies_filters_and_files(reward: float, tmp_path: Path) -> None:
    one, scripted, _ = queue_of(lambda prompt, number: 1, ["zero_variance", "pass_rate", "overlong"])
    collect = scripted.collect

    def broken(wait_seconds: float) -> list[Group]:
        groups = collect(wait_seconds)
        for t in groups[0].trajectories if groups else ():
            t.reward, t.reward_parts = reward, {"right": reward}
        return groups

    scripted.collect = broken  # type: ignore[method-assign]
    one.sampler = ShuffledPrompts([Prompt(f"p/{i}", [], source="p") for i in range(9)], 0, retire_pass_rate=0.5)
    made = take(one, 0)
    assert len(made.groups) == 4 and trained(made) == 4, "the update has to see it"
    tally = rollout_tally(made.groups, 0.5).merge(one.tally(made, 0))
    assert not math.isfinite(tally.means()["reward/mean"]) and tally.means()["rollout/zero_variance_groups"] == 0
    run = RunDirectory.create(tmp_path / "run", "x: 1\n")
    run.write_metrics(1, tally.means())
    run.write_samples(1, made.trajectories)
    written = {math.nan: "NaN", math.inf: "Infinity", -math.inf: "-Infinity"}
    said = next(text for value, text in written.items() if str(value) == str(reward))
    assert {record["reward"] for record in read_samples(run.path, 1)} == {said, 0.0, 1.0}
    assert not math.isfinite(read_metrics(run.path)[0]["reward/right"])
    assert evaluation_tally(made.groups, 0.5, greedy=True).means()["eval/prompts"] == 4


def test_in_overlap_what_was_left_out_is_not_asked_again_after_a_restart() -> None:
    one, scripted, _ = queue_of(
        lambda prompt, number: SAMPLES if number == 0 else 1, ["zero_variance"], hold=True, schedule=OVERLAP
    )
    go_round(one, 0)
    left_out, *_ = scripted.group_ids
    scripted.finish(left_out)
    go_round(one, 0)  # takes it in
    go_round(one, 0)  # asks another
    unfinished = [prompt.prompt_id for prompt in one.unfinished()]
    assert scripted.prompt_ids[0][0] not in unfinished and len(unfinished) == 8


@pytest.mark.parametrize("cap", [1, 3])
@pytest.mark.parametrize("stop_after", range(1, 9))
def test_in_sync_mode_a_step_that_was_broken_off_is_done_again_as_it_was(cap: int, stop_after: int) -> None:
    """With the groups that were left out in it, which count against max_refill_rounds and are observed by the sampler."""

    def passes(prompt: str, number: int) -> int:
        return SAMPLES if int(prompt[2:]) % 3 else 1  # most are left out, whenever they are asked

    def begun(stop_after: int | None) -> tuple[RolloutQueue, list[list[str]]]:
        one, scripted, _ = queue_of(passes, ["zero_variance"], hold=True, max_refill_rounds=cap)
        observed, done = [], 0
        one.sampler.observe = lambda groups: observed.append([g.prompt.prompt_id for g in groups])  # type: ignore[method-assign]
        collect = scripted.collect

        def one_at_a_time(wait_seconds: float) -> list[Group]:
            nonlocal done
            if done == stop_after:
                raise KeyboardInterrupt
            done += 1
            scripted.finish(scripted._held[0].group_id)
            return collect(wait_seconds)

        scripted.collect = one_at_a_time  # type: ignore[method-assign]
        return one, observed

    def ids(batch: Batch) -> list[list[str]]:
        return [[group.prompt.prompt_id for group in groups] for groups in (batch.fresh, batch.cancelled)]

    whole, observed = begun(None)
    expected = ids(take(whole, 0))
    stopped, _ = begun(min(stop_after, sum(map(len, expected)) - 1))
    with pytest.raises(KeyboardInterrupt):
        take(stopped, 0)
    again, observed_again = begun(None)
    again.sampler.next(len(stopped.unfinished()))  # as its state is restored
    again.begin_after(0, stopped.unfinished())
    assert ids(take(again, 0)) == expected and observed_again == observed
    assert again._last.missing == whole._last.missing


def test_tokens_that_are_too_old_are_refused() -> None:
    one, scripted, _ = queue_of(lambda prompt, number: 1, [], hold=True)
    scripted.version = 0
    go_round(one, 1)
    scripted.finish(*scripted.group_ids)
    with pytest.raises(AssertionError, match="too old for version 1"):
        take(one, 1)


def test_a_group_that_could_not_be_scored_is_not_counted_as_filtered() -> None:
    one, scripted, _ = queue_of(lambda prompt, number: 1, ["zero_variance"], hold=True)
    go_round(one, 0)
    for t in scripted._held[0].trajectories:
        t.reward, t.reward_error = None, "the judge is out"
    scripted.finish(*scripted.group_ids)
    assert one.tally(take(one, 0), 0).means()["rollout/filtered_groups"] == 0
