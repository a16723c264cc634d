"""Rules on the schedule: combinations that make no sense, and what asynchrony adds to the objective by itself."""

from __future__ import annotations

from collections.abc import Iterator

from configs.blocks.objective import Corrector
from configs.blocks.rl import RLConfig
from configs.blocks.schedule import Schedule
from configs.rules.problem import Problem

ONLY_IN_OVERLAP = ("max_staleness", "in_flight", "over_issue", "pause_while_training")


def completed(config: RLConfig) -> RLConfig:
    """Return the configuration with what is added where tokens may be older than the policy that they train."""
    config = _with_correction(config)
    objective, kl = config.objective, config.objective.kl
    if kl.in_loss and kl.importance is None and (config.schedule.oldest > 0 or config.train.updates_in_step > 1):
        weighed = objective.model_copy(update={"kl": kl.model_copy(update={"importance": True})})
        return config.model_copy(update={"objective": weighed})
    return config


def _with_correction(config: RLConfig) -> RLConfig:
    """Return the configuration, with truncated importance weights where tokens may be that old.

    A method that caps its ratio (CISPO, ScaleRL) is such a weight already, and a cap on pi_old / mu would act before
    its own. It takes mu as pi_old instead, so that its ratio is pi / mu, unless the user chose pi_old.

    These are left unchanged: a list of corrections that the user wrote (an empty one too), a method that weighs by mu
    itself, and the engine's log-probabilities as pi_old.
    """
    objective = config.objective
    if config.schedule.oldest == 0 or "corrections" in objective.model_fields_set or objective.old_logprobs == "engine":
        return config
    read = _read(config)
    if read is None or "behavior_logprobs" in read:
        return config
    change: dict[str, object] = {"corrections": [Corrector.model_validate("token_truncate")]}
    if "old_logprobs" not in objective.model_fields_set and _caps_its_ratio(config):
        change = {"old_logprobs": "engine"}
    return config.model_copy(update={"objective": objective.model_copy(update=change)})


def _caps_its_ratio(config: RLConfig) -> bool:
    from algs.introspection.method_facts import caps_its_ratio

    return caps_its_ratio(config.algorithm.make_method())


def _read(config: RLConfig) -> frozenset[str] | None:
    """Return what the method's loss reads; None when it fails, which objective_problems reports with the line."""
    from algs.introspection.method_facts import reads  # imports torch; --help must not

    try:
        return reads(config.algorithm.make_method())
    except Exception:  # noqa: BLE001 a user's method may fail in any way
        return None


def schedule_problems(config: RLConfig) -> Iterator[Problem]:
    """Yield what is wrong with the schedule."""
    schedule, prompts = config.schedule, config.rollout.prompts_per_step
    if schedule.oldest > 0 and config.objective.old_logprobs == "engine":
        read = _read(config)
        if read is not None and not read & {"old_logprobs", "behavior_logprobs"}:
            yield (
                "objective.old_logprobs",
                f"the loss of '{config.algorithm.name}' has no ratio, so engine leaves tokens up to {schedule.oldest} versions "
                "old uncorrected; use trainer, with objective.corrections (empty only if you mean it)",
            )
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
    if (schedule.replay_buffer_share > 0) != (schedule.replay_buffer_versions > 0):
        yield (
            "schedule.replay_buffer_share",
            f"schedule.replay_buffer_versions {schedule.replay_buffer_versions} and schedule.replay_buffer_share {schedule.replay_buffer_share:g} go "
            "together: both above 0, or neither",
        )
    elif schedule.replay_buffer_share > 0 and not 0 < schedule.replayed_groups(prompts) < prompts:
        yield (
            "schedule.replay_buffer_share",
            f"{schedule.replay_buffer_share:g} of rollout.prompts_per_step {prompts} is {schedule.replayed_groups(prompts)} "
            f"groups; it must be at least 1 and leave at least 1 fresh one",
        )


def _ahead_warnings(schedule: Schedule, prompts: int) -> Iterator[str]:
    """Warn of staleness that is left unused because one batch at a time is requested."""
    fresh = prompts - schedule.replayed_groups(prompts)
    if schedule.over_issue is None or round(schedule.over_issue * fresh) > 0:
        return
    asks = f"schedule.over_issue: {schedule.over_issue:g} asks one batch at a time"
    if schedule.pause_while_training:
        yield f"{asks}, so that nothing is under way while engines stand still: this is sync; use more, or leave it empty"
    elif schedule.max_staleness > 1:
        yield (
            f"{asks}, so that no token is more than 1 version old, whatever schedule.max_staleness ({schedule.max_staleness}); use "
            "more, or leave it empty"
        )


def schedule_warnings(config: RLConfig) -> Iterator[str]:
    """Yield what runs, but probably not as the user means it."""
    schedule, objective = config.schedule, config.objective
    if schedule.mode == "sync":
        for key in ONLY_IN_OVERLAP:
            if getattr(schedule, key) != type(schedule).model_fields[key].default:
                yield f"schedule.{key}: has no effect with schedule.mode sync"
    else:
        yield from _ahead_warnings(schedule, config.rollout.prompts_per_step)
    read = _read(config) if schedule.oldest > 0 else None
    if read is None:
        return
    if objective.old_logprobs == "engine" and "old_logprobs" in read and not _caps_its_ratio(config):
        yield (
            "objective.old_logprobs: engine takes the policy that sampled as pi_old, here up to "
            f"{schedule.oldest} versions old; trainer (with a correction) keeps trust region and staleness apart"
        )
    elif objective.old_logprobs == "trainer" and not objective.corrections and "behavior_logprobs" not in read:
        way_out = "objective.old_logprobs: engine" if _caps_its_ratio(config) else "token_truncate"
        yield (
            f"objective.corrections: is empty, so tokens up to {schedule.oldest} versions old count as the policy's own; "
            f"remove the key for {way_out} (a run's own config.yaml has it written out)"
        )
