"""The token table has one row for each action token of an update, with its inputs, loss and gradient weight by name.

It is made from the micro-batches and the inputs of the loss, so its losses and gradients are those of the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algs.records import PolicyTokens, TokenLoss
from data_feeds.packing import MicroBatch
from orchestration.trainer.token_objective import TokenObjective

COLUMNS = {
    "token": "The token's text.",
    "trajectory": "Index of the response in the update.",
    "position": "Index among the response's action tokens.",
    "group": "Index of the prompt in the update.",
    "staleness": "Policy versions between sampling and training.",
    "reward": "Reward of the response, before a KL penalty.",
    "advantage": "As the loss saw it; the live step's.",
    "behavior_logprob": "log mu: the engine's, as sampled.",
    "ref_logprob": "log pi_ref.",
    "old_logprob": "log pi_old, the denominator of the ratio.",
    "old_value": "The critic's value at the start of the step.",
    "return": "What the value should have been.",
    "logprob": "log pi, at the sampling temperature.",
    "entropy": "Entropy of pi in nats.",
    "value": "The critic's value.",
    "ratio": "pi / pi_old.",
    "rho": "pi_old / mu.",
    "loss": "The policy loss of the token, with KL, entropy bonus and corrections, before its weight.",
    "value_loss": "The critic's loss of the token, before its weight.",
    "loss_weight": "The aggregation's weight of the token's loss.",
    "weight": "Weight on grad log pi: -d(step's loss)/d log pi, divided by loss_weight.",
    "share": "|d(step's loss)/d log pi| as a share of its sum over all tokens: in log-probability space, not in that "
    "of the parameters. The entropy bonus is not in it.",
    "state": "clipped: the method gives no gradient though the advantage is not 0. rejected: a correction left it out.",
    "other_loss": "The policy loss under the other method.",
    "other_weight": "Weight on grad log pi under the other method.",
    "other_share": "Share under the other method.",
    "other_state": "State under the other method.",
    "change": "now clipped, no longer clipped, or sign turned: what the other method would change.",
}
TEXTS = ("token", "state", "other_state", "change")
WHOLE = ("trajectory", "position", "group", "staleness")
# Each number depends only on those before it.
CAUSES = (
    "reward", "advantage", "behavior_logprob", "ref_logprob", "old_logprob", "old_value", "return", "logprob",
    "entropy", "value", "ratio", "rho", "loss", "value_loss", "weight",
)  # fmt: skip
CLIPPED, REJECTED = "clipped", "rejected"


@dataclass(frozen=True)
class TokenTable:
    """The table of N action tokens, trajectory after trajectory. It has the columns that the step has, [N] each."""

    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["trajectory"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def nonfinite(self, name: str) -> np.ndarray:
        """Return where a column is Inf or NaN though it should not be, [N] bool.

        A missing reward is NaN too. It counts only when its advantage is non-finite as well.
        """
        bad = ~np.isfinite(self[name])
        return bad & ~np.isfinite(self["advantage"]) if name == "reward" else bad

    def first_nonfinite(self) -> tuple[str, int] | None:
        """Return column and row of the first Inf or NaN, by the order of CAUSES, then of tokens; None without one."""
        for name in CAUSES:
            if name in self.columns and (rows := np.flatnonzero(self.nonfinite(name))).size:
                return name, int(rows[0])
        return None

    def order(self, by: str, ascending: bool = False) -> np.ndarray:
        """Return the rows in order, [N] int64: non-finite ones, then the others by a column, then by share.

        Raises:
            ValueError: the step has no such column.
        """
        if by not in self.columns:
            raise ValueError(f"--sort {by}: no such column here; there are {', '.join(self.columns)}")
        nonfinite = np.any([self.nonfinite(name) for name in CAUSES if name in self.columns], axis=0)
        values = self[by]
        rank = np.unique(values, return_inverse=True)[1]  # sorts NaN last, and texts alphabetically
        return np.lexsort((-self["share"], rank if ascending else -rank, ~nonfinite))


def token_table(
    batches: Sequence[MicroBatch],
    tokens: Sequence[PolicyTokens],
    objective: TokenObjective,
    text: Callable[[list[int]], str],
) -> TokenTable:
    """Return the table of one update.

    Args:
        batches: the micro-batches of all ranks, without dummies.
        tokens: the input of the loss for each micro-batch.
        objective: the function that computes the losses.
        text: the tokenizer's function from ids to text.
    """
    parts = [_columns(b, t, objective) for b, t in zip(batches, tokens, strict=True)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort((columns["position"], columns["trajectory"]))
    columns = {name: values[order] for name, values in columns.items()}
    size = np.abs(columns["weight"] * columns["loss_weight"])
    total = size[np.isfinite(size)].sum()
    columns["share"] = size / total if total > 0 else np.where(np.isfinite(size), 0.0, np.nan)
    texts = {int(i): text([int(i)]) for i in np.unique(columns["token"])}
    columns["token"] = np.array([texts[int(i)] for i in columns["token"]], dtype=object)
    return TokenTable({name: columns[name] for name in COLUMNS if name in columns})


def _columns(batch: MicroBatch, t: PolicyTokens, objective: TokenObjective) -> dict[str, np.ndarray]:
    weights = torch.from_numpy(np.array(batch.loss_weights)).to(t.logprobs.device)
    whole, answer = policy_gradient(objective, t, weights)
    alone, _ = policy_gradient(objective.method.loss, t, weights)
    _, keep = objective.correct(t)
    clipped = (alone == 0) & (t.advantages != 0)
    starts = np.searchsorted(batch.sequence, np.arange(len(batch.group)))
    state = np.where(_array(keep), np.where(_array(clipped), CLIPPED, ""), REJECTED)
    columns: dict[str, Any] = {
        "token": batch.targets,
        "trajectory": batch.trajectory_index[batch.sequence],
        "position": np.arange(len(batch.sequence)) - starts[batch.sequence],
        "group": batch.group[batch.sequence],
        "staleness": t.staleness,
        "reward": batch.rewards[batch.sequence],
        "advantage": t.advantages,
        "behavior_logprob": t.behavior_logprobs,
        "ref_logprob": t.ref_logprobs,
        "old_logprob": t.old_logprobs,
        "old_value": t.old_values,
        "return": t.returns,
        "logprob": t.logprobs,
        "entropy": t.entropy,
        "value": t.values,
        "ratio": torch.exp(t.logprobs - t.old_logprobs),
        "rho": torch.exp(t.old_logprobs - t.behavior_logprobs),
        "loss": answer.loss,
        "value_loss": answer.critic,
        "loss_weight": weights,
        "weight": 0 - torch.where(weights == 0, whole, whole / weights),
        "state": state,
    }
    return {name: _array(values) for name, values in columns.items() if values is not None}


def policy_gradient(
    loss: Callable[[PolicyTokens], TokenLoss], t: PolicyTokens, weights: Tensor
) -> tuple[Tensor, TokenLoss]:
    """Return d(weighted policy loss)/d log pi of each token, [N], and the output of the loss."""
    leaf = t.logprobs.detach().clone().requires_grad_()
    answer = loss(dataclasses.replace(t, logprobs=leaf))
    if not answer.loss.requires_grad:
        return torch.zeros_like(leaf), answer
    (gradient,) = torch.autograd.grad((answer.loss * weights).sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient, answer


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def prompts(batches: Sequence[MicroBatch], text: Callable[[list[int]], str]) -> dict[int, str]:
    """Return the text before the first action token of each trajectory, by the trajectory's index."""
    texts = {}
    for batch in batches:
        for row, trajectory in enumerate(batch.trajectory_index):
            last = int(batch.predict[np.argmax(batch.sequence == row)])
            own = next(s for s in batch.segments if s.start <= last < s.start + s.length)
            prefix = batch.input_ids[own.prefix_start : own.prefix_start + own.prefix_length]
            texts[int(trajectory)] = text([*prefix.tolist(), *batch.input_ids[own.start : last + 1].tolist()])
    return texts


def with_comparison(live: TokenTable, other: TokenTable) -> TokenTable:
    """Return the live table with the other method's columns, and a column that says what it would change."""
    was, now = live["state"] == CLIPPED, other["state"] == CLIPPED
    turned = live["weight"] * other["weight"] < 0
    change = np.select(
        [was & ~now, now & ~was, turned], ["no longer clipped", "now clipped", "sign turned"], default=""
    )
    added = {f"other_{name}": other[name] for name in ("loss", "weight", "share", "state")}
    return TokenTable({**live.columns, **added, "change": change})
