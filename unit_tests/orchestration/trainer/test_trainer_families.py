"""The trainer's gradient does not depend on micro-batches, packing, order or ranks: every method, every aggregation."""

import pickle

import numpy as np
import pytest
import torch

from algs.parts.aggregation import MODES, token_weights
from data_feeds.packing import pack
from data_feeds.responses import Responses
from plugins.kinds import find, listed
from records.rollout import Prompt, Trajectory
from unit_tests.tiny_model import WORDS, write_tiny_model

SIZES = [3, 1, 2]
PAIRS = [2, 2, 2]  # of preference data, which the other methods' groups are not
METHODS = [name for name, listed in listed("method").items() if listed.has_advantages]
ROUND = {  # what stands around a method's loss
    "kl and entropy": {"kl": {"coef": 0.1}, "entropy_coef": 0.01},
    "corrections": {"corrections": ["token_mask", {"function": "geometric_mask", "params": {"low": 0.8, "high": 1.2}}]},
}
CASES = [(name, "separate", {"aggregation": mode}) for name in METHODS for mode in MODES]
CASES += [("ppo", "shared", {"aggregation": mode}) for mode in MODES]
CASES += [("grpo", "separate", {"aggregation": "token_mean", **around}) for around in ROUND.values()]
# Others only under what they mean: a mean over pairs, over responses, over tokens. The rest is refused by the configuration.
GIVEN = {name: find("method", name).data for name in listed("method") if name not in METHODS}
MEANINGFUL = {
    "pairs": ("shared", ["prompt_mean"]), "labels": ("separate", ["sequence_mean"]),
    "demonstrations": ("separate", ["token_mean", "sequence_mean"]),
}  # fmt: skip
CASES += [
    (name, MEANINGFUL[data][0], {"aggregation": mode}) for name, data in GIVEN.items() for mode in MEANINGFUL[data][1]
]
LAYOUTS = {  # ranks, reversed order, token budget, shared prompts
    "one micro-batch": (1, False, 10**6, True),
    "split": (1, True, 12, False),
    "two ranks": (2, True, 14, True),
}


def batch(sizes):
    """Trajectories of three groups, every other one chosen, and per-token columns a step would have frozen."""
    rng = np.random.default_rng(5)
    made, columns = [], {name: [] for name in ("advantages", "old_logprobs", "ref_logprobs", "old_values", "returns")}
    for group, size in enumerate(sizes):
        prompt = rng.integers(0, len(WORDS), 3 + group).astype(np.int32)
        for sample in range(size):
            n = int(rng.integers(1, 8))
            mu = rng.normal(-3.3, 0.3, n).astype(np.float32)
            made.append(
                Trajectory(
                    Prompt(f"p{group}", []), f"g{group}", sample, prompt,
                    token_ids=rng.integers(0, len(WORDS), n).astype(np.int32), behavior_logprobs=mu,
                    versions=np.zeros(n, np.int32), is_action=np.ones(n, np.bool_), turn=np.zeros(n, np.int32),
                    chosen=sample % 2 == group % 2,
                )
            )  # fmt: skip
            for name, middle in (
                ("advantages", 0),
                ("old_logprobs", mu),
                ("ref_logprobs", mu),
                ("old_values", 0),
                ("returns", 0.5),
            ):
                columns[name].append((middle + rng.normal(0, 0.3, n)).astype(np.float32))
    return made, columns


def packed(sizes, made, columns, mode, order, budget, ranks, share):
    """Pairs share their prompt and one micro-batch, whatever the layout."""
    groups = np.repeat(np.arange(len(sizes)), sizes)[order]
    lengths = torch.tensor([made[i].action_tokens for i in order])
    weights = token_weights(mode, lengths, torch.tensor(groups), 8).numpy()
    responses = Responses([made[i] for i in order])
    own = responses.columns(0) | {name: np.concatenate([values[i] for i in order]) for name, values in columns.items()}
    return pack(responses, groups, weights, own, budget, ranks, share or sizes == PAIRS, whole_groups=sizes == PAIRS)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory, rank_groups):
    folder = tmp_path_factory.mktemp("family")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    of_rewards, of_pairs = (SIZES, *batch(SIZES)), (PAIRS, *batch(PAIRS))
    plan = {1: [], 2: []}
    for case, (name, kind, objective) in enumerate(CASES):
        for layout, (ranks, is_reversed, budget, share) in LAYOUTS.items():
            sizes, made, columns = of_pairs if name in GIVEN else of_rewards
            order = list(range(len(made)))[:: -1 if is_reversed else 1]
            per_rank = packed(sizes, made, columns, objective["aggregation"], order, budget, ranks, share)
            assert len(per_rank[0]) > 1 or layout == "one micro-batch"
            plan[ranks].append((case, layout, name, kind, objective, per_rank))
    (folder / "packed.pkl").write_bytes(pickle.dumps(plan))
    found = {}
    for ranks in (1, 2):
        rank_groups[ranks].run("unit_tests.orchestration.ranks.family_rank", folder)
        found.update(torch.load(folder / f"gradients_{ranks}_0.pt"))
    return found


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=lambda i: "-".join(map(str, (*CASES[i][:2], *CASES[i][2].values())))
)
def test_the_gradient_is_the_same_for_any_split_order_packing_and_ranks(gradients, case):
    whole = gradients[case, "one micro-batch"]
    largest = max(float(g.abs().max()) for g in whole.values())
    assert largest > 1e-4, "nothing has a gradient: the test shows nothing"
    for layout in LAYOUTS:
        other = gradients[case, layout]
        assert other.keys() == whole.keys()
        for name, expected in whole.items():
            torch.testing.assert_close(other[name], expected, rtol=1e-4, atol=2e-5 * largest, msg=f"{layout}: {name}")
    has_critic = CASES[case][0] in ("ppo", "reward_model")
    assert any("value_head" in name for name in whole) == has_critic
