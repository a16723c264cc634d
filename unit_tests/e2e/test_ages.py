"""Ages of tokens and what filters left out, of whole jobs in overlap, counted again from their samples."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestration.run.samples import read_samples
from unit_tests.e2e.shared_stack import SharedStack

pytestmark = pytest.mark.e2e

OVERLAP = {"mode": "overlap", "max_staleness": 2}


def test_ages_of_trained_tokens_are_those_that_samples_give(stack: SharedStack) -> None:
    """Alone catches ages in the metrics that are not those of the tokens that were trained on."""
    done = stack.run({"schedule": OVERLAP, "train": {"steps": 5, "updates_per_step": 2}})
    for row in done.rows[1:]:
        ages: Counter[int] = Counter()
        spanning, trained = 0, 0
        for sample in read_samples(done.path, int(row["step"])):
            assert sum(tokens for _, tokens in sample["versions"]) == sample["tokens"]
            if sample["advantage"]:
                trained, spanning = trained + 1, spanning + (len(sample["versions"]) > 1)
                for version, tokens in sample["versions"]:
                    ages[int(row["schedule/version"]) - version] += tokens
        tokens = sum(ages.values())
        assert (trained, tokens) == (row["train/trajectories"], row["train/action_tokens"])
        assert [row[f"schedule/staleness/{age}"] for age in range(3)] == [ages[age] / tokens for age in range(3)]
        assert row["train/staleness_mean"] == pytest.approx(sum(age * n for age, n in ages.items()) / tokens)
        assert row["train/staleness_max"] == max(ages) and row["schedule/spanning_share"] == spanning / trained
        seconds = [row[f"schedule/engine_{what}_seconds"] for what in ("busy", "paused", "idle")]
        assert sum(seconds) == pytest.approx(row["time/step_seconds"]) and row["rollout/discarded_tokens"] == 0
        # In no phase: this stack waits for a sync between steps, to look at what engines hold.
        waited = sum(row[f"time/{phase}_seconds"] for phase in ("generate", "reward", "sync", "other"))
        assert 0 <= row["schedule/trainer_wait_seconds"] <= waited


def test_steps_in_which_filters_leave_nothing_go_through(stack: SharedStack) -> None:
    """Alone catches a step without a single response that stops the run: no group may be submitted in place of a
    filtered one."""
    filters = [{"function": "pass_rate", "params": {"low": 0.999, "high": 1.0}}]
    rollout = {"filters": filters, "max_refill_rounds": 0}
    done = stack.run({"schedule": OVERLAP, "rollout": rollout, "train": {"steps": 4, "updates_per_step": 2}})
    asked = done.config.rollout.prompts_per_step
    groups = [{sample["group"] for sample in read_samples(done.path, step)} for step in range(1, 5)]
    assert len(set().union(*groups)) == sum(map(len, groups)) == 4 * asked and not groups[-1]
    assert all(row["rollout/unfilled_groups"] == asked for row in done.rows[1:])
    filtered, made = (sum(row[f"rollout/{what}tokens"] for row in done.rows[1:]) for what in ("filtered_", ""))
    assert filtered == made > 0
    assert len(set(done.weights)) == 1, "nothing was trained on"
