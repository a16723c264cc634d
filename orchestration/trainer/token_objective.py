"""The loss of each token: the method's own, corrected for off-policy sampling, with KL penalty and entropy bonus."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from algs.introspection.method_facts import differentiates, ignores_zero_advantage, reads
from algs.method import PolicyMethod
from algs.parts import kl
from algs.records import PolicyTokens, TokenLoss
from configs.blocks.objective import Objective


class TokenObjective:
    """weight * keep * method + keep * (kl.coef * KL - entropy_coef * entropy), and the numbers that this needs.

    Facts about it are worked out once: a process makes one object and hands it on.
    """

    def __init__(self, method: PolicyMethod, objective: Objective) -> None:
        self.method, self.objective = method, objective
        self.corrections = objective.correction_functions()
        self.has_update_sums = type(method).update_sums is not PolicyMethod.update_sums
        self.has_values = "values" in method.needs()
        self.has_reference = objective.kl.coef > 0 or "ref_logprobs" in method.needs()

    def __call__(self, t: PolicyTokens) -> TokenLoss:
        """Return the loss of each token, and metrics by their full names."""
        answer = self.method.loss(t)
        metrics = {f"method/{name}": values for name, values in answer.metrics.items()}
        loss, keep = answer.loss, None
        if self.corrections:
            weights, keep = self.correct(t)
            loss = weights * loss
            metrics |= {"objective/correction_weight": weights, "objective/rejected_share": (~keep).float()}
        penalty = self.objective.kl
        if penalty.in_loss:
            name, ref = penalty.estimator_used, present(t.ref_logprobs)
            if penalty.importance:
                divergence = kl.weighted(name, t.logprobs, t.behavior_logprobs, ref)
            else:
                divergence = kl.estimate(name, t.logprobs, ref)
            loss = loss + penalty.coef * divergence
            metrics["objective/kl_ref_nats"] = divergence
        if self.objective.entropy_coef > 0:
            loss = loss - self.objective.entropy_coef * t.entropy
        if keep is not None:
            loss = torch.where(keep, loss, torch.zeros_like(loss))
        return TokenLoss(loss, metrics, answer.critic)

    def nothing(self, t: PolicyTokens, of_policy: bool = True, of_critic: bool = True) -> Tensor:
        """Return a loss of 0 with the graph of a real one: under ZeRO-3 all ranks must run the same backward pass."""
        names = self._in_graph - (frozenset() if of_policy else {"logprobs", "entropy"})
        names -= frozenset() if of_critic else {"values"}
        return torch.stack([0 * present(getattr(t, name)).sum() for name in sorted(names)]).sum()

    def correct(self, t: PolicyTokens) -> tuple[Tensor, Tensor]:
        """Return the product of the corrections' weights [N] float32, and which tokens all of them keep [N] bool."""
        weights = torch.ones_like(t.old_logprobs)
        keep = torch.ones_like(t.old_logprobs, dtype=torch.bool)
        for correction in self.corrections:
            answer = correction(t)
            weights, keep = weights * answer.weights.detach(), keep & answer.keep
        return weights, keep

    def recomputed_columns(self, updates: int) -> tuple[str, ...]:
        """Return the names of the numbers to be computed with the step's first weights, before its first update.

        With one update in a step the policy at its start is the policy itself: pi_old is then taken from the update's
        own forward pass, unless something needs it before."""
        o, names = self.objective, []
        needed_early = o.rejected_tokens == "leave" or o.kl.in_reward
        if o.old_logprobs == "trainer" and (needed_early or (self._reads_old_logprobs and updates > 1)):
            names.append("old_logprobs")
        names += sorted(self.method.needs() - {"values"} | ({"ref_logprobs"} if self.has_reference else set()))
        if self.has_values:
            names.append("old_values")
        return tuple(names)

    @functools.cached_property
    def ignores_zero_advantage(self) -> bool:
        """Return whether a token with advantage 0 adds nothing anywhere, so that the forward pass may leave it out."""
        o = self.objective
        return (
            not o.kl.in_loss
            and o.entropy_coef == 0
            and not self.has_update_sums
            and not self.has_values
            and ignores_zero_advantage(self.method)
        )

    @functools.cached_property
    def _reads_old_logprobs(self) -> bool:
        return bool(self.corrections) or "old_logprobs" in reads(self.method)

    @functools.cached_property
    def _in_graph(self) -> frozenset[str]:
        """Return the names of the model's outputs that are in the graph of the loss, even with a gradient of 0."""
        o, names = self.objective, differentiates(self.method)
        if o.entropy_coef > 0:
            names |= {"entropy"}
        if o.kl.in_loss:
            names |= {"logprobs"}
        return names


def present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
