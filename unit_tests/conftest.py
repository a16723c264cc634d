"""Settings that every test shares, and trainer ranks that are started once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from unit_tests.orchestration.ranks.ranks import Ranks

# Two OpenMP teams on the same cores ruin each other; tests use tiny tensors. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Nothing in the tests may reach a hub or report anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Ray's workers are nicer than other processes by default, and would starve beside the tests of the other core.
os.environ.setdefault("RAY_worker_niceness", "0")

from hypothesis import HealthCheck, settings

# CI draws the same examples every time, so that a red build can be repeated; at a desk they differ from run to run.
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("desk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "desk")

PROCESS_TIMEOUT_SECONDS = 900.0  # for a test that starts real processes, on a machine much slower and busier than ours
# Tests that share what takes long to start are done by one process of `pytest -n 2 --dist loadgroup`: by fixture, the first
# one that a test asks for. Other tests go by their file, whose fixtures they share.
SHARED = ("stack", "rank_groups", "plain_pair")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "rank_groups" in fixtures:
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("e2e") or item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.timeout(PROCESS_TIMEOUT_SECONDS))
        group = next((name for name in SHARED if name in fixtures), item.nodeid.split("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_start_order)


def _start_order(item: pytest.Item) -> int:
    """Return the place in the order: long groups begin first, so that no core waits for the other in the end."""
    if "stack" in getattr(item, "fixturenames", ()):
        return 0
    return 1 if item.get_closest_marker("e2e") else 2 if item.get_closest_marker("ranks") else 3


@pytest.fixture(scope="session")
def rank_groups() -> Iterator[dict[int, Ranks]]:
    """One trainer rank, and two, ready to work."""
    from unit_tests.orchestration.ranks.ranks import Ranks

    groups = {count: Ranks(count) for count in (1, 2)}
    yield groups
    for group in groups.values():
        group.close()
