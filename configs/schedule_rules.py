"""Rules on the schedule: combinations that make no sense, and what asynchrony adds to the objective by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs import algorithm
from configs.objective import Corrector

if TYPE_CHECKING:
    from configs.schema import RLConfig

Problem = tuple[str, str]  # dotted key, message
ONLY_IN_OVERLAP = ("max_staleness", "in_flight", "over_issue", "pause_while_training")


def with_correction(config: RLConfig) -> RLConfig:
    """The configuration, with truncated importance weights where tokens may be older than the policy they train.

    Left alone: a list of corrections that the user wrote (an empty one too), a method that weighs by mu itself, and the
    engine's log-probabilities as pi_old.
    """
    if config.schedule.staleness == 0 and config.schedule.reuse_versions == 0:
        return config
    objective = config.objective
    if "corrections" in objective.model_fields_set or objective.old_logprobs == "engine":
        return config
    from algs.probing import reads  # imports torch; --help must not

    try:
        read = reads(algorithm.built(config.algorithm))
    except Exception:  # noqa: BLE001 a user's method that fails is reported by objective_problems, with its line
        return config
    if "behavior_logprobs" not in read:
        objective.corrections.append(Corrector.model_validate("token_truncate"))
    return config


def schedule_problems(config: RLConfig) -> Iterator[Problem]:
    """What is wrong with the schedule."""
    schedule, prompts = config.schedule, config.rollout.prompts_per_step
    if schedule.over_issue is not None and schedule.over_issue > schedule.max_staleness:
        yield (
            "schedule.over_issue",
            f"{schedule.over_issue:g} batches ahead would be older than schedule.max_staleness {schedule.max_staleness} "
            "when they are trained on; use at most that",
        )
    if schedule.staleness and schedule.pause_while_training and schedule.in_flight == "drain":
        yield (
            "schedule.in_flight",
            "drain finishes responses before weights come, and with schedule.pause_while_training the engine stands still "
            "then; use recompute or abort",
        )
    if (schedule.reuse_share > 0) != (schedule.reuse_versions > 0):
        yield (
            "schedule.reuse_share",
            f"schedule.reuse_versions {schedule.reuse_versions} and schedule.reuse_share {schedule.reuse_share:g} go "
            "together: both above 0, or neither",
        )
    elif schedule.reuse_share > 0 and not 0 < round(schedule.reuse_share * prompts) < prompts:
        yield (
            "schedule.reuse_share",
            f"{schedule.reuse_share:g} of rollout.prompts_per_step {prompts} is {round(schedule.reuse_share * prompts)} "
            f"groups; it must be at least 1 and leave at least 1 fresh one",
        )


def schedule_warnings(config: RLConfig) -> Iterator[str]:
    """What runs, but probably not as meant."""
    schedule = config.schedule
    if schedule.mode == "sync":
        for key in ONLY_IN_OVERLAP:
            if getattr(schedule, key) != type(schedule).model_fields[key].default:
                yield f"schedule.{key}: has no effect with schedule.mode sync"
    elif config.objective.old_logprobs == "engine":
        yield (
            "objective.old_logprobs: engine with schedule.mode overlap clips against the policy that sampled, up to "
            f"{schedule.max_staleness} versions old; trainer (with a correction) keeps trust region and staleness apart"
        )
