"""Rules on the method and what surrounds it: combinations that make no sense, each with its reason and the remedy.

Methods, advantages and corrections do not declare what they do: they are run on made-up data (algs/introspection).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from configs.blocks.objective import KL, Critic
from configs.blocks.rl import RLConfig
from configs.rules.problem import Problem
from plugins.kinds import listed

if TYPE_CHECKING:
    from algs.method import PolicyMethod


def objective_problems(config: RLConfig) -> Iterator[Problem]:
    """Yield what is wrong with algorithm, objective, critic and capture together."""
    from algs.introspection.method_facts import OPTIONAL, reads  # imports torch; --help must not

    name, method = config.algorithm.name, config.algorithm.make_method()
    try:
        read = _asked(f"loss() of '{name}'", reads, method)
    except ValueError as error:
        yield "algorithm.name", str(error)
        return
    for field in sorted(method.needs() - set(OPTIONAL)):
        yield (
            "algorithm.name",
            f"needs() of '{name}' names {field}; the optional fields of PolicyTokens are {', '.join(OPTIONAL)}",
        )
    for field in sorted(read & {"ref_logprobs", "values"} - method.needs()):
        yield "algorithm.name", f"the loss of '{name}' reads {field}, which its needs() must name to be given it"
    yield from split_problems(name, method)
    yield from _advantage(config, method, read)
    yield from _corrections(config, read)
    yield from _kl(config, method)
    yield from _critic(config, has_critic="values" in method.needs())
    if outside := [step for step in config.capture.steps if not 1 <= step <= config.train.steps]:
        yield "capture.steps", f"{outside[0]} is not among the run's steps, 1 to {config.train.steps} (train.steps)"


def split_problems(name: str, method: PolicyMethod) -> Iterator[Problem]:
    """Yield what of the method's answer depends on how an update is cut into micro-batches."""
    from algs.introspection.split_check import split_problem

    try:
        problem = _asked(f"loss() or update_sums() of '{name}'", split_problem, name, method)
    except ValueError as error:
        problem = str(error)
    if problem:
        yield "algorithm.name", problem


def objective_warnings(config: RLConfig) -> Iterator[str]:
    """Yield what runs, but probably not as the user means it."""
    from algs.introspection.method_facts import caps_its_ratio, reads, rejects

    objective, default = config.objective, KL()
    for key in ("estimator", "placement", "importance"):
        if objective.kl.coef == 0 and getattr(objective.kl, key) != getattr(default, key):
            yield f"objective.kl.{key}: has no effect while objective.kl.coef is 0"
    if objective.rejected_tokens == "leave" and not any(map(rejects, objective.correction_functions())):
        yield "objective.rejected_tokens: leave has no effect, since no correction here leaves tokens out"
    method = config.algorithm.make_method()
    read = reads(method)
    weighs_old_tokens = config.schedule.oldest > 0 and caps_its_ratio(method)
    is_single_update = config.train.updates_in_step == 1 and not weighs_old_tokens
    if objective.old_logprobs == "engine" and is_single_update and "old_logprobs" in read:
        yield (
            "objective.old_logprobs: with one update per step the ratio to the trainer's own log-probabilities is 1; "
            "to the engine's it is the gap between engine and trainer, which the method then clips or weighs"
        )
    if config.train.updates_in_step > 1 and not read & {"old_logprobs", "behavior_logprobs"}:
        key = "updates_per_step" if config.train.updates_per_step > 1 else "passes_per_batch"
        yield (
            f"train.{key}: the loss of '{config.algorithm.name}' has no ratio, so every update after a step's first "
            "takes its tokens for the policy's own (a correction weighs by pi_old / mu, which does not see it); use 1, or a "
            "method with a ratio to the policy (cispo)"
        )
    if config.rollout.max_refill_rounds == 0 and any(item.refill for item in config.rollout.filters):
        yield "rollout.max_refill_rounds: 0 asks for no further prompts, so a filter's refill has no effect"


def _advantage(config: RLConfig, method: PolicyMethod, read: frozenset[str]) -> Iterator[Problem]:
    from algs.introspection.method_facts import made_up_groups

    name, named = config.algorithm.name, config.objective.advantage
    has_critic = "values" in method.needs()
    if named is None and not _has_advantages(method):
        yield (
            "algorithm.name",
            f"'{name}' defines no advantage, so it cannot learn from rewards; choose one of "
            f"{', '.join(name for name, entry in listed('method').items() if entry.has_advantages)}",
        )
        return
    if "advantages" not in read:
        yield "algorithm.name", f"the loss of '{name}' does not depend on advantages, so it cannot learn from rewards"
        return
    if named is not None and has_critic:
        yield (
            "objective.advantage",
            f"'{name}' has a critic, whose values and returns belong to its own advantage; remove this key, or use a "
            "method without a critic",
        )
        return
    key = "algorithm.name" if named is None else "objective.advantage"
    what = f"advantages() of '{name}'" if named is None else named.function
    advantage = config.objective.advantage_function(method)
    try:
        groups = made_up_groups((4, 1, 3), has_critic)
        found = _asked(what, advantage, groups)
        of_single_responses = _asked(what, advantage, made_up_groups((1,) * 6, has_critic))
        returns = _asked(f"returns() of '{name}'", method.returns, groups) if has_critic else None
    except ValueError as error:
        yield key, str(error)
        return
    responses, tokens = len(groups.rewards), len(groups.sequence)
    if (shape := _shape(found)) not in ((responses,), (tokens,)):
        yield (
            key,
            f"{what} gave {shape} for {responses} responses of {tokens} tokens; it must give a tensor with one number "
            "per response, or one per token",
        )
    elif has_critic and (shape := _shape(returns)) != (tokens,):
        yield key, f"returns() of '{name}' gave {shape} for {tokens} tokens; it must give a tensor with one number each"
    elif config.rollout.responses_per_prompt == 1 and not bool(of_single_responses.any()):
        who = f"'{name}'" if named is None else f"the advantage '{named.function}'"
        yield (
            "rollout.responses_per_prompt",
            f"1 gives every response an advantage of 0 under {who} (its baseline is the group's mean); use at least 2",
        )


