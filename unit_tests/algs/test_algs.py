"""Every method against an independent reading of its paper (reference.py), one row of the table for each.

What is special to a method stands in a file of its own; what holds for all of them without a reference, in test_algs_traps.py,
test_algs_invariance.py and test_algs_identities.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.introspection.method_facts import reads
from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    NAMES,
    check_advantage,
    check_gradient,
    check_values,
    make,
    one_token,
    pair_steps,
    policy_tokens,
    ragged_rewards,
    random_pairs,
    steps,
    weight,
)
from unit_tests.algs.reference import Ragged

ROOT = Path(__file__).parents[2]
FIELDS = {  # of PolicyTokens -> of the reference's Step
    "behavior_logprobs": "mu", "old_logprobs": "old", "ref_logprobs": "ref", "advantages": "advantage",
}  # fmt: skip
Weights = list[tuple[float, float, float]]  # advantage, ratio, expected weight on grad log pi


@dataclass(frozen=True)
class Expected:
    """What a method's paper says."""

    loss: Callable[..., list[float]]  # the float64 loss per token
    params: list[dict[str, Any]]  # parameters under which it is compared, beside the defaults
    aggregation: str
    weights: Weights  # empty for methods that do not learn from rewards
    advantage: Callable[[Ragged], Ragged] | None  # None for those, and for PPO, whose advantages are per token


# Inside the clip range the weight is r A; where a clip binds it is 0.
CLIPPED: Weights = [(1, 0.5, 0.5), (1, 1.19, 1.19), (1, 6, 0), (-1, 0.5, 0), (-1, 0.81, -0.81), (-1, 6, -6)]
# With a dual clip of 3 it is 0 past that too.
DUAL: Weights = [*CLIPPED[:-1], (-1, 2.9, -2.9), (-1, 3.1, 0), (-1, 6, 0)]
DUAL_HIGHER: Weights = [(1, 1.27, 1.27), (1, 1.29, 0), *DUAL[3:]]
# Up to the cap the weight is r A; past it, it stays at the cap.
CAPPED_AT_5: Weights = [(1, 0.5, 0.5), (1, 4.9, 4.9), (1, 6, 5), (-1, 0.01, -0.01), (-1, 6, -5)]
CAPPED_AT_2: Weights = [(1, 0.5, 0.5), (1, 1.9, 1.9), (1, 6, 2), (-1, 0.01, -0.01), (-1, 6, -2)]
# The weight is A, whatever the ratio.
PLAIN: Weights = [(1, 0.5, 1), (1, 6, 1), (-1, 0.5, -1), (-1, 6, -1)]
# The ratio of the whole response is clipped.
OF_RESPONSE: Weights = [
    (1, 0.5, 0.5), (1, 1.0003, 1.0003), (1, 1.0005, 0), (-1, 0.9996, 0), (-1, 0.9998, -0.9998), (-1, 6, -6),
]  # fmt: skip
# min(rho, ESS) A; with one token the effective sample size is 1.
OF_ONE_TOKEN: Weights = [(1, 0.5, 0.5), (1, 6, 1), (-1, 0.5, -0.5), (-1, 6, -1)]
# 4 sigma (1 - sigma) r A: open at r = 1, fading on both sides.
GATED: Weights = [
    (1, 0.5, 0.470007), (1, 1, 1.0), (1, 6, 0.159553), (-1, 0.5, -0.46707), (-1, 1, -1.0), (-1, 6, -0.124629),
]  # fmt: skip

