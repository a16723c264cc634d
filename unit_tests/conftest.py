"""Settings that every test shares, and trainer ranks that are started once."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

ROOT = Path(__file__).resolve().parents[1]
PROCESS_TIMEOUT_SECONDS = 900.0  # for a test that starts real processes, on a machine much slower and busier than ours
# Files with one of these words share what takes long to start: Ray with its engine and ranks, trainer ranks, an engine alone.
SHARED = ("SharedStack", "rank_groups", "plain_pair")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "rank_groups" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("e2e") or item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.timeout(PROCESS_TIMEOUT_SECONDS))
    items.sort(key=_start_order)


def _start_order(item: pytest.Item) -> int:
    """Return the place in the order: what takes long begins first, so that no core waits for the other in the end."""
    group = group_of(item.nodeid.split("::")[0])
    return 0 if group == "SharedStack" else 1 if "/e2e/" in item.nodeid else 2 if group in SHARED else 3


@functools.cache
def group_of(file: str) -> str:
    """Return the name of the tests that one process has to do one after the other: the file's own, or that of what it shares."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((word for word in SHARED if word in text), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` each process takes a group at a time, the longest first."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.split("::")[0])

    config.option.loadscopereorder = False  # the order is ours
    return GroupScheduling(config, log)


@pytest.fixture(scope="session")
def whole_tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder, which no test changes."""
    from unit_tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny_folder(whole_tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of it that the test may damage."""
    return Path(shutil.copytree(whole_tiny_folder, tmp_path / "tiny"))


@pytest.fixture(scope="session")
def rank_groups() -> Iterator[dict[int, Ranks]]:
    """One trainer rank, and two, ready to work."""
    from unit_tests.orchestration.ranks.ranks import Ranks

    groups = {count: Ranks(count) for count in (1, 2)}
    yield groups
    for group in groups.values():
        group.close()