def _corrections(config: RLConfig, read: frozenset[str]) -> Iterator[Problem]:
    from algs.introspection.method_facts import rejects_agreement, weighs

    objective, name = config.objective, config.algorithm.name
    if objective.old_logprobs == "engine" and read >= {"old_logprobs", "behavior_logprobs"}:
        yield (
            "objective.old_logprobs",
            f"'{name}' weighs by pi_old / mu, which is 1 everywhere when the engine's log-probabilities are pi_old; use "
            "trainer",
        )
    if not objective.corrections:
        if objective.rejected_tokens == "leave":
            yield (
                "objective.rejected_tokens",
                "there is no correction that could leave tokens out; remove this key, or add one to objective.corrections",
            )
        return
    if objective.old_logprobs == "engine":
        yield (
            "objective.corrections",
            "with objective.old_logprobs engine pi_old is mu, so that every pi_old / mu is 1 and nothing is corrected; "
            "use objective.old_logprobs trainer, or no correction",
        )
    if "behavior_logprobs" in read:
        yield (
            "objective.corrections",
            f"the loss of '{name}' already reads mu, so that a factor pi_old / mu would count it twice; use no correction",
        )
    weighing = []
    for index, (named, correction) in enumerate(
        zip(objective.corrections, objective.correction_functions(), strict=True)
    ):
        try:
            if _asked(named.function, weighs, correction):
                weighing.append(named.function)
            if _asked(named.function, rejects_agreement, correction):
                yield (
                    f"objective.corrections.{index}",
                    f"{named.function} leaves out even tokens on which trainer and engine agree (pi_old / mu = 1); "
                    "choose bounds around 1",
                )
        except ValueError as error:
            yield f"objective.corrections.{index}", str(error)
    if len(weighing) > 1:
        yield (
            "objective.corrections",
            f"{' and '.join(weighing)} each multiply by pi_old / mu, which would count more than once; keep one of them "
            "beside those that only leave tokens out (geometric_mask, veto)",
        )


def _kl(config: RLConfig, method: PolicyMethod) -> Iterator[Problem]:
    from algs.introspection.method_facts import ignores_scale_of_a_group

    objective, penalty = config.objective, config.objective.kl
    if penalty.in_loss and penalty.estimator == "k1":
        yield (
            "objective.kl.estimator",
            "k1 in the loss holds nothing back: its gradient is 0 in expectation; use k2 or k3, or "
            "objective.kl.placement reward",
        )
    if not penalty.in_reward:
        return
    if penalty.importance:
        yield (
            "objective.kl.importance",
            "belongs to a KL in the loss; one in the reward is weighed as the reward is. Remove this key, or use "
            "objective.kl.placement loss",
        )
    if penalty.estimator_used != "k1":
        yield (
            "objective.kl.estimator",
            f"{penalty.estimator} in the reward does not pull towards the reference: only k1's policy gradient is that of "
            "KL(pi || pi_ref) (k3's is nearly orthogonal to it); use k1, or objective.kl.placement loss",
        )
    advantage = objective.advantage
    try:
        cancels = ignores_scale_of_a_group(objective.advantage_function(method), "values" in method.needs())
    except Exception:  # noqa: BLE001 an advantage that fails is reported by _advantage
        return
    if cancels:
        who = f"'{config.algorithm.name}'" if advantage is None else f"the advantage '{advantage.function}'"
        yield (
            "objective.kl.placement",
            f"reward has no strength under {who}, which divides by the spread of the group: where a prompt's responses are "
            "paid alike, a coef of 1e-4 and one of 1 give the same advantages; use loss, or an objective.advantage without "
            "that division (rloo, group_mean)",
        )


def _critic(config: RLConfig, has_critic: bool) -> Iterator[Problem]:
    critic = config.critic
    if not has_critic:
        if critic != Critic():
            yield (
                "critic",
                f"'{config.algorithm.name}' has no critic; remove this block, or use a method that has one "
                "(algorithm.name: ppo)",
            )
        return
    if critic.kind == "shared" and critic.learning_rate is not None:
        yield (
            "critic.learning_rate",
            "a shared critic is trained by the policy's optimizer, at train.learning_rate; remove this key, or use "
            "critic.kind separate",
        )
    if critic.warmup_steps >= config.train.steps:
        yield (
            "critic.warmup_steps",
            f"{critic.warmup_steps} must be below train.steps {config.train.steps}, or the policy is never trained",
        )


def _has_advantages(method: PolicyMethod) -> bool:
    from algs.method import PolicyMethod

    return type(method).advantages is not PolicyMethod.advantages


def _shape(found: Any) -> Any:
    return tuple(found.shape) if hasattr(found, "shape") else f"a {type(found).__name__}"


def _asked(what: str, question: Callable[..., Any], *given: Any) -> Any:
    """Return the answer; raise ValueError that says what failed, since the user's own code may fail in any way.

    The line in that code is named, except for a ValueError, whose text is expected to explain itself.
    """
    try:
        return question(*given)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"line {frame.lineno} of {frame.filename}"
        raise ValueError(f"{what} fails on made-up data: {type(error).__name__}: {error} ({where})") from error
