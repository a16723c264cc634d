"""Our preference losses against trl's own code, run here: DPO's, KTO's, CPO's (SimPO), ORPO's and the reward trainer's.

As in test_algs_against_trl.py the trainers are made without their constructors, and the model's answer is given: everything
after it is theirs, padding and masks included.
"""

import types
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.parts.aggregation import token_weights
from unit_tests.algs import reference
from unit_tests.algs.method_checks import make, pair_steps, policy_tokens, random_pairs, steps, tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl warns of its experimental parts, and of a vLLM newer than it knows
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.reward_trainer import RewardTrainer


class ForEveryName(dict):
    """trl's table of metrics: a list for every name."""

    def __missing__(self, name):
        return self.setdefault(name, [])


def one_process(trainer_class, **settings):
    """A trainer of one process."""
    trainer = object.__new__(trainer_class)
    attributes = {
        "aux_loss_enabled": False,
        "accelerator": types.SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        "model": types.SimpleNamespace(training=True),
        "_metrics": {"train": ForEveryName()},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "precompute_ref_logps": True,
    }
    for name, value in {**attributes, **settings}.items():
        setattr(trainer, name, value)
    return trainer


def in_their_order(step):
    """Our trajectories as trl has them: chosen responses, then rejected ones, pair by pair."""
    return [w for w, _ in reference.pairs(step)] + [r for _, r in reference.pairs(step)]


def padded(step, values, order):
    """[N] -> [2P, T_max] in this order of trajectories, zeros behind each response."""
    out = torch.zeros(len(order), max(step.lengths))
    for row, i in enumerate(order):
        out[row, : step.lengths[i]] = tensor(values[list(step.slices[i])])
    return out


def unpadded(step, values, order):
    """The reverse."""
    out = np.zeros(sum(step.lengths))
    for row, i in enumerate(order):
        out[list(step.slices[i])] = values[row, : step.lengths[i]]
    return out


def batch(step, order):
    """A padded batch with one prompt token before each response, and a model that says these log-probabilities."""
    mask = torch.zeros(len(order), 1 + max(step.lengths), dtype=torch.long)
    for row, i in enumerate(order):
        mask[row, 1 : 1 + step.lengths[i]] = 1
    logprobs = padded(step, step.logp, order).requires_grad_()
    zeros = torch.zeros_like(logprobs)
    answer = types.SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    return inputs, logprobs, lambda **_: answer


def slope_of(step, loss, logprobs, order):
    (slope,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), unpadded(step, slope, order)


def trl_dpo(step, loss_type, beta):
    """DPOTrainer's loss, its gradient in each token's log-probability [N], and its metrics."""
    order = in_their_order(step)
    inputs, logprobs, model = batch(step, order)
    ref_chosen, ref_rejected = padded(step, step.ref, order).sum(1).chunk(2)
    trainer = one_process(
        DPOTrainer, ld_alpha=None, beta=beta, f_divergence_type="reverse_kl", loss_types=[loss_type],
        loss_weights=[1.0], use_weighting=False,
    )  # fmt: skip
    inputs |= {"ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    loss = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return *slope_of(step, loss, logprobs, order), trainer._metrics["train"]


def trl_kto(step, beta, desirable_weight, undesirable_weight):
    """KTOTrainer's, its KL estimate taken on the responses behind their own prompts, as ours is."""
    order = list(range(len(step.lengths)))
    inputs, logprobs, model = batch(step, order)
    ref = padded(step, step.ref, order).sum(1)
    trainer = one_process(
        KTOTrainer, beta=beta, loss_type="kto", calculate_KL=True, desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight, _compute_kl_logps=lambda *_: logprobs.detach().sum(1),
    )  # fmt: skip
    inputs |= {"label": torch.tensor(step.chosen), "ref_logps": ref, "ref_KL_logps": ref}
    loss = KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return *slope_of(step, loss, logprobs, order), trainer._metrics["train"]


def of_pairs(step, loss_of, mean=True):
    """The mean of a loss of (chosen, rejected) log-probabilities of whole responses, means or sums."""
    order = in_their_order(step)
    logprobs = padded(step, step.logp, order).requires_grad_()
    lengths = torch.tensor([step.lengths[i] for i in order])
    responses = logprobs.sum(1) / (lengths if mean else 1)
    return slope_of(step, loss_of(*responses.chunk(2)), logprobs, order)


def trl_cpo(step, mean=True, **settings):
    """CPOTrainer's loss of each pair; SimPO's is one of its kinds."""
    trainer = one_process(CPOTrainer, alpha=0.0, **{"label_smoothing": 0.0, **settings})
    return of_pairs(step, lambda up, down: CPOTrainer.cpo_loss(trainer, up, down)[0].mean(), mean)


def trl_orpo(step, weight):
    """ORPOTrainer's odds term, with the likelihood of the chosen responses that it adds to it."""
    trainer = one_process(ORPOTrainer, beta=weight)
    return of_pairs(step, lambda up, down: -up.mean() - ORPOTrainer.odds_ratio_loss(trainer, up, down)[0].mean())


def ours(step, name, **params):
    """Loss, gradient and metrics of our method under its own aggregation."""
    method = make(name, **params)
    t = policy_tokens(step, method)
    answer = method.loss(t)
    weights = token_weights(method.aggregation, torch.tensor(step.lengths), torch.tensor(step.group), 0)
    loss = (weights[t.sequence] * answer.loss).sum()
    (slope,) = torch.autograd.grad(loss, t.values if name == "reward_model" else t.logprobs)
    return loss.item(), slope.numpy(), {key: x.detach().double().mean().item() for key, x in answer.metrics.items()}


def agree(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=5e-5, abs=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "name", "params"),
    [
        ("sigmoid", "dpo", {"beta": 0.1}),
        ("sigmoid", "dpo", {"beta": 0.7}),
        ("ipo", "ipo", {"tau": 0.1}),
        ("ipo", "ipo", {"tau": 1.0}),
        ("sigmoid_norm", "dpo", {"beta": 2.0, "length_normalized": True}),
    ],
)
@settings(max_examples=15)
@given(step=pair_steps())
def test_loss_gradient_and_metrics_are_trls(loss_type, name, params, step):
    """DPO, its length-normalised form and IPO give the loss and gradient of DPOTrainer, padding and all, and its metrics."""
    loss, slope, metrics = ours(step, name, **params)
    beta = params.get("beta", params.get("tau"))
    theirs = trl_dpo(step, loss_type, beta)
    agree((loss, slope), theirs)
    if loss_type == "sigmoid":
        found = [metrics[key] for key in ("chosen_reward", "rejected_reward", "margin", "accuracy")]
        named = [theirs[2][f"rewards/{key}"][0] for key in ("chosen", "rejected", "margins", "accuracies")]
        assert found == pytest.approx(named, rel=1e-4, abs=1e-5)


