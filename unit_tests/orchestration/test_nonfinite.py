"""An update with an Inf or NaN anywhere, on any rank, leaves no trace in the weights, and is kept whole."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data_feeds.packing import pack
from orchestration.devices import free_port
from rollouts.records import Prompt, Trajectory
from unit_tests.orchestration.nonfinite_rank import CASES
from unit_tests.tiny_model import WORDS, write_tiny_model

HERE = Path(__file__).parent


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
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nonfinite")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    made = trajectories()
    advantages = np.random.default_rng(1).normal(size=6).astype(np.float32)
    groups, weights = np.repeat(np.arange(3), 2), np.full(6, 1 / 6, np.float32)
    packed = {ranks: pack(made, groups, advantages, weights, 0, 12, ranks, True) for ranks in (1, 2)}
    assert len(packed[2][0]) > 1, "several micro-batches per rank"
    (folder / "micro_batches.pkl").write_bytes(pickle.dumps(packed))
    found = {}
    for ranks in (1, 2):
        port = str(free_port())
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "nonfinite_rank.py"), str(folder), str(rank), str(ranks), port],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes), "\n".join(outputs)[-4000:]
        for rank in range(ranks):
            found[ranks, rank] = torch.load(folder / f"results_{ranks}_{rank}.pt", weights_only=False)
    return folder, found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_poisoned_update_is_skipped_on_all_ranks_and_leaves_no_trace(results, case, ranks):
    _, found = results
    for rank in range(ranks):
        one = found[ranks, rank][case]
        assert one["in_a_row"] == 1, "it was not skipped"
        assert one["same"], "the weights differ from a run that never saw it"
        assert one["after"] == 0
        assert np.isfinite(one["norm"])
        assert one["norm"] > 0
        assert one["skipped"] == (1.0 if rank == 0 else 0.0), "counted once, not once per rank"


def test_the_skipped_update_is_kept_with_its_weights(results):
    folder, _ = results
    for ranks in (1, 2):
        saved = folder / f"replay_{ranks}" / "1_float32_advantage" / "step_000007_update_0"
        assert sorted(p.name for p in saved.iterdir()) == ["policy", *(f"rank_{r}.pkl" for r in range(ranks))]
        step, live, reason = pickle.loads((saved / f"rank_{ranks - 1}.pkl").read_bytes())
        assert (step.step, step.rank, step.ranks, reason) == (7, ranks - 1, ranks, "not finite")
        assert np.isnan(step.batches[-1].advantages[0])
        assert np.isnan(live.sums["train/loss"])
