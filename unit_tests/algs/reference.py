"""Losses, advantages and corrections once more: float64, one token at a time, from the papers' formulas.

Nothing here comes from algs/. A loss takes the log-probabilities twice, `logp` (what is differentiated) and `frozen`
(what stands under a stop-gradient), so that finite differences in `logp` alone are the gradient the formula means.
Defaults are the papers' and are written out here, so that a changed default in algs/ is noticed too.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step: S trajectories, N action tokens, trajectory after trajectory. All [N] float64 unless noted."""

    lengths: list[int]  # [S]
    group: list[int]  # [S]
    logp: Array
    old: Array
    mu: Array
    ref: Array
    advantage: Array
    value: Array
    old_value: Array
    returns: Array
    chosen: list[bool] = dataclasses.field(default_factory=list)  # [S] preference data: preferred, or desirable

    @property
    def slices(self) -> list[range]:
        """The token positions of each trajectory."""
        ends = np.cumsum(self.lengths)
        return [range(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(ratio: float, a: float, low: float, high: float) -> float:
    """PPO's clipped surrogate, minimised (1707.06347, eq. 7)."""
    return -min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)


def ratios(s: Step, logp: Array) -> list[float]:
    return [math.exp(x - y) for x, y in zip(logp, s.old, strict=True)]


def reinforce(s: Step, logp: Array, frozen: Array) -> list[float]:
    return [-a * x for a, x in zip(s.advantage, logp, strict=True)]


def sft(s: Step, logp: Array, frozen: Array) -> list[float]:
    return [-x for x in logp]


def grpo(
    s: Step,
    logp: Array,
    frozen: Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> list[float]:
    out = []
    for r, a in zip(ratios(s, logp), s.advantage, strict=True):
        loss = surrogate(r, a, clip_low, clip_high)
        if dual_clip is not None and a < 0:
            loss = min(loss, dual_clip * abs(a))
        out.append(loss)
    return out


def dapo(s: Step, logp: Array, frozen: Array, clip_high: float = 0.28, **others: float) -> list[float]:
    return grpo(s, logp, frozen, clip_high=clip_high, **others)


def ppo(s: Step, logp: Array, frozen: Array, dual_clip: float | None = None, **bounds: float) -> list[float]:
    return grpo(s, logp, frozen, dual_clip=dual_clip, **bounds)


def critic(s: Step, value: Array, vf_coef: float = 0.5, vf_clip: float | None = 0.2) -> list[float]:
    out = []
    for v, old, target in zip(value, s.old_value, s.returns, strict=True):
        error = (v - target) ** 2
        if vf_clip is not None:
            error = max(error, (old + clip(v - old, -vf_clip, vf_clip) - target) ** 2)
        out.append(vf_coef * 0.5 * error)
    return out


def cispo(s: Step, logp: Array, frozen: Array, ratio_cap: float = 5.0, ratio_floor: float = 0.0) -> list[float]:
    weights = [clip(r, ratio_floor, ratio_cap) for r in ratios(s, frozen)]
    return [-w * a * x for w, a, x in zip(weights, s.advantage, logp, strict=True)]


def scale_rl(s: Step, logp: Array, frozen: Array, ratio_cap: float = 5.0) -> list[float]:
    return [-min(r, ratio_cap) * a * x for r, a, x in zip(ratios(s, frozen), s.advantage, logp, strict=True)]


def gspo(
    s: Step, logp: Array, frozen: Array, clip_low: float = 3e-4, clip_high: float = 4e-4, level: str = "sequence"
) -> list[float]:
    out = []
    for tokens in s.slices:
        base = logp if level == "sequence" else frozen
        whole = math.exp(sum(base[i] - s.old[i] for i in tokens) / max(len(tokens), 1))
        for i in tokens:
            ratio = whole if level == "sequence" else whole * math.exp(logp[i] - frozen[i])
            out.append(surrogate(ratio, s.advantage[i], clip_low, clip_high))
    return out


def effective_sample_size(s: Step, logp: Array) -> float:
    """(sum rho)^2 / (N sum rho^2) over all action tokens of the step."""
    rho = [math.exp(x - y) for x, y in zip(logp, s.mu, strict=True)]
    return sum(rho) ** 2 / (len(rho) * sum(x * x for x in rho))


def p3o(s: Step, logp: Array, frozen: Array, kl_direction: str = "reverse") -> list[float]:
    ess = effective_sample_size(s, frozen)
    out = []
    for x, fixed, mu, a in zip(logp, frozen, s.mu, s.advantage, strict=True):
        d = x - mu
        rho = math.exp(d)
        kl = {"reverse": rho * d - rho + 1, "forward": rho - 1 - d, "k3": 1 / rho - 1 + d}[kl_direction]
        out.append(-min(math.exp(fixed - mu), ess) * a * x + (1 - ess) * kl)
    return out


def aipo(s: Step, logp: Array, frozen: Array, ratio_cap: float = 2.0) -> list[float]:
    weights = [min(math.exp(x - y), ratio_cap) for x, y in zip(frozen, s.mu, strict=True)]
    return [-w * a * x for w, a, x in zip(weights, s.advantage, logp, strict=True)]


def decoupled_ppo(
    s: Step,
    logp: Array,
    frozen: Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    behavior_cap: float = 5.0,
    above_cap: str = "drop",
) -> list[float]:
    weights = [math.exp(x - y) for x, y in zip(s.old, s.mu, strict=True)]
    weights = [w if w <= behavior_cap else {"drop": 0.0, "clamp": behavior_cap}[above_cap] for w in weights]
    return [w * x for w, x in zip(weights, grpo(s, logp, frozen, clip_low, clip_high), strict=True)]


def sapo(s: Step, logp: Array, frozen: Array, tau_positive: float = 1.0, tau_negative: float = 1.05) -> list[float]:
    out = []
    for r, a in zip(ratios(s, logp), s.advantage, strict=True):
        tau = tau_positive if a > 0 else tau_negative
        out.append(-4 / tau / (1 + math.exp(-tau * (r - 1))) * a)
    return out


# Advantages: rewards by group -> advantages by group, in the same shape.

Ragged = list[list[float]]


def mean(x: list[float]) -> float:
    return math.fsum(x) / len(x)


def spread(x: list[float], minus: int = 0) -> float:
    """Standard deviation with n - `minus` in the denominator."""
    return math.sqrt(math.fsum((v - mean(x)) ** 2 for v in x) / (len(x) - minus))


def flat(rewards: Ragged) -> list[float]:
    return [r for group in rewards for r in group]


def centred(rewards: Ragged) -> Ragged:
    return [[r - mean(group) for r in group] for group in rewards]


def group_zscore(rewards: Ragged) -> Ragged:
    out = []
    for group in rewards:
        if len(group) < 2 or max(group) == min(group):
            out.append([0.0] * len(group))
        else:
            out.append([(r - mean(group)) / (spread(group, 1) + 1e-6) for r in group])
    return out


def rloo(rewards: Ragged) -> Ragged:
    """Each reward minus the mean of the others, as the paper says it (2402.14740, section 2.3)."""
    out = []
    for group in rewards:
        rest = [[other for j, other in enumerate(group) if j != i] for i in range(len(group))]
        out.append([r - mean(others) if others else 0.0 for r, others in zip(group, rest, strict=True)])
    return out


def divided(x: Ragged, by: float) -> Ragged:
    return [[v / by if by > 1e-6 else 0.0 for v in group] for group in x]


def lite_ppo(rewards: Ragged) -> Ragged:
    return divided(centred(rewards), spread(flat(rewards)))


def scale_rl_advantage(rewards: Ragged) -> Ragged:
    return divided(centred(rewards), spread(flat(centred(rewards))))


def reinforce_plus_plus(rewards: Ragged) -> Ragged:
    """Normalised over the batch's responses, with n - 1: the paper leaves both open (its public code takes tokens, n)."""
    middle = mean(flat(rewards))
    moved = [[v - middle for v in group] for group in rewards]
    return divided(moved, spread(flat(moved), 1) if len(flat(moved)) > 1 else 0.0)


def reinforce_plus_plus_baseline(rewards: Ragged) -> Ragged:
    return reinforce_plus_plus(centred(rewards))


def gae(
    rewards: list[float], values: list[float], final_value: float, truncated: bool, discount: float, gae_lambda: float
) -> list[float]:
    """One response, backwards: delta_t = r_t + discount V_{t+1} - V_t (1506.02438, eq. 16)."""
    advantages, following = [0.0] * len(rewards), 0.0
    next_value = final_value if truncated else 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + discount * next_value - values[t] + discount * gae_lambda * following
        advantages[t], next_value = following, values[t]
    return advantages


# Preferences: one loss per pair or response, on all of its tokens; `frozen` matters to KTO's reference point alone.


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x: float) -> float:
    """log(1 + exp(x)), which is -log sigma(-x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def pairs(s: Step) -> list[tuple[int, int]]:
    """(chosen, rejected) trajectories of each group, in the order of the groups."""
    found = []
    for g in sorted(set(s.group)):
        one, other = (i for i in range(len(s.group)) if s.group[i] == g)
        assert s.chosen[one] != s.chosen[other]
        found.append((one, other) if s.chosen[one] else (other, one))
    return found


def on_pairs(s: Step, losses: list[float]) -> list[float]:
    """The loss of each pair on every token of its two responses."""
    by_trajectory = [losses[sorted(set(s.group)).index(g)] for g in s.group]
    return [by_trajectory[i] for i, tokens in enumerate(s.slices) for _ in tokens]


def log_ratios_of_responses(s: Step, logp: Array, normalized: bool) -> list[float]:
    sums = [math.fsum(logp[i] - s.ref[i] for i in tokens) for tokens in s.slices]
    return [x / length for x, length in zip(sums, s.lengths, strict=True)] if normalized else sums


def mean_logprobs(s: Step, logp: Array) -> list[float]:
    return [math.fsum(logp[i] for i in tokens) / len(tokens) for tokens in s.slices]


def dpo(
    s: Step,
    logp: Array,
    frozen: Array,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
) -> list[float]:
    h = log_ratios_of_responses(s, logp, length_normalized)
    margins = [beta * (h[w] - h[lost]) for w, lost in pairs(s)]
    return on_pairs(s, [(1 - label_smoothing) * softplus(-m) + label_smoothing * softplus(m) for m in margins])


def ipo(s: Step, logp: Array, frozen: Array, tau: float = 0.1, length_normalized: bool = True) -> list[float]:
    h = log_ratios_of_responses(s, logp, length_normalized)
    return on_pairs(s, [(h[w] - h[lost] - 1 / (2 * tau)) ** 2 for w, lost in pairs(s)])


def simpo(s: Step, logp: Array, frozen: Array, beta: float = 2.0, gamma: float = 1.0) -> list[float]:
    x = mean_logprobs(s, logp)
    return on_pairs(s, [softplus(gamma - beta * x[w] + beta * x[lost]) for w, lost in pairs(s)])


def orpo(s: Step, logp: Array, frozen: Array, odds_weight: float = 0.1) -> list[float]:
    def odds(x: float) -> float:
        return math.exp(x) / (1 - math.exp(x))

    x = mean_logprobs(s, logp)
    ratios = [odds(x[w]) / odds(x[lost]) for w, lost in pairs(s)]
    return on_pairs(
        s, [-x[w] + odds_weight * softplus(-math.log(r)) for r, (w, _) in zip(ratios, pairs(s), strict=True)]
    )


def kto(
    s: Step,
    logp: Array,
    frozen: Array,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> list[float]:
    h, out = log_ratios_of_responses(s, logp, False), []
    point = max(0.0, mean(log_ratios_of_responses(s, frozen, False)))
    for i, tokens in enumerate(s.slices):
        value = sigmoid(beta * (h[i] - point)) if s.chosen[i] else sigmoid(beta * (point - h[i]))
        out += [(desirable_weight if s.chosen[i] else undesirable_weight) * (1 - value)] * len(tokens)
    return out


def reward_model(s: Step, value: Array, margin: float = 0.0, centering: float = 0.0) -> list[float]:
    """Of the values: a response's score is that of its last token."""
    score = [value[tokens[-1]] for tokens in s.slices]
    return on_pairs(
        s,
        [softplus(margin - score[w] + score[lost]) + centering * (score[w] + score[lost]) ** 2 for w, lost in pairs(s)],
    )


# Corrections: log rho of one response -> (weight, kept) of each token.

Answer = list[tuple[float, bool]]


def token_truncate(log_rho: list[float], cap: float = 2.0) -> Answer:
    return [(min(math.exp(x), cap), True) for x in log_rho]


def token_mask(log_rho: list[float], low: float = 0.5, high: float = 5.0) -> Answer:
    return [(math.exp(x), low <= math.exp(x) <= high) for x in log_rho]


def sequence_truncate(log_rho: list[float], cap: float = 2.0) -> Answer:
    return [(min(math.exp(math.fsum(log_rho)), cap), True)] * len(log_rho)


def sequence_mask(log_rho: list[float], low: float, high: float) -> Answer:
    whole = math.exp(math.fsum(log_rho))
    return [(whole, low <= whole <= high)] * len(log_rho)


def geometric_mask(log_rho: list[float], low: float, high: float) -> Answer:
    if not log_rho:
        return []
    return [(1.0, low <= math.exp(mean(log_rho)) <= high)] * len(log_rho)


def veto(log_rho: list[float], threshold: float = 1e-4) -> Answer:
    return [(1.0, all(math.exp(x) >= threshold for x in log_rho))] * len(log_rho)
