"""An update with an Inf or NaN anywhere, on any rank, leaves no trace in the weights, and is kept whole."""

import pickle

import numpy as np
import pytest
import torch

from data_feeds.packing import pack
from data_feeds.responses import Responses
from records.rollout import Prompt, Trajectory
from unit_tests.orchestration.ranks.nonfinite_rank import CASES, POISONS
from unit_tests.tiny_model import WORDS, write_tiny_model


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(3)
    made = []
    for group in range(3):
        prompt = rng.integers(0, len(WORDS), 4).astype(np.int32)
        for sample in range(2):
            n = int(rng.integers(2, 7))
            made.append(
                Trajectory(
                    Prompt(f"p{group}", []), f"g{group}", sample, prompt,
                    token_ids=rng.integers(0, len(WORDS), n).astype(np.int32),
                    behavior_logprobs=rng.normal(-4, 0.1, n).astype(np.float32),
                    versions=np.zeros(n, np.int32), is_action=np.ones(n, np.bool_), turn=np.zeros(n, np.int32),
                )
            )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def results(tmp_path_factory, rank_groups):
    folder = tmp_path_factory.mktemp("nonfinite")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    made = trajectories()
    advantages = np.random.default_rng(1).normal(size=6).astype(np.float32)
    groups, weights = np.repeat(np.arange(3), 2), np.full(6, 1 / 6, np.float32)
    responses = Responses(made)
    columns = responses.columns(0, advantages=advantages)
    packed = {ranks: pack(responses, groups, weights, columns, 12, ranks, True) for ranks in (1, 2)}
    assert len(packed[2][0]) > 1, "several micro-batches per rank"
    (folder / "micro_batches.pkl").write_bytes(pickle.dumps(packed))
    found = {}
    for ranks in (1, 2):
        rank_groups[ranks].run("unit_tests.orchestration.ranks.nonfinite_rank", folder)
        for rank in range(ranks):
            found[ranks, rank] = torch.load(folder / f"results_{ranks}_{rank}.pt", weights_only=False)
    return folder, found


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_poisoned_update_is_skipped_on_all_ranks_and_leaves_no_trace(results, case, poison, ranks):
    _, found = results
    for rank in range(ranks):
        one = found[ranks, rank][(*case, poison)]
        assert one["in_a_row"] == 1, "it was not skipped, or the good update before it did not end the row"
        assert one["same"], "it changed the weights"
        assert one["as if it never was"], "good updates after a skipped one differ from a run that never saw it"
        assert np.isfinite(one["norm"])
        assert one["norm"] > 0
        assert one["skipped"] == (1.0 if rank == 0 else 0.0), "counted once, not once per rank"


def test_the_skipped_update_is_kept_with_its_weights(results):
    folder, _ = results
    for ranks in (1, 2):
        kept = sorted((folder / f"replay_{ranks}" / "1_float32").iterdir())
        assert [p.name for p in kept] == ["step_000002_update_0", "step_000003_update_0"], "the last two are kept"
        assert sorted(p.name for p in kept[0].iterdir()) == ["policy", *(f"rank_{r}.pkl" for r in range(ranks))]
        step, live, reason = pickle.loads((kept[0] / f"rank_{ranks - 1}.pkl").read_bytes())
        assert (step.step, step.rank, step.ranks, reason) == (2, ranks - 1, ranks, "not finite")
        assert np.isfinite(live.sums["train/loss"]), "the gradient was poisoned, not the loss"