r = reference
BOUNDS = {"clip_low": 0.1, "clip_high": 0.3}
LEVELS = [
    {"level": "token"},
    {"clip_low": 0.2, "clip_high": 0.3},
    {"clip_low": 0.2, "clip_high": 0.3, "level": "token"},
]
METHODS: dict[str, Expected] = {
    "aipo": Expected(r.aipo, [{"ratio_cap": 1.0}, {"ratio_cap": 8.0}], "token_mean", CAPPED_AT_2, r.centred),
    "cispo": Expected(
        r.cispo,
        [{"ratio_cap": 1.28}, {"ratio_cap": 3.0, "ratio_floor": 0.7}],
        "token_mean",
        CAPPED_AT_5,
        r.group_zscore,
    ),
    "dapo": Expected(
        r.dapo, [{"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.7}], "token_mean", DUAL_HIGHER, r.group_zscore
    ),
    "decoupled_ppo": Expected(
        r.decoupled_ppo,
        [
            {"behavior_cap": 1.1},
            {"behavior_cap": 1.1, "above_cap": "clamp"},
            {"clip_low": 0.1, "clip_high": 0.4, "behavior_cap": 2.0},
        ],
        "token_mean",
        DUAL,
        r.group_zscore,
    ),
    "dr_grpo": Expected(r.grpo, [BOUNDS, {"dual_clip": None}], "fixed_length", DUAL, r.centred),
    "grpo": Expected(
        r.grpo,
        [{"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.9, "clip_high": 5.0}],
        "sequence_mean",
        DUAL,
        r.group_zscore,
    ),
    "gspo": Expected(r.gspo, LEVELS, "sequence_mean", OF_RESPONSE, r.group_zscore),
    "lite_ppo": Expected(r.grpo, [BOUNDS], "token_mean", DUAL, r.lite_ppo),
    "p3o": Expected(
        r.p3o, [{"kl_direction": "forward"}, {"kl_direction": "k3"}], "token_mean", OF_ONE_TOKEN, r.group_zscore
    ),
    "ppo": Expected(r.ppo, [{"dual_clip": 3.0}, {**BOUNDS, "dual_clip": 1.5}], "token_mean", CLIPPED, None),
    "reinforce": Expected(r.reinforce, [], "fixed_length", PLAIN, r.centred),
    "reinforce_plus_plus": Expected(r.grpo, [BOUNDS], "token_mean", DUAL, r.reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Expected(r.grpo, [BOUNDS], "token_mean", DUAL, r.reinforce_plus_plus_baseline),
    "rloo": Expected(r.reinforce, [], "fixed_length", PLAIN, r.rloo),
    "sapo": Expected(r.sapo, [{"tau_positive": 3.0, "tau_negative": 0.5}], "sequence_mean", GATED, r.group_zscore),
    "scale_rl": Expected(r.scale_rl, [{"ratio_cap": 1.5}], "prompt_mean", CAPPED_AT_5, r.scale_rl_advantage),
    "dpo": Expected(
        r.dpo,
        [{"beta": 0.5}, {"label_smoothing": 0.1}, {"length_normalized": True, "beta": 2.0, "label_smoothing": 0.3}],
        "prompt_mean",
        [],
        None,
    ),
    "ipo": Expected(r.ipo, [{"tau": 0.5}, {"length_normalized": False, "tau": 1.0}], "prompt_mean", [], None),
    "kto": Expected(
        r.kto, [{"beta": 0.5}, {"desirable_weight": 0.5, "undesirable_weight": 2.0}], "sequence_mean", [], None
    ),
    "orpo": Expected(r.orpo, [{"odds_weight": 1.0}], "prompt_mean", [], None),
    "sft": Expected(r.sft, [], "token_mean", [], None),
    "simpo": Expected(r.simpo, [{"beta": 10.0, "gamma": 0.3}, {"gamma": 0.0}], "prompt_mean", [], None),
}


def test_a_method_with_a_page_has_a_configuration_and_a_row():
    """A file in algs/ without any of these is its author's own: the suites of all methods hold it by themselves.

    A reward model's loss is one of values, not of log-probabilities: test_reward_model.py compares it.
    """
    rows = {*METHODS, "reward_model"}
    pages = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")} - {"README"}
    configured = {path.stem for path in (ROOT / "configs").glob("*.yaml")} & {*NAMES}
    assert rows == pages == configured <= {*NAMES}


@pytest.mark.parametrize("name", METHODS)
def test_reads_what_its_formula_reads(name):
    """The reference changes with log mu, log pi_old, log pi_ref or the advantage where the method says that it reads them."""
    method = make(name)
    step = random_pairs([4, 1, 7, 2], np.random.default_rng(0))
    formula = METHODS[name].loss
    read = set()
    for field, key in FIELDS.items():
        moved = dataclasses.replace(step, **{key: getattr(step, key) + np.linspace(-0.7, 0.9, len(step.logp))})
        if formula(moved, moved.logp, moved.logp) != formula(step, step.logp, step.logp):
            read.add(field)
    assert reads(method) & {*FIELDS} == read
    assert method.needs() & {*FIELDS} == read & {"ref_logprobs"}


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=40)
@given(data=st.data())
def test_values_equal_the_formula(name, data):
    """Each token's loss is the paper's, in float64, on random ragged groups or pairs."""
    step = data.draw(pair_steps() if make(name).data == "pairs" else steps())
    check_values(name, METHODS[name].loss, step, **data.draw(st.sampled_from([{}, *METHODS[name].params])))


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=20)
@given(data=st.data())
def test_gradient_equals_finite_differences(name, data):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    small = steps(max_groups=2, max_size=3, max_length=5)
    step = data.draw(pair_steps(max_pairs=2, max_length=5) if make(name).data == "pairs" else small)
    check_gradient(name, METHODS[name].loss, step, **data.draw(st.sampled_from([{}, *METHODS[name].params])))


@pytest.mark.parametrize(
    ("name", "advantage", "ratio", "expected"), [(name, *row) for name, e in METHODS.items() for row in e.weights]
)
def test_weight_on_grad_log_pi(name, advantage, ratio, expected):
    assert weight(make(name), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("aipo", {"ratio_cap": 1.0}),
        ("cispo", {"ratio_cap": 1.0}),
        ("cispo", {"ratio_floor": 1.0}),
        ("scale_rl", {"ratio_cap": 1.0}),
        ("p3o", {}),
        ("ppo", {}),
        ("grpo", {"clip_low": 0.0, "clip_high": 0.0}),
    ],
)
def test_a_token_on_the_bound_itself_is_not_counted_as_clipped(name, params):
    """r = 1, which has no rounding, on each bound: nothing is cut off, so clip fractions are 0."""
    method = make(name, **params)
    for advantage in (1, -1):
        metrics = method.loss(policy_tokens(one_token(advantage, 1), method)).metrics
        fractions = {key: x.item() for key, x in metrics.items() if key.endswith("_fraction")}
        assert fractions and not any(fractions.values()), fractions


@pytest.mark.parametrize("name", [name for name, expected in METHODS.items() if expected.advantage])
@settings(max_examples=30)
@given(rewards=ragged_rewards, seed=st.integers(0, 99))
def test_advantage_is_the_papers(name, rewards, seed):
    check_advantage(make(name).advantages, METHODS[name].advantage, rewards, seed)


@pytest.mark.parametrize("name", METHODS)
def test_aggregation_is_the_papers(name):
    assert make(name).aggregation == METHODS[name].aggregation
