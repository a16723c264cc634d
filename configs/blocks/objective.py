"""The blocks around a method's loss, independent of the method: advantage, KL, off-policy correction, critic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from configs.blocks.block import Block, Component, Named


class Advantage(Component):
    """The advantage, in place of the method's: one of algs/advantages.py, or your own."""

    kind = "advantage"


class Corrector(Component):
    """An off-policy correction: one of algs/corrections.py, or your own."""

    kind = "correction"


class KL(Block):
    """The KL penalty: it holds the policy near the reference, which is the model as it was before training."""

    coef: float = Field(0.0, ge=0, description="Weight of KL(pi || pi_ref); 0 holds no reference model.")
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="Per-token estimator: k1 = log(pi/ref), k2 = k1²/2, k3 = ref/pi - 1 - log(ref/pi). Empty: k3 in the "
        "loss; k1 in the reward, where the others do not have the KL's gradient.",
    )
    placement: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: a term of every token's loss. reward: subtracted from the reward before the "
        "advantage; of a token's own and later tokens under rloo, reinforce_plus_plus and a critic, of the whole response "
        "elsewhere.",
    )
    importance: bool | None = Field(
        None,
        description="Weigh a KL in the loss by pi / mu, which gives it the gradient of KL(pi || pi_ref) on tokens that another "
        "policy sampled (arXiv 2512.02556). Empty: where tokens may be older than the policy (overlap, a replay buffer, "
        "several updates in a step).",
    )

    @property
    def in_reward(self) -> bool:
        """Return whether there is a penalty, and it is taken off the reward."""
        return self.coef > 0 and self.placement == "reward"

    @property
    def in_loss(self) -> bool:
        """Return whether there is a penalty, and it is a term of the loss."""
        return self.coef > 0 and self.placement == "loss"

    @property
    def estimator_used(self) -> Literal["k1", "k2", "k3"]:
        """Return the estimator, or what an empty key means where the penalty is."""
        return self.estimator or ("k1" if self.placement == "reward" else "k3")


class Objective(Block):
    """The settings around the method's own loss. Empty keys take the method's own choice."""

    advantage: Advantage | None = Field(
        None, description="A function in algs/advantages.py or your own, in place of the method's advantage."
    )
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_length", "sequence_sum"] | None = Field(
        None,
        description="How token losses become one number; denominators are global over the update. Empty: as in "
        "the method's paper.",
    )
    old_logprobs: Literal["trainer", "engine"] = Field(
        "trainer",
        description="pi_old of the ratio: recomputed by the trainer at the start of the step, or the engine's own "
        "log-probabilities (then pi_old is mu: one forward pass less, and the engine's rounding in every ratio). Left out, it is "
        "engine where tokens may be old and the method caps its ratio (CISPO, ScaleRL).",
    )
    corrections: list[Corrector] = Field(
        default_factory=list,
        description="Off-policy corrections from pi_old / mu (algs/corrections.py or your own): factors on the method's loss "
        "and tokens left out.",
    )
    rejected_tokens: Literal["stay", "leave"] = Field(
        "stay", description="Whether tokens that a correction leaves out stay in the aggregation's denominators."
    )
    kl: KL = Field(default_factory=KL)
    entropy_coef: float = Field(0.0, ge=0, description="Weight of an entropy bonus.")

    def advantage_function(self, method: Any) -> Callable[..., Any]:
        """Return the function that computes advantages: that in `advantage`, or the method's (a PolicyMethod's)."""
        advantages: Callable[..., Any] = method.advantages
        return advantages if self.advantage is None else self.advantage.bound()

    def correction_functions(self) -> list[Callable[..., Any]]:
        """Return the functions in `corrections` with their parameters given, in order. They can be pickled."""
        return [correction.bound() for correction in self.corrections]

    def aggregation_mode(self, method: Any) -> str:
        """Return one of algs.parts.aggregation.MODES: `aggregation`, or that of the method's paper."""
        return self.aggregation or str(method.aggregation)


class Critic(Block):
    """The value function of methods that have one (PPO)."""

    kind: Literal["separate", "shared"] = Field(
        "separate",
        description="separate: a model and optimizer of its own, begun from the policy's weights. shared: a value head on "
        "the policy's trunk.",
    )
    learning_rate: float | None = Field(None, gt=0, description="Of a separate critic. Empty: train.learning_rate.")
    warmup_steps: int = Field(0, ge=0, description="First steps in which only the critic learns.")


class Filter(Named):
    """Which responses are trained on: a file in rollouts/filters, or your own. Runs on whole groups, after scoring."""

    kind = "filter"
    refill: bool | None = Field(
        None,
        description="Ask further prompts in place of groups that are left out whole. Empty: the filter's own choice.",
    )
    in_baseline: bool = Field(False, description="Responses left out one by one still count in their group's baseline.")
