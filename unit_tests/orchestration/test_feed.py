"""The feed: who is asked when, under which names and seeds; what is asked in place of filtered groups; what a batch holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.grpo import GRPO
from configs.load import to_yaml
from configs.schema import RLConfig
from data_feeds.sampler import ShuffledPrompts
from eval.report import write_report
from orchestration.evaluation import evaluation_tally
from orchestration.feed import Batch, Feed
from orchestration.metrics import time_metrics
from orchestration.rollout_metrics import refuse_failed_rewards, rollout_tally
from orchestration.run_directory import RunDirectory, read_metrics, read_samples
from orchestration.update import prepare_updates
from rollouts.records import Group, Prompt, Trajectory
from rollouts.sampling import Sampling
from rollouts.worker import Asking

SAMPLES = 4


class ScriptedRollouts:
    """Answers from a script: `passes(prompt id, number of the asking)` responses of a group are paid 1, the others 0.

    With `hold`, asked groups are finished only when `finish` says so.
    """

    def __init__(self, passes: Callable[[str, int], int], hold: bool = False) -> None:
        self.passes, self.hold = passes, hold
        self.asked: list[list[Asking]] = []  # per call
        self.seeds: list[int] = []
        self.version = 0
        self._held: list[Group] = []
        self._ready: list[Group] = []

    @property
    def group_ids(self) -> list[str]:
        return [asking.group_id for call in self.asked for asking in call]

    @property
    def prompt_ids(self) -> list[list[str]]:
        return [[asking.prompt.prompt_id for asking in call] for call in self.asked]

    def ask(self, askings: list[Asking], sampling: Sampling, step: int) -> None:
        before = len(self.group_ids)
        for number, asking in enumerate(askings, start=before):
            right = self.passes(asking.prompt.prompt_id, number)
            made = [
                response(asking.prompt, asking.group_id, i, float(i < right), self.version)
                for i in range(asking.samples)
            ]
            self._held.append(Group(asking.group_id, asking.prompt, made))
            self.seeds += [
                sampling.request_seed(step, asking.prompt.prompt_id, asking.first_sample + i)
                for i in range(asking.samples)
            ]
        self.asked.append(askings)
        if not self.hold:
            self.finish(*(group.group_id for group in self._held))

    def finish(self, *names: str) -> None:
        done = [group for group in self._held if group.group_id in names]
        assert len(done) == len(names)
        self._held = [group for group in self._held if group.group_id not in names]
        self._ready += done

    def collect(self, wait_seconds: float) -> list[Group]:
        assert self._ready or wait_seconds == 0, "the feed waits for what nobody is making"
        ready, self._ready = self._ready, []
        return ready


def response(prompt: Prompt, group_id: str, sample: int, reward: float, version: int = 0) -> Trajectory:
    one = np.zeros(1, np.int32)
    return Trajectory(
        prompt, group_id, sample, one, one, np.zeros(1, np.float32), one + version, np.ones(1, np.bool_), one, reward=reward,
        reward_parts={"right": reward}, finish_reason="stop",
    )  # fmt: skip


def job(
    filters: list[Any], step_prompts: int = 4, schedule: dict[str, Any] | None = None, steps: int = 50, **rollout: Any
) -> RLConfig:
    return RLConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"sources": [{"reasoning_gym": "chain_sum"}]},
            "algorithm": {"name": "grpo"},
            "rollout": {
                "prompts_per_step": step_prompts, "responses_per_prompt": SAMPLES, "filters": filters, **rollout,
            },
            "reward": {"parts": [{"function": "last_number"}]},
            "schedule": schedule or {},
            "train": {"steps": steps},
        }
    )  # fmt: skip


def feed(
    passes: Callable[[str, int], int], filters: list[Any], prompts: int = 40, hold: bool = False, **of_job: Any
) -> tuple[Feed, ScriptedRollouts, list[str]]:
    notes: list[str] = []
    scripted = ScriptedRollouts(passes, hold)
    sampler = ShuffledPrompts([Prompt(f"p/{i}", []) for i in range(prompts)], seed=0)
    sampling = Sampling(max_new_tokens=8, seeded=True)
    return Feed(job(filters, **of_job), scripted, sampler, sampling, notes.append), scripted, notes  # type: ignore[arg-type]


def trained(batch: Batch) -> int:
    return sum(bool(group.trained) for group in batch.groups)


def test_without_filters_one_call_and_nothing_said() -> None:
    one, scripted, notes = feed(lambda prompt, number: SAMPLES, [])
    batch = one.take(0)
    assert len(batch.groups) == 4 and trained(batch) == 4 and len(scripted.asked) == 1
    assert one.tally(batch, 0).means() == {} and notes == []


def test_exactly_the_missing_are_asked_until_the_batch_is_full() -> None:
    # Of the first 4, 3 are lost; of the 3 asked in their place, 2; then none.
    is_lost = [True, True, True, False, True, True, False, False, False]
    one, scripted, notes = feed(lambda prompt, number: SAMPLES if is_lost[number] else 1, ["zero_variance"])
    batch = one.take(0)
    assert [len(ids) for ids in scripted.asked] == [4, 3, 2] and trained(batch) == 4 and notes == []
    assert one.tally(batch, 0).means() == {
        "rollout/dropped_responses": 5 * SAMPLES, "rollout/dropped_in_baseline": 0, "rollout/filtered_groups": 5,
        "rollout/filtered/zero_variance": 5 * SAMPLES, "rollout/refilled_groups": 5, "rollout/unfilled_groups": 0,
    }  # fmt: skip


def test_rewards_and_responses_are_counted_before_filtering() -> None:
    one, _, _ = feed(lambda prompt, number: SAMPLES if number < 4 else 1, ["zero_variance"])
    means = rollout_tally(one.take(0).finished, 0.5).means()
    assert means["rollout/responses"] == 8 * SAMPLES and means["rollout/zero_variance_groups"] == 4
    assert means["reward/mean"] == pytest.approx((1 + 1 / SAMPLES) / 2)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_the_cap_holds_and_what_is_missing_is_said_once(cap: int) -> None:
    one, scripted, notes = feed(lambda prompt, number: 0, ["pass_rate"], max_refill_rounds=cap)
    for _ in (1, 2):
        batch = one.take(0)
        one.trained(0)
        means = one.tally(batch, 0).means()
        assert trained(batch) == 0 and batch.groups == []
        assert means["rollout/unfilled_groups"] == 4 and means["rollout/refilled_groups"] == 4 * cap
    assert len(scripted.group_ids) == 2 * 4 * (1 + cap)
    assert len(notes) == 1 and f"step 1: 4 of 4 groups are missing after {4 * cap} further prompts" in notes[0]


def test_a_filter_that_does_not_refill_leaves_the_step_smaller() -> None:
    one, scripted, notes = feed(lambda prompt, number: 0, [{"function": "zero_variance", "refill": False}])
    batch = one.take(0)
    means = one.tally(batch, 0).means()
    assert len(scripted.asked) == 1 and trained(batch) == 0 and len(batch.groups) == 4 and notes == []
    assert means["rollout/filtered_groups"] == 4 and "rollout/unfilled_groups" not in means


def test_a_prompt_asked_again_in_a_step_gets_other_samples() -> None:
    one, scripted, _ = feed(lambda prompt, number: 0, ["zero_variance"], prompts=3)
    one.next_step = 5
    one.take(0)
    assert len(scripted.group_ids) == len(set(scripted.group_ids)) == 16
    assert len(scripted.seeds) == len(set(scripted.seeds)) == 16 * SAMPLES, "3 prompts were asked 16 times"
    first = Sampling(max_new_tokens=8, seeded=True)
    assert scripted.seeds[0] == first.request_seed(5, scripted.prompt_ids[0][0], 0), "a first asking is seeded as ever"


def test_the_sampler_sees_every_group_in_order_of_asking() -> None:
    one, scripted, _ = feed(lambda prompt, number: SAMPLES if number < 4 else 1, ["zero_variance"])
    seen: list[str] = []
    one.sampler.observe = lambda groups: seen.extend(g.prompt.prompt_id for g in groups)  # type: ignore[method-assign]
    one.take(0)
    assert sorted(seen) == sorted(name for call in scripted.prompt_ids for name in call) and len(seen) == 8


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_trained_and_unfilled_make_a_step(step_prompts: int, cap: int, random: Any) -> None:
    one, scripted, _ = feed(
        lambda prompt, number: random.randrange(SAMPLES + 1), ["pass_rate"], step_prompts=step_prompts,
        max_refill_rounds=cap,
    )  # fmt: skip
    batch = one.take(0)
    means = one.tally(batch, 0).means()
    assert trained(batch) + means["rollout/unfilled_groups"] == step_prompts, "never a surplus"
    assert len(batch.finished) == step_prompts + means["rollout/refilled_groups"] == len(scripted.group_ids)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_which_groups_make_a_step_does_not_depend_on_who_finishes_first(cap: int) -> None:
    def steps(place: int) -> list[list[str]]:
        one, scripted, _ = feed(
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
            found.append([group.prompt.prompt_id for group in one.take(scripted.version).fresh])
        return found

    assert steps(0) == steps(-1)


OVERLAP = {"mode": "overlap", "max_staleness": 1}


def test_in_overlap_two_batches_are_under_way_and_no_token_is_too_old() -> None:
    one, scripted, _ = feed(lambda prompt, number: 1, [], schedule=OVERLAP, hold=True)
    one.turn(0)
    assert len(scripted.group_ids) == 8, "(max_staleness + 1) batches"
    late, *others = scripted.group_ids
    scripted.finish(*others)
    first = one.take(0)
    assert late not in [group.group_id for group in first.fresh], "the straggler may be one version late"
    scripted.version = 1
    one.turn(1)
    assert len(scripted.group_ids) == 12
    oldest = [asking.oldest_version for call in scripted.asked for asking in call]
    assert oldest == [0] * 8 + [1] * 4, "an asking says what it was admitted for, which an engine may not hold yet"
    with pytest.raises(AssertionError, match="nobody is making"):
        one.take(1)  # four are finished, but without the straggler it would become two versions late
    scripted.finish(late)
    second = one.take(1)
    assert late in [group.group_id for group in second.fresh] and len(second.fresh) == 4
    means = one.tally(second, 1).means()
    assert means["schedule/staleness/1"] == 1.0 and means["schedule/running_groups"] == 4


def test_nothing_is_asked_that_no_step_is_left_for() -> None:
    one, scripted, _ = feed(lambda prompt, number: 1, [], schedule=OVERLAP, steps=3)
    for version in range(3):
        assert len(one.take(version).fresh) == 4
        scripted.version = version + 1
        one.turn(version + 1)
    assert len(scripted.group_ids) == 12 and one.unfinished() == [] and one.admission.outstanding == 0


def test_unfinished_prompts_are_asked_first_after_a_restart() -> None:
    one, _, _ = feed(lambda prompt, number: 1, [], schedule=OVERLAP)
    one.take(0)
    waiting = [prompt.prompt_id for prompt in one.unfinished()]
    assert len(waiting) == 4
    again, others, _ = feed(lambda prompt, number: 1, [], schedule=OVERLAP)
    again.sampler.load_state_dict(one.sampler.state_dict())
    again.begin_after(1, one.unfinished())
    again.turn(1)
    assert others.prompt_ids[0][:4] == waiting and len(set(others.prompt_ids[0])) == 8


def test_reused_groups_are_part_of_the_batch_and_not_of_what_was_generated() -> None:
    one, scripted, _ = feed(lambda prompt, number: 1, [], schedule={"reuse_versions": 1, "reuse_share": 0.5})
    first = one.take(0)
    scripted.version = 1
    second = one.take(1)
    assert (len(first.fresh), len(first.reused)) == (2, 0) and (len(second.fresh), len(second.reused)) == (2, 2)
    assert {g.group_id for g in second.reused} == {g.group_id for g in first.fresh}
    assert len(second.trajectories) == 2 * SAMPLES and len(scripted.group_ids) == 4
    assert one.tally(second, 1).means()["schedule/reused_share"] == 0.5


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("error")
def test_rewards_that_are_not_finite_pass_through_tallies_filters_and_files(reward: float, tmp_path: Path) -> None:
    one, scripted, _ = feed(lambda prompt, number: 1, ["zero_variance", "pass_rate", "overlong"])
    collect = scripted.collect

    def broken(wait_seconds: float) -> list[Group]:
        groups = collect(wait_seconds)
        for t in groups[0].trajectories if groups else ():
            t.reward, t.reward_parts = reward, {"right": reward}
        return groups

    scripted.collect = broken  # type: ignore[method-assign]
    one.sampler = ShuffledPrompts([Prompt(f"p/{i}", [], source="p") for i in range(9)], 0, retire_pass_rate=0.5)
    made = one.take(0)
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


def test_a_step_takes_what_is_there_and_what_is_missing_is_missing_later() -> None:
    """Overlap: two batches are under way, no further prompt may be asked, and six of eight groups are left out."""
    one, scripted, notes = feed(
        lambda prompt, number: SAMPLES if number < 6 else 1, ["zero_variance"], schedule=OVERLAP, max_refill_rounds=0,
        hold=True, steps=2,
    )  # fmt: skip
    one.turn(0)
    scripted.finish(*scripted.group_ids)
    first = one.take(0)
    assert (len(first.fresh), len(first.withdrawn)) == (2, 6), "the two that were kept do not wait"
    assert one.tally(first, 0).means()["rollout/unfilled_groups"] == 2
    assert "step 1: 2 of 4 groups are missing after 0 further prompts" in notes[0]
    one.trained(1)
    second = one.take(1)
    assert second.finished == [] and one.tally(second, 1).means()["rollout/unfilled_groups"] == 4
    assert len(scripted.group_ids) == 8 and len(notes) == 1


def test_a_step_without_a_single_response_goes_through(tmp_path: Path) -> None:
    overlap: dict[str, Any] = {"schedule": OVERLAP, "max_refill_rounds": 0, "steps": 2}
    one, _, _ = feed(lambda prompt, number: 0, ["zero_variance"], **overlap)
    one.take(0)
    one.trained(0)
    nothing = one.take(0)
    assert nothing.finished == nothing.groups == []
    means = rollout_tally(nothing.finished, 0.5).merge(one.tally(nothing, 0)).means()
    assert means["rollout/responses"] == means["reward/errors"] == means["rollout/zero_variance_groups"] == 0
    assert not {"reward/mean", "reward/error_rate", "rollout/response_tokens_max", "rollout/entropy_nats"} & set(means)
    config = job(["zero_variance"], **overlap)
    refuse_failed_rewards(nothing.trajectories, config.reward)
    updates, tally = prepare_updates(nothing.groups, GRPO(GRPO.Params()), config, 0, lambda _, names: {})
    assert updates == [] and tally.means()["train/empty_updates"] == config.train.updates_per_step
    run = RunDirectory.create(tmp_path / "run", to_yaml(config))
    run.write_metrics(1, {**means, **time_metrics(1.0, {}, 1.0)})
    run.write_samples(1, nothing.trajectories)
    assert read_samples(run.path, 1) == []
    assert "rollout/responses" in write_report(run.path).read_text()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_run_in_overlap_bounds_ages_and_accounts_for_every_group(data: st.DataObject) -> None:
    """Few groups have any signal, they finish in any order, and now and then nothing is trained on."""
    draw = data.draw
    staleness, step_prompts = draw(st.sampled_from([1, 2, 3, 5]), "k"), draw(st.integers(1, 5), "B")
    over_issue = draw(st.sampled_from([0, 0.3, 0.5, 1, staleness]), "over_issue")
    cap, steps = draw(st.integers(0, 3), "cap"), draw(st.integers(1, 8), "steps")
    signal, random = draw(st.sampled_from([0.0, 0.1, 0.33, 1.0]), "signal"), draw(st.randoms(use_true_random=False))
    one, scripted, notes = feed(
        lambda prompt, number: 1 if random.random() < signal else 0, ["zero_variance"], hold=True, steps=steps,
        prompts=draw(st.integers(1, 40), "prompts"), step_prompts=step_prompts, max_refill_rounds=cap,
        schedule={"mode": "overlap", "max_staleness": staleness, "over_issue": over_issue},
    )  # fmt: skip

    def turn(wait_seconds: float) -> None:
        """Some finish; at least one where somebody waits for it."""
        waits = int(wait_seconds > 0 and not scripted._ready)
        scripted.version = version
        if held := [group.group_id for group in scripted._held]:
            scripted.finish(*random.sample(held, random.randint(min(waits, len(held)), len(held))))
        one.turn(version, 0.0)

    version, trained_groups, missing = 0, 0, 0
    for _ in range(steps):
        batch = one.take(version, turn)
        means = one.tally(batch, version).means()
        unfilled = means["rollout/unfilled_groups"]
        assert len(batch.fresh) + unfilled == step_prompts and all(group.trained for group in batch.fresh)
        assert not (unfilled and means["schedule/ready_groups"]), "a group that is ready waits beside a short step"
        assert means["rollout/refilled_groups"] <= cap * step_prompts
        ages = [version - t.versions.min() for group in batch.fresh for t in group.trajectories]
        assert all(0 <= age <= staleness for age in ages)
        trained_groups, missing = trained_groups + len(batch.fresh), missing + unfilled
        turn(0.0)  # while it trains
        version += bool(batch.fresh)
        one.trained(version)
    assert trained_groups + missing == steps * step_prompts
    assert one.unfinished() == [] and not scripted._held and one.admission.outstanding == 0, "nothing is left over"
    assert len(notes) == bool(missing)


def test_what_was_left_out_is_not_asked_again_after_a_restart() -> None:
    one, scripted, _ = feed(lambda prompt, number: SAMPLES if number == 0 else 1, ["zero_variance"], hold=True)
    one.turn(0)
    left_out, *_ = scripted.group_ids
    scripted.finish(left_out)
    one.turn(0)  # takes it in
    one.turn(0)  # asks another
    unfinished = [prompt.prompt_id for prompt in one.unfinished()]
    assert scripted.prompt_ids[0][0] not in unfinished and len(unfinished) == 4


def test_waiting_for_nobody_is_an_error() -> None:
    one, _, _ = feed(lambda prompt, number: 1, [], schedule=OVERLAP)
    one.turn(0)  # asked and finished under version 0
    with pytest.raises(AssertionError, match="nothing is under way"):
        one.take(2)


def test_tokens_that_are_too_old_are_refused() -> None:
    one, scripted, _ = feed(lambda prompt, number: 1, [], hold=True)
    scripted.version = 0
    one.turn(1)
    scripted.finish(*scripted.group_ids)
    with pytest.raises(AssertionError, match="too old for version 1"):
        one.take(1)


def test_a_group_that_could_not_be_scored_is_not_counted_as_filtered() -> None:
    one, scripted, _ = feed(lambda prompt, number: 1, ["zero_variance"], hold=True)
    one.turn(0)
    for t in scripted._held[0].trajectories:
        t.reward, t.reward_error = None, "the judge is out"
    scripted.finish(*scripted.group_ids)
    assert one.tally(one.take(0), 0).means()["rollout/filtered_groups"] == 0
