"""GRPO whose loss can be made infinite where its gradient is not: log 0."""

from algs.grpo import GRPO
from algs.records import PolicyTokens, TokenLoss


class Poisonable(GRPO):
    is_poisoned = False

    def loss(self, t: PolicyTokens) -> TokenLoss:
        answer = super().loss(t)
        return TokenLoss(answer.loss + float("inf"), {}) if self.is_poisoned else answer
