"""Resuming is exact: trainers on one rank and two, whole supervised jobs killed in the middle, and the run directory."""

import math
import pickle

import pytest
import torch

from unit_tests.orchestration.replay_steps import packed
from unit_tests.orchestration.resume_rank import CASES, SAVED_AFTER, STEPS
from unit_tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rank_groups):
    """What one rank and two did live, and again from the saved state."""
    folder = tmp_path_factory.mktemp("resume")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    for ranks in (1, 2):
        (folder / f"packed_{ranks}.pkl").write_bytes(pickle.dumps(packed(ranks)))
        rank_groups[ranks].run("unit_tests.orchestration.resume_rank", folder)
    return folder


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[n] == b[n] or (math.isnan(a[n]) and math.isnan(b[n])) for n in a)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_goes_on_to_the_last_bit(trained, case, ranks):
    for rank in range(ranks):
        live, resumed = torch.load(trained / f"{case}_{ranks}_{rank}.pt", weights_only=False)
        assert len(live) == STEPS and len(resumed) == STEPS - SAVED_AFTER
        for step, (one, two) in enumerate(zip(live[SAVED_AFTER:], resumed, strict=True), SAVED_AFTER + 1):
            assert same(one[0], two[0]), f"metrics of step {step}"
            for a, b in ((one[1], two[1]), (one[2], two[2])):
                assert a.keys() == b.keys()
                assert all(torch.equal(a[n], b[n]) for n in a), f"weights after step {step}"
            assert one[3] == two[3] and torch.equal(one[4], two[4])
        before, after = live[SAVED_AFTER - 1][1], live[-1][1]
        assert all(not torch.equal(before[n], after[n]) for n in before if "norm" not in n), (
            "the steps change something"
        )


def test_a_state_that_does_not_fit_is_refused(trained):
    for rank in range(2):
        assert "holds no trainer state" in (trained / f"absent_{rank}.txt").read_text()
        assert "written by 1 trainer ranks, now there are 2" in (trained / f"one_rank_{rank}.txt").read_text()
