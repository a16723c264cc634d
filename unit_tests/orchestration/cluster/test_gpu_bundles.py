"""Ray's own placement, on a machine that only says it has GPUs: who gets which, nothing runs on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestration.cluster.devices import BUCKETS, DeviceSpec
from orchestration.cluster.gpu_bundles import reserve_devices, shares_its_gpu
from unit_tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[3]


def test_nothing_is_reserved_on_cpus() -> None:
    with reserve_devices(DeviceSpec("cpu", "gloo", BUCKETS, 2, 0), 2, 1, 1) as options:
        assert options == [{"num_cpus": 0}] * 3
        assert not any(map(shares_its_gpu, options))


@pytest.mark.e2e
def test_gpus_are_shared_in_pairs_or_not_at_all() -> None:
    """Alone catches bundles that Ray fills otherwise than we count, and a rank that takes another engine for its neighbour. In a
    process of its own, since the session's Ray may be alive in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "unit_tests.orchestration.ranks.placed_actors"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    gpus, beside_the_only_engine = zip(*json.loads(done.stdout.strip().splitlines()[-1]), strict=True)
    few, two_each, by_wish, *_ = gpus
    rank_0, rank_1, engine_0, engine_1 = few  # four wanted, three there
    assert rank_0 == engine_0 != rank_1 == engine_1
    rank, engine = two_each
    assert sorted(rank + engine) == [0, 1, 2] and len(engine) == 2
    assert by_wish[0] == by_wish[1] and len(by_wish[0]) == 1
    assert beside_the_only_engine == (False, False, True, False, False)
