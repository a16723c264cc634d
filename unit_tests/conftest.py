"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest

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

from hypothesis import HealthCheck, settings

# CI draws the same examples every time, so that a red build can be repeated; at a desk they differ from run to run.
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("desk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "desk")

E2E_TIMEOUT_SECONDS = 900.0  # a run of the real stack, its start included, on a busy 2-core machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "rank_groups" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_SECONDS))
        if "stack" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.stack)
