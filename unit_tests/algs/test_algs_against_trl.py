"""Our losses and aggregations against trl's own code, run here: GRPOTrainer's and RLOOTrainer's `_compute_loss`.

The trainers are made without their constructors (which load models); the log-probabilities they ask their model for are
given, everything after that is theirs. Loss and gradient of a whole padded batch are compared, so masks, clips and
denominators all count.
"""

import dataclasses
import types
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.parts import kl
from algs.parts.aggregation import token_weights
from unit_tests.algs.method_checks import exact, make, policy_tokens, random_step, tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl warns of a vLLM newer than it knows; none runs here
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

MAX_NEW_TOKENS = 12


class ForEveryName(dict):
    """trl's table of metrics: a list for every name."""

    def __missing__(self, name):
        return self.setdefault(name, [])


def padded(step, values):
    """[N] -> [S, T_max], zeros behind each response."""
    out = torch.zeros(len(step.lengths), max(step.lengths))
    out[mask(step)] = tensor(values) if isinstance(values, np.ndarray) else values
    return out


def mask(step):
    return torch.arange(max(step.lengths)) < torch.tensor(step.lengths)[:, None]


def one_process(trainer_class, logprobs, **settings):
    """A trainer of one process and one micro-batch per step, whose model says these log-probabilities, [S, T_max]."""
    trainer = object.__new__(trainer_class)
    attributes = {
        "aux_loss_enabled": False,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "accelerator": types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        "model": types.SimpleNamespace(training=True),
        "_metrics": {"train": ForEveryName()},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.ones_like(logprobs), None),
    }
    for name, value in {**attributes, **settings}.items():
        setattr(trainer, name, value)
    return trainer


def trl_grpo(step, loss_type, level="token", beta=0.0, delta=3.0, **clip):
    """Loss of GRPOTrainer on this step and its gradient in each token's log-probability, [N]."""
    logprobs = padded(step, step.logp).requires_grad_()
    arguments = types.SimpleNamespace(
        delta=delta,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    trainer = one_process(
        GRPOTrainer,
        logprobs,
        args=arguments,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=MAX_NEW_TOKENS,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        **clip,
    )
    completion_mask = mask(step).long()
    inputs = {
        "prompt_ids": torch.zeros(len(step.lengths), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(step.lengths), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(completion_mask),
        "completion_mask": completion_mask,
        "advantages": first_tokens(step, step.advantage),
        "old_per_token_logps": padded(step, step.old),
        "ref_per_token_logps": padded(step, step.ref),
        "num_items_in_batch": completion_mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, model=None, inputs=inputs)
    (slope,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), slope[mask(step)].numpy()


def first_tokens(step, values):
    """The value at each response's first token, [S]: advantages are constant over a response here."""
    return tensor(np.array([values[part[0]] for part in step.slices]))


def ours(step, name, aggregation, beta=0.0, **params):
    """The same of our method under our aggregation."""
    method = make(name, **params)
    t = policy_tokens(step, method)
    values = method.loss(t).loss
    if beta:
        values = values + beta * kl.estimate("k3", t.logprobs, t.ref_logprobs)
    per_trajectory = token_weights(aggregation, torch.tensor(step.lengths), torch.tensor(step.group), MAX_NEW_TOKENS)
    loss = (per_trajectory[t.sequence] * values).sum()
    (slope,) = torch.autograd.grad(loss, t.logprobs)
    return loss.item(), slope.numpy()


def agree(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=2e-5, abs=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-5, atol=1e-7)


def step_of(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, rng.integers(1, 5)).tolist()
    return random_step(sizes, rng.integers(1, 10, sum(sizes)).tolist(), rng)


steps_of_responses = st.integers(0, 2**32).map(step_of)


LOSSES = [
    ("grpo", {}, "grpo", {}),
    ("grpo", {"epsilon_high": 0.28, "delta": None}, "grpo", {"clip_high": 0.28, "dual_clip": None}),
    ("dr_grpo", {}, "dr_grpo", {}),
    ("dapo", {"epsilon_high": 0.28}, "dapo", {}),
    ("bnpo", {}, "lite_ppo", {}),
    ("bnpo", {}, "reinforce_plus_plus", {}),
    ("bnpo", {}, "reinforce_plus_plus_baseline", {}),
    ("bnpo", {}, "ppo", {"dual_clip": 3.0}),
    ("cispo", {"epsilon_high": 5.0}, "cispo", {}),
    ("cispo", {"epsilon_high": 1.2}, "cispo", {"ratio_cap": 1.2}),
    ("sapo", {}, "sapo", {}),
    ("grpo", {"level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "delta": None}, "gspo", {}),
    ("grpo", {"level": "sequence"}, "gspo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
]


@pytest.mark.parametrize(("loss_type", "theirs", "name", "params"), LOSSES)
@settings(max_examples=15)
@given(step=steps_of_responses)
def test_loss_and_gradient_are_trls(loss_type, theirs, name, params, step):
    """Each method under its own aggregation gives the loss and gradient of trl's loss of that name, padding and all."""
    agree(ours(step, name, make(name).aggregation, **params), trl_grpo(step, loss_type, **theirs))


@settings(max_examples=15)
@given(step=steps_of_responses, beta=st.sampled_from([0.04, 1.0]))
def test_kl_to_the_reference_is_trls(step, beta):
    """The k3 estimator beside the loss, weighted with beta, is trl's KL term, as far as ours has no bound."""
    step = dataclasses.replace(step, ref=np.minimum(step.ref, exact(step.logp + kl.K3_LINEAR - 0.1)))
    agree(ours(step, "grpo", "sequence_mean", beta=beta), trl_grpo(step, "grpo", beta=beta))


@settings(max_examples=15)
@given(
    step=steps_of_responses,
    kind=st.sampled_from([("grpo", "sequence_mean"), ("dapo", "token_mean"), ("dr_grpo", "fixed_length")]),
)
def test_aggregations_are_trls(step, kind):
    """sequence_mean, token_mean and fixed_length around one surrogate are trl's grpo, dapo and dr_grpo."""
    agree(ours(step, "grpo", kind[1]), trl_grpo(step, kind[0]))


@settings(max_examples=15)
@given(step=steps_of_responses)
def test_rloos_gradient_is_trls_on_policy(step):
    """On policy trl's RLOO, a ratio of whole responses, has our gradient: −Â grad log π summed over each response."""
    logprobs = padded(step, step.logp).requires_grad_()
    trainer = one_process(RLOOTrainer, logprobs)
    completion_mask = mask(step).long()
    inputs = {
        "prompt_ids": torch.zeros(len(step.lengths), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(step.lengths), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(completion_mask),
        "completion_mask": completion_mask,
        "advantages": first_tokens(step, step.advantage),
        "old_logps": (logprobs * completion_mask).sum(1).detach(),
    }
    (slope,) = torch.autograd.grad(RLOOTrainer._compute_loss(trainer, model=None, inputs=inputs), logprobs)
    np.testing.assert_allclose(ours(step, "rloo", "sequence_sum")[1], slope[mask(step)].numpy(), rtol=1e-5, atol=1e-7)


def test_the_comparison_can_fail():
    """A different clip, cap, aggregation or sign is a different number: the agreement above is no accident."""
    step = step_of(3)
    loss, slope = trl_grpo(step, "grpo")
    for other in (
        ours(step, "grpo", "sequence_mean", clip_high=0.5),
        ours(step, "grpo", "token_mean"),
        ours(step, "cispo", "sequence_mean"),
    ):
        assert other[0] != pytest.approx(loss, rel=1e-3) and not np.allclose(other[1], slope, rtol=1e-3)
