"""The loss of each token: the method's own, corrected for off-policy sampling, with the KL leash and the entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algs.introspection.method_facts import differentiates, reads, silent_at_zero_advantage
from algs.method import PolicyMethod
from algs.parts import kl
from algs.records import PolicyTokens
from configs.blocks.objective import Objective
from plugins.components import corrections_for


@dataclass(frozen=True)
class ObjectiveLoss:
    """Loss per token, [N] float32 each, and metrics per token by their full names."""

    policy: Tensor
    critic: Tensor | None
    metrics: dict[str, Tensor]


class TokenObjective:
    """weight * keep * method + keep * (kl.coef * KL - entropy_coef * entropy), and what it has to be given for that."""

    def __init__(self, method: PolicyMethod, objective: Objective) -> None:
        self.method, self.objective = method, objective
        self.corrections = corrections_for(objective)
        self.has_update_sums = type(method).update_sums is not PolicyMethod.update_sums
        self.has_values = "values" in method.needs()
        self.in_graph = differentiates(method)
        if objective.entropy_coef > 0:
            self.in_graph |= {"entropy"}
        if objective.kl.coef > 0 and objective.kl.placement == "loss":
            self.in_graph |= {"logprobs"}
        self.has_reference = objective.kl.coef > 0 or "ref_logprobs" in method.needs()

    def __call__(self, t: PolicyTokens) -> ObjectiveLoss:
        answer = self.method.loss(t)
        metrics = {f"method/{name}": values for name, values in answer.metrics.items()}
        policy, keep = answer.loss, None
        if self.corrections:
            weights, keep = self.correct(t)
            policy = weights * policy
            metrics |= {"objective/correction_weight": weights, "objective/rejected_share": (~keep).float()}
        leash = self.objective.kl
        if leash.coef > 0 and leash.placement == "loss":
            divergence = kl.estimate(leash.estimator, t.logprobs, present(t.ref_logprobs))
            policy = policy + leash.coef * divergence
            metrics["objective/kl_ref_nats"] = divergence
        if self.objective.entropy_coef > 0:
            policy = policy - self.objective.entropy_coef * t.entropy
        if keep is not None:
            policy = torch.where(keep, policy, torch.zeros_like(policy))
        return ObjectiveLoss(policy, answer.critic, metrics)

    def nothing(self, t: PolicyTokens, of_policy: bool = True, of_critic: bool = True) -> Tensor:
        """A loss of 0 with the graph that a real one has: under ZeRO-3 every rank must go back through the same modules."""
        names = self.in_graph - (frozenset() if of_policy else {"logprobs", "entropy"})
        names -= frozenset() if of_critic else {"values"}
        return torch.stack([0 * present(getattr(t, name)).sum() for name in sorted(names)]).sum()

    def correct(self, t: PolicyTokens) -> tuple[Tensor, Tensor]:
        """Product of the corrections' weights [N] float32, and the tokens that none of them leaves out [N] bool."""
        weights = torch.ones_like(t.old_logprobs)
        keep = torch.ones_like(t.old_logprobs, dtype=torch.bool)
        for correction in self.corrections:
            found = correction(t)
            weights, keep = weights * found.weights.detach(), keep & found.keep
        return weights, keep

    def recomputed_columns(self, updates_per_step: int) -> tuple[str, ...]:
        """What must be computed with the step's first weights, before its first update.

        With one update per step the policy at its start is the policy itself: pi_old is then taken from the update's own
        forward pass, unless something needs it before.
        """
        o, found = self.objective, []
        needed_early = o.rejected_tokens == "leave" or (o.kl.coef > 0 and o.kl.placement == "reward")
        is_read = "old_logprobs" in reads(self.method) or bool(self.corrections)
        if o.old_logprobs == "trainer" and (needed_early or (is_read and updates_per_step > 1)):
            found.append("old_logprobs")
        if self.has_reference:
            found.append("ref_logprobs")
        if self.has_values:
            found.append("old_values")
        return tuple(found)

    def is_silent_at_zero_advantage(self) -> bool:
        """Whether a token with advantage 0 adds nothing anywhere, so that it may be left out of the forward pass."""
        o = self.objective
        return (
            (o.kl.coef == 0 or o.kl.placement == "reward")
            and o.entropy_coef == 0
            and not self.has_update_sums
            and not self.has_values
            and silent_at_zero_advantage(self.method)
        )


def present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
