"""The feed in overlap and with reuse: what is asked ahead, how old it may get, what a batch holds when little has any signal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.reading.load import to_yaml
from eval.report import write_report
from orchestration.metrics.rollouts import refuse_failed_rewards, rollout_tally
from orchestration.metrics.tally import time_metrics
from orchestration.rl.rollout_queue import Batch
from orchestration.run.directory import RunDirectory
from orchestration.run.samples import read_samples
from orchestration.trainer.rl_batches import prepare_updates
from records.rollout import Group, Prompt
from unit_tests.orchestration.rl.scripted_queue import OVERLAP, SAMPLES, go_round, job, objective_of, queue_of, take


def test_in_overlap_two_batches_are_under_way_and_no_token_is_too_old() -> None:
    one, scripted, _ = queue_of(lambda prompt, number: 1, [], schedule=OVERLAP, hold=True)
    go_round(one, 0)
    assert len(scripted.group_ids) == 8, "(max_staleness + 1) batches"
    late, *others = scripted.group_ids
    scripted.finish(*others)
    first = take(one, 0)
    assert late not in [group.group_id for group in first.fresh], "the straggler may be one version late"
    scripted.version = 1
    go_round(one, 1)
    assert len(scripted.group_ids) == 12
    oldest = [request.oldest_version for call in scripted.submitted for request in call]
    assert oldest == [0] * 8 + [1] * 4, "an asking says what it was admitted for, which an engine may not hold yet"
    with pytest.raises(AssertionError, match="nobody is making"):
        take(one, 1)  # four are finished, but without the straggler it would become two versions late
    scripted.finish(late)
    second = take(one, 1)
    assert late in [group.group_id for group in second.fresh] and len(second.fresh) == 4
    assert one.tally(second, 1).means() == {
        "schedule/version": 1, "schedule/replayed_share": 0, "schedule/ready_groups": 0, "schedule/running_groups": 4,
        "rollout/discarded_tokens": 0,
    }  # fmt: skip


def test_nothing_is_asked_that_no_step_is_left_for() -> None:
    one, scripted, _ = queue_of(lambda prompt, number: 1, [], schedule=OVERLAP, steps=3)
    for version in range(3):
        assert len(take(one, version).fresh) == 4
        scripted.version = version + 1
        go_round(one, version + 1)
    assert len(scripted.group_ids) == 12 and one.unfinished() == [] and one.admission.outstanding == 0


def test_unfinished_prompts_are_asked_first_after_a_restart() -> None:
    one, _, _ = queue_of(lambda prompt, number: 1, [], schedule=OVERLAP)
    take(one, 0)
    waiting = [prompt.prompt_id for prompt in one.unfinished()]
    assert len(waiting) == 4
    again, others, _ = queue_of(lambda prompt, number: 1, [], schedule=OVERLAP)
    again.sampler.load_state_dict(one.sampler.state_dict())
    again.begin_after(1, one.unfinished())
    go_round(again, 1)
    assert others.prompt_ids[0][:4] == waiting and len(set(others.prompt_ids[0])) == 8


REUSE = {"replay_buffer_versions": 1, "replay_buffer_share": 0.5}


def test_replayed_groups_are_part_of_the_batch_and_not_of_what_was_generated() -> None:
    one, scripted, _ = queue_of(lambda prompt, number: 1, [], schedule=REUSE)
    first = take(one, 0)
    one.trained(1)
    assert one.tally(first, 0).means() == {"schedule/version": 0, "schedule/replayed_share": 0}, (
        "also where none is drawn"
    )
    scripted.version = 1
    second = take(one, 1)
    assert (len(first.fresh), len(first.replayed)) == (2, 0) and (len(second.fresh), len(second.replayed)) == (2, 2)
    assert {g.group_id for g in second.replayed} == {g.group_id for g in first.fresh}
    assert len(second.trajectories) == 2 * SAMPLES and len(scripted.group_ids) == 4
    assert one.tally(second, 1).means()["schedule/replayed_share"] == 0.5


@pytest.mark.parametrize(
    ("fresh", "reused", "updates"), [(12, 4, 4), (6, 2, 2), (2, 6, 2), (3, 1, 1), (4, 0, 2), (0, 2, 1)]
)
def test_each_update_of_a_step_gets_its_share_of_replayed_groups(fresh: int, reused: int, updates: int) -> None:
    made = [Group(str(i), Prompt(str(i), []), []) for i in range(fresh + reused)]
    groups = Batch(made[:fresh], [], made[fresh:]).groups
    share = len(made) // updates
    again = [sum(int(g.group_id) >= fresh for g in groups[n * share :][:share]) for n in range(updates)]
    assert again == [reused // updates] * updates
    for part in (made[:fresh], made[fresh:]):
        assert [g for g in groups if g in part] == part, "each in its order"


def test_groups_that_gave_no_gradient_are_not_reused() -> None:
    def reused(reward: float = 0.0, **train: Any) -> list[str]:
        one, scripted, _ = queue_of(lambda prompt, number: number % 2, [], schedule=REUSE, train=train)
        batch = take(one, 0)
        batch.fresh[0].trajectories[0].reward = reward
        config = job([], schedule=REUSE, train=train)
        frozen = lambda made, names: {name: [np.zeros(1, np.float32) for _ in made] for name in names}  # noqa: E731
        prepare_updates(batch.groups, objective_of(config), config, 0, frozen)
        one.trained(1)
        scripted.version = 1
        return [group.group_id for group in take(one, 1).replayed]

    assert reused() == ["train-1-1"], "of the first, all responses were paid alike"
    assert reused(drop_zero_variance_groups=False) == ["train-1-0", "train-1-1"]
    assert reused(reward=1.0) == ["train-1-0", "train-1-1"]
    for reward in (math.nan, math.inf):
        assert reused(reward) == ["train-1-1"], "it would have the next update skipped as well"


def test_a_step_takes_what_is_there_and_what_is_missing_is_missing_later() -> None:
    """Overlap: two batches are under way, no further prompt may be asked, and six of eight groups are left out."""
    one, scripted, notes = queue_of(
        lambda prompt, number: SAMPLES if number < 6 else 1, ["zero_variance"], schedule=OVERLAP, max_refill_rounds=0,
        hold=True, steps=2,
    )  # fmt: skip
    go_round(one, 0)
    scripted.finish(*scripted.group_ids)
    first = take(one, 0)
    assert (len(first.fresh), len(first.cancelled)) == (2, 6), "the two that were kept do not wait"
    assert one.tally(first, 0).means()["rollout/unfilled_groups"] == 2
    assert "step 1: 2 of 4 groups are missing after 0 further prompts" in notes[0]
    one.trained(1)
    second = take(one, 1)
    assert second.finished == [] and one.tally(second, 1).means()["rollout/unfilled_groups"] == 4
    assert len(scripted.group_ids) == 8 and len(notes) == 1


def test_a_step_without_a_single_response_goes_through(tmp_path: Path) -> None:
    overlap: dict[str, Any] = {"schedule": OVERLAP, "max_refill_rounds": 0, "steps": 2}
    one, _, _ = queue_of(lambda prompt, number: 0, ["zero_variance"], **overlap)
    take(one, 0)
    one.trained(0)
    nothing = take(one, 0)
    assert nothing.finished == nothing.groups == []
    means = rollout_tally(nothing.finished, 0.5).merge(one.tally(nothing, 0)).means()
    assert means["rollout/responses"] == means["reward/errors"] == means["rollout/zero_variance_groups"] == 0
    assert not {"reward/mean", "reward/error_rate", "rollout/response_tokens_max", "rollout/entropy_nats"} & set(means)
    config = job(["zero_variance"], **overlap)
    refuse_failed_rewards(nothing.trajectories, config.reward)
    updates, tally = prepare_updates(nothing.groups, objective_of(config), config, 0, lambda _, names: {})
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
    one, scripted, notes = queue_of(
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
        go_round(one, version, 0.0)

    version, trained_groups, missing = 0, 0, 0
    for _ in range(steps):
        batch = take(one, version, turn)
        means = one.tally(batch, version).means()
        unfilled = means["rollout/unfilled_groups"]
        assert len(batch.fresh) + unfilled == step_prompts and all(group.trained for group in batch.fresh)
        assert not (unfilled and means["schedule/ready_groups"]), "a group that is ready waits beside a short step"
        assert batch.fresh or not means["schedule/running_groups"], "a step of nothing, and groups that would have come"
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


def test_waiting_for_nobody_is_an_error() -> None:
    one, _, _ = queue_of(lambda prompt, number: 1, [], schedule=OVERLAP)
    go_round(one, 0)  # asked and finished under version 0
    with pytest.raises(AssertionError, match="nothing is under way"):
        take(one, 2)
