"""The trainer against plain float64 autograd: the same update for any ZeRO stage, rank count, packing and split."""

import itertools
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from algs.parts.aggregation import token_weights
from configs.blocks.rl import Train
from data_feeds.packing import MicroBatch, pack
from data_feeds.responses import Responses
from orchestration.metrics.tally import Tally
from orchestration.trainer.optimizer import deepspeed_config, learning_rate_at
from records.rollout import Prompt, Trajectory
from unit_tests.orchestration.ranks import trainer_rank

GROUPS = [3, 1, 4, 2]
TEMPERATURE = 0.7


def make_trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    made = []
    for group, size in enumerate(GROUPS):
        prompt = rng.integers(0, 64, rng.integers(2, 9)).astype(np.int32)
        for sample in range(size):
            n = int(rng.integers(1, 12))
            made.append(
                Trajectory(
                    Prompt(f"p{group}", []), f"g{group}", sample, prompt,
                    token_ids=rng.integers(0, 64, n).astype(np.int32),
                    behavior_logprobs=rng.normal(-4, 0.1, n).astype(np.float32),
                    versions=np.zeros(n, np.int32), is_action=np.ones(n, np.bool_), turn=np.zeros(n, np.int32),
                )
            )  # fmt: skip
    return made


def updates_of(case: str) -> list[list[int]]:
    """Which trajectories each optimizer step takes: whole groups."""
    ends = np.cumsum(GROUPS)
    if trainer_rank.CASES[case][2] == 1:
        return [list(range(ends[-1]))]
    return [list(range(ends[1])), list(range(ends[1], ends[-1]))]


def batch_of(members: list[int], trajectories: list[Trajectory]):
    group = np.repeat(np.arange(len(GROUPS)), GROUPS)[members]
    group = np.unique(group, return_inverse=True)[1]
    lengths = torch.tensor([trajectories[i].action_tokens for i in members])
    weights = token_weights("sequence_mean", lengths, torch.tensor(group), 16).numpy()
    advantages = np.random.default_rng(1).normal(size=sum(GROUPS)).astype(np.float32)[members]
    return [trajectories[i] for i in members], group, advantages, weights


def packed_batch(members: list[int], budget: int, ranks: int, share: bool) -> list[list[MicroBatch]]:
    chosen, group, advantages, weights = batch_of(members, make_trajectories())
    responses = Responses(chosen)
    return pack(responses, group, weights, responses.columns(0, advantages=advantages), budget, ranks, share)


def reference(folder: Path, case: str, trajectories: list[Trajectory]) -> dict[str, torch.Tensor]:
    """The case's weights by plain autograd in float64, one unpacked sequence at a time, straight from the formulas."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    start = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    kl_coef = trainer_rank.CASES[case][3]

    def logprobs(network, t):
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.token_ids])[None].astype(np.int64))
        logits = network(ids, use_cache=False).logits[0, len(t.prompt_ids) - 1 : -1] / TEMPERATURE
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(t.token_ids[:, None].astype(np.int64)))[:, 0]

    for members in updates_of(case):
        chosen, _, advantages, weights = batch_of(members, trajectories)
        loss = torch.zeros((), dtype=torch.float64)
        for t, advantage, weight in zip(chosen, advantages, weights, strict=True):
            new = logprobs(model, t)
            old = logprobs(start, t).detach() if len(updates_of(case)) > 1 else new.detach()
            ratio = torch.exp(new - old)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            gap = logprobs(start, t).detach() - new
            loss = loss - weight * (surrogate - kl_coef * (torch.exp(gap) - gap - 1)).sum()
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        scale = min(1.0, trainer_rank.MAX_GRAD_NORM / (norm + 1e-6))
        with torch.no_grad():
            for p in model.parameters():
                g = p.grad * scale
                p -= trainer_rank.LEARNING_RATE * g / (g.abs() + trainer_rank.EPS)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rank_groups):
    """Model and micro-batches, and what one process and two processes made of them."""
    folder = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    packed = {}
    for ranks in (1, 2):
        for case, (_, budget, _, _, share) in trainer_rank.CASES.items():
            packed[case, ranks] = []
            for members in updates_of(case):
                packed[case, ranks].append(packed_batch(members, budget, ranks, share))
    assert any(len(update[0]) > 1 for update in packed["zero1", 2]), "the case should need several micro-batches"
    (folder / "micro_batches.pkl").write_bytes(pickle.dumps(packed))
    for ranks in (1, 2):
        rank_groups[ranks].run("unit_tests.orchestration.ranks.trainer_rank", folder)
    return folder


@pytest.mark.parametrize("case", list(trainer_rank.CASES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_update_equals_plain_float64_autograd(folder, case, ranks):
    expected = reference(folder, case, make_trajectories())
    start = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    for rank in range(ranks):
        found, _ = torch.load(folder / f"{case}_{ranks}_{rank}.pt", weights_only=False)
        assert found.keys() == expected.keys()
        for name, before in start.named_parameters():
            moved = expected[name] - before
            assert moved.abs().max() > 1e-5, f"{name} does not move: the test shows nothing"
            torch.testing.assert_close(
                found[name].double() - before.detach(), moved, rtol=1e-4, atol=float(moved.abs().max()) * 1e-4, msg=name
            )


@pytest.mark.parametrize("case", list(trainer_rank.CASES))
def test_metrics_do_not_depend_on_the_split(folder, case):
    alone = torch.load(folder / f"{case}_1_0.pt", weights_only=False)[1].means()
    pair = Tally.merged(torch.load(folder / f"{case}_2_{r}.pt", weights_only=False)[1] for r in range(2)).means()
    for name in ("train/loss", "train/entropy_nats", "train/gradient_norm", "train/logprob_gap_mean", "method/ratio",
                 "train/logprob_gap_max", "train/kl_behavior_nats", "train/action_tokens"):  # fmt: skip
        assert pair[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


def test_the_ratio_is_exactly_one_with_one_update(folder):
    means = torch.load(folder / "zero0_1_0.pt", weights_only=False)[1].means()
    assert means["method/ratio"] == 1.0
    assert means["method/clip_fraction"] == 0.0
    assert torch.load(folder / "two_updates_1_0.pt", weights_only=False)[1].means()["method/ratio"] != 1.0


def test_learning_rates():
    train = Train(learning_rate=1.0, schedule="cosine", warmup_steps=4, min_learning_rate=0.1)
    rates = [learning_rate_at(update, train, 10) for update in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]  # the first step has a rate above zero
    assert rates[4] == 1.0
    assert 0.1 < rates[-1] < 0.2
    assert learning_rate_at(9, Train(learning_rate=1.0, schedule="linear"), 10) == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    assert learning_rate_at(7, Train(learning_rate=2.0), 10) == 2.0


def test_users_deepspeed_keys_win_and_blocks_are_merged():
    from configs.blocks.rl import Model

    train = Train(zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": True}, "gradient_clipping": 3.0})
    made = deepspeed_config(Model(path="x"), train, ranks=4)
    assert made["zero_optimization"]["stage"] == 2
    assert made["zero_optimization"]["overlap_comm"] is True
    assert made["gradient_clipping"] == 3.0
    assert made["train_batch_size"] == 4
