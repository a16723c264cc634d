"""Measure an update: sums over its tokens, kept on the device until its end."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.parts.ratio import ratio_minus_one
from algs.records import PolicyTokens
from orchestration.metrics.tally import Tally
from orchestration.model.prepared_batch import PreparedBatch


class MetricSums:
    """Sums, counts and maxima of one rank, without a host sync per micro-batch."""

    def __init__(self, has_behavior: bool) -> None:
        """Begin at zero. has_behavior: the tokens were sampled by a policy, so its log-probabilities have a meaning."""
        self.has_behavior = has_behavior
        self.loss: Tensor | float = 0.0
        self.critic_loss: Tensor | float | None = None
        self.tokens = 0
        self.forward_tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(
        self,
        prepared: PreparedBatch,
        t: PolicyTokens,
        metrics: dict[str, Tensor],
        loss: Tensor,
        critic_loss: Tensor | None,
    ) -> None:
        """Add one micro-batch. `metrics` have one entry per token, response or pair, by their full names."""
        self.forward_tokens += prepared.input_ids.shape[1]
        self.loss = self.loss + loss.detach()
        if critic_loss is not None:
            self.critic_loss = (self.critic_loss or 0.0) + critic_loss.detach()
        if prepared.is_dummy:
            return
        self.tokens += t.logprobs.shape[0]
        self._put("train/entropy_nats", t.entropy)
        for name, values in metrics.items():
            self._put(name, values)
        if self.has_behavior:
            log_rho = t.logprobs.detach() - t.behavior_logprobs
            self._put("train/logprob_gap_mean", log_rho.abs())
            self._put("train/kl_behavior_nats", ratio_minus_one(log_rho) - log_rho)
            self._max("train/logprob_gap_max", log_rho.abs())

    def _put(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + values.detach().double().sum()
        self.counts[name] = self.counts.get(name, 0) + values.numel()

    def _max(self, name: str, values: Tensor) -> None:
        largest = values.max()
        self.maxima[name] = torch.maximum(self.maxima[name], largest) if name in self.maxima else largest

    def to_tally(self, rank: int) -> Tally:
        """Return the rank's part of the update's metrics; ranks' tallies add up to the whole."""
        tally = Tally()
        first = 1 if rank == 0 else 0  # ranks hold parts of one sum
        tally.add("train/loss", float(self.loss), first)
        if self.critic_loss is not None:
            tally.add("critic/loss", float(self.critic_loss), first)
        tally.total("train/tokens", self.forward_tokens)
        tally.total("train/action_tokens", self.tokens)
        for name, value in self.sums.items():
            tally.add(name, float(value), self.counts[name])
        for name, value in self.maxima.items():
            tally.maximum(name, float(value))
        return tally