@settings(max_examples=20)
@given(step=pair_steps(), beta=st.sampled_from([2.0, 2.5]), gamma=st.sampled_from([0.0, 0.5, 1.6]))
def test_simpo_is_trls(step, beta, gamma):
    """SimPO gives the loss and gradient of CPOTrainer's loss of that name; γ is theirs, not γ/β."""
    agree(ours(step, "simpo", beta=beta, gamma=gamma), trl_cpo(step, loss_type="simpo", beta=beta, simpo_gamma=gamma))


@settings(max_examples=15)
@given(step=pair_steps(), smoothing=st.sampled_from([0.0, 0.1, 0.3]))
def test_label_smoothing_is_trls(step, smoothing):
    """DPO without a reference (log π_ref = 0) under label smoothing is CPOTrainer's smoothed sigmoid loss."""
    step = type(step)(**{**vars(step), "ref": np.zeros_like(step.ref)})
    theirs = trl_cpo(step, mean=False, loss_type="sigmoid", beta=0.1, label_smoothing=smoothing)
    agree(ours(step, "dpo", label_smoothing=smoothing), theirs)


@settings(max_examples=20)
@given(step=pair_steps(), weight=st.sampled_from([0.1, 1.0]))
def test_orpo_is_trls(step, weight):
    """ORPO's odds term is ORPOTrainer's, beside the likelihood of the chosen response."""
    agree(ours(step, "orpo", odds_weight=weight), trl_orpo(step, weight))


@settings(max_examples=20)
@given(step=steps(), weights=st.sampled_from([(1.0, 1.0), (0.5, 2.0)]))
def test_kto_is_trls_around_the_same_reference_point(step, weights):
    """KTO gives the loss and gradient of KTOTrainer when that estimates its KL on the step's own responses."""
    loss, slope, metrics = ours(step, "kto", desirable_weight=weights[0], undesirable_weight=weights[1])
    theirs = trl_kto(step, 0.1, *weights)
    agree((loss, slope), theirs)
    assert metrics["reference_point"] == pytest.approx(0.1 * theirs[2]["kl"][0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("margin", "centering"), [(0.0, None), (0.5, None), (0.0, 0.01)])
@settings(max_examples=10)
@given(step=pair_steps())
def test_the_reward_model_is_trls(step, margin, centering):
    """The reward model gives the loss and gradient of RewardTrainer, with its margin and its centering."""
    order = in_their_order(step)
    scores = tensor(np.array([step.value[step.slices[i][-1]] for i in order])).requires_grad_()
    trainer = one_process(RewardTrainer, args=types.SimpleNamespace(center_rewards_coefficient=centering))
    inputs = {"attention_mask": torch.ones(len(order), 1), "margin": torch.full((len(order) // 2,), margin)}
    answer = types.SimpleNamespace(logits=scores[:, None])
    loss = RewardTrainer.compute_loss(trainer, lambda **_: answer, inputs)
    (slope,) = torch.autograd.grad(loss, scores)
    expected = np.zeros_like(step.value)
    expected[[step.slices[i][-1] for i in order]] = slope
    found = ours(step, "reward_model", margin=margin, centering=centering or 0.0)
    agree(found, (loss.item(), expected))
    assert found[2]["accuracy"] == pytest.approx(trainer._metrics["train"]["accuracy"][0])


def test_the_comparison_can_fail():
    """Another beta, sums in place of means, or labels exchanged are different numbers."""
    step = random_pairs([4, 1, 7, 2], np.random.default_rng(0))
    loss, slope, _ = trl_dpo(step, "sigmoid", 0.1)
    swapped = type(step)(**{**vars(step), "chosen": [not c for c in step.chosen]})
    for other in (
        ours(step, "dpo", beta=0.2),
        ours(step, "dpo", length_normalized=True),
        ours(swapped, "dpo"),
        ours(step, "ipo"),
    ):
        assert other[0] != pytest.approx(loss, rel=1e-3) and not np.allclose(other[1], slope, rtol=1e-3)
