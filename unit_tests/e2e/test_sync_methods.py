"""Whole jobs by every sync method, and a sync that goes on with the next method, on the session's trainers and engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.blocks.rl import RLConfig
from orchestration.cluster.watchdog import Call, Watch
from orchestration.rl import weight_sync
from orchestration.rl.driver import Driver
from orchestration.rl.weight_sync import SyncError, WeightSync
from unit_tests.e2e.shared_stack import STEPS, SharedStack

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("method", ["nccl", "disk"])
def test_a_job_learns_by_any_method(stack: SharedStack, method: str) -> None:
    """Alone catches a method of syncing that a whole job does not get through."""
    done = stack.run({"sync": {"method": method, "bucket_mib": 0.01}})
    rows = done.rows[1:]
    assert len(rows) == STEPS
    for row in rows:
        assert row["sync/fallbacks"] == 0
        assert row["sync/bytes"] > 1000 and row["sync/gigabytes_per_second"] > 0
        assert row["sync/pause_seconds"] > row["sync/read_back_seconds"] > 0 and row["sync/publish_seconds"] > 0
        assert row["sync/unread_share"] == 0
        assert row["sync/probe_gap_max"] < 1e-4
    assert "warning" not in done.console


PUBLISHING = "publish weights"


class SpoiltWatch(Watch):
    """Changes what actors say about `spoils` on its way to the engines."""

    def __init__(self, change: Callable[[dict[str, Any]], None], spoils: str) -> None:
        super().__init__(stall_seconds=300.0)
        self.change, self.spoils = change, spoils

    def wait(self, call: Call[Any]) -> Any:
        answer = super().wait(call)
        if call.doing.startswith(self.spoils):
            for said in answer if isinstance(answer, list) else [answer]:
                if isinstance(said, dict):
                    self.change(said)
        return answer


def unreachable(offer: dict[str, Any]) -> None:
    offer["host"] = "127.0.0.1"
    offer["port"] = 9  # nobody listens


def unreadable(notice: dict[str, Any]) -> None:
    if notice["path"].startswith("/proc/"):
        notice["path"] = "/proc/1/fd/9999"


def made_sync(
    stack: SharedStack, method: str, mode: str, watch: Watch | None = None
) -> tuple[WeightSync, RLConfig, list[str]]:
    config, warnings = stack.small(), []
    config = config.model_copy(
        update={
            "sync": config.sync.model_copy(update={"method": method}),
            "schedule": config.schedule.model_copy(update={"mode": mode}),
        }
    )
    assert stack.actors.trainers is not None
    watch = watch or Watch(stall_seconds=300.0)
    return WeightSync(config, stack.actors.trainers, stack.actors.pool, watch, warnings.append), config, warnings


def gap(stack: SharedStack, config: RLConfig, weights: WeightSync, version: int) -> float:
    """The largest difference between engines and trainer."""
    queue: Any = None  # nothing is submitted
    assert stack.actors.trainers is not None
    driver = Driver(config, stack.actors.trainers, stack.actors.pool, queue, weights, weights.watch)
    driver.probe(version, stack.prompts(config)[:4])
    return driver.tally.means()["sync/probe_gap_max"]


@pytest.fixture
def short_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "JOIN_SECONDS", 2.0)


@pytest.mark.usefixtures("short_joining")
def test_a_group_that_cannot_be_joined_is_followed_by_shared_memory(stack: SharedStack) -> None:
    """Alone catches a failed nccl that ends a run in sync mode."""
    weights, config, warnings = made_sync(stack, "nccl", "sync", SpoiltWatch(unreachable, weight_sync.JOINING))
    tally = weights.push(5).means()
    assert tally["sync/fallbacks"] == 1
    assert weights.method == "direct"
    assert len(warnings) == 1
    assert warnings[0].startswith("sync.method nccl failed: rank ") and "could not join" in warnings[0]
    assert "goes on with direct" in warnings[0]
    assert gap(stack, config, weights, 5) < 1e-4
    assert weights.push(6).means()["sync/fallbacks"] == 0


def test_shared_memory_that_cannot_be_read_is_followed_by_a_file(stack: SharedStack) -> None:
    """Alone catches a failed direct that ends a run in sync mode."""
    weights, config, warnings = made_sync(stack, "direct", "sync", SpoiltWatch(unreadable, PUBLISHING))
    assert weights.push(7).means()["sync/fallbacks"] == 1
    assert weights.method == "disk"
    assert "/proc/1/fd/9999 cannot be mapped" in warnings[0] and "goes on with disk" in warnings[0]
    assert gap(stack, config, weights, 7) < 1e-4


@pytest.mark.usefixtures("short_joining")
def test_overlap_fails_fast_and_names_the_way_out(stack: SharedStack) -> None:
    """Alone catches a fall-back that overlap has no time for, or an error without advice."""
    weights, _, warnings = made_sync(stack, "nccl", "overlap", SpoiltWatch(unreachable, weight_sync.JOINING))
    with pytest.raises(
        SyncError,
        match=r"could not join .* give --resume --set sync\.method=direct, or disk where engines are on other machines\.",
    ):
        weights.push(4)
    assert warnings == []


def test_when_no_method_is_left_the_run_ends(stack: SharedStack) -> None:
    """Alone catches a last method that is tried for ever, or that leaves a group behind in which nobody can sync."""

    def gone(notice: dict[str, Any]) -> None:
        Path(notice["path"]).unlink()

    weights, _, _ = made_sync(stack, "disk", "sync", SpoiltWatch(gone, PUBLISHING))
    with pytest.raises(SyncError, match="No method is left"):
        weights.push(8)
    sound, _, _ = made_sync(stack, "nccl", "sync")
    sound.push(9)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_fault_of_the_code_is_no_failure_of_the_method(stack: SharedStack, mode: str) -> None:
    """Alone catches our own error that becomes a fall-back. Here a paused engine is told to finish its responses."""
    weights, _, warnings = made_sync(stack, "direct", mode)
    rollouts = stack.actors.pool
    rollouts.in_flight = "drain"
    rollouts.sleep()
    try:
        with pytest.raises(ValueError, match="a paused engine cannot drain"):
            weights.push(5)
    finally:
        rollouts.wake()
        rollouts.in_flight = "recompute"
    assert weights.method == "direct" and warnings == []
    assert weights.push(6).means()["sync/fallbacks"] == 0


def test_weights_that_the_system_does_not_let_be_written_are_a_failure_of_the_method(
    stack: SharedStack, tmp_path: Path
) -> None:
    """Alone catches a full disk that is told as an error of the code."""
    assert stack.actors.trainers is not None
    folder = stack.actors.trainers.sync_folder
    assert folder is not None
    weights, _, _ = made_sync(stack, "disk", "sync")
    if folder.exists():
        folder.rename(tmp_path / "moved")
    folder.write_text("a file where the folder should be")
    with pytest.raises(SyncError, match=r"sync\.method disk failed: .*could not be written.*No method is left"):
        weights.push(8)
    folder.unlink()
    assert weights.push(9).means()["sync/fallbacks"] == 0


@pytest.mark.parametrize("method", ["nccl", "direct"])
def test_a_new_engine_gets_the_current_weights_as_long_as_the_trainer_has_them(stack: SharedStack, method: str) -> None:
    """Alone catches a new engine with weights of another version: here the engine that holds them is taken for one."""
    pool, trainers = stack.actors.pool, stack.actors.trainers
    assert trainers is not None
    (engine,) = pool.engines
    weights, config, _ = made_sync(stack, method, "sync")
    weights.push(11)
    for moved in (False, True):
        trainers.weights_moved = moved  # as `step` leaves it
        engine.state = "started"
        comes = method == "direct" or not moved  # a file stays, a broadcast does not
        while comes and engine.state != "usable":
            pool.look(0.05)
            weights.give_to_new_engines()
        weights.give_to_new_engines()
        assert engine.state == ("usable" if comes else "started")
    assert weights.push(12).means()["sync/fallbacks"] == 0
    assert engine.state == "usable" and gap(stack, config, weights, 12) < 1e-4
