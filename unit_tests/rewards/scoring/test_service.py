"""The scoring service against rewards that hang, die, lie and shout."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.blocks.rl import Reward
from records.rollout import Prompt, Trajectory
from rewards.scoring.service import ScoringService

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[3])


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def block(*parts: dict[str, Any], **settings: Any) -> Reward:
    settings = {"first_timeout_seconds": settings.get("timeout_seconds", 10), **settings}
    return Reward(parts=list(parts) or [{"function": "hostile_rewards:by_response"}], **settings)  # type: ignore[arg-type]


def trajectory(response: str, sample: int = 0) -> Trajectory:
    return Trajectory(
        Prompt("p/0", [{"role": "user", "content": "?"}], "4"), "g", sample, np.zeros(2, np.int32),
        np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.bool_),
        np.zeros(1, np.int32), response=response, finish_reason="stop",
    )  # fmt: skip


def scored(reward: Reward, *responses: str, together: bool = False) -> list[Trajectory]:
    """Score the responses, one after the other unless `together`."""

    async def run(service: ScoringService) -> list[Trajectory]:
        items = [trajectory(r, i) for i, r in enumerate(responses)]
        if together:
            return list(await asyncio.gather(*(service.score(t) for t in items)))
        return [await service.score(t) for t in items]

    return with_service(reward, run)


def with_service(reward: Reward, use: Callable[[ScoringService], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        service = ScoringService(reward)
        await service.start()
        try:
            return await use(service)
        finally:
            await service.close()

    return asyncio.run(run())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_weighted_sum_of_parts() -> None:
    reward = block({"function": "last_number", "weight": 0.9}, {"function": "ended", "weight": 0.1})
    right, wrong = scored(reward, "2 + 2 = 4", "5")
    assert right.reward == pytest.approx(1.0) and right.reward_parts == {"last_number": 1.0, "ended": 1.0}
    assert wrong.reward == pytest.approx(0.1) and wrong.reward_parts == {"last_number": 0.0, "ended": 1.0}
    assert right.reward_error is None and right.reward_seconds > 0


def test_named_parts_async_functions_and_repeated_functions() -> None:
    reward = block(
        {"function": "hostile_rewards:by_response", "weight": 2.0},
        {"function": "hostile_rewards:awaited"},
        {"function": "hostile_rewards:awaited", "weight": 0.0},
    )
    (done,) = scored(reward, "parts")
    assert done.reward_parts == {
        "by_response/right": 1.0, "by_response/short": 0.25, "awaited": 0.75, "awaited#2": 0.75,
    }  # fmt: skip
    assert done.reward == pytest.approx(2 * 1.25 + 0.75)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("fail", "KeyError: 'the column nobody has'"),
        ("text", "it is str, not a number: '0.7'"),
        ("nothing", "it is NoneType"),
        ("empty", "an empty dict"),
        ("sys_exit", "SystemExit"),
        ("read_input", "EOFError"),
        ("os_exit", "its process died (exit code 0)"),
        ("segfault", "its process died (signal SIGSEGV)"),
        ("no_such_function", "KeyError"),
    ],
)
def test_failures_are_errors_and_the_next_sample_is_scored(response: str, said: str) -> None:
    failed, after = scored(block(), response, "good")
    assert (
        failed.reward is None and "by_response" in (failed.reward_error or "") and said in (failed.reward_error or "")
    )
    assert after.reward == 0.5 and after.reward_error is None


def test_error_shows_the_users_line() -> None:
    (failed,) = scored(block(), "fail")
    assert 'raise KeyError("the column nobody has")' in (failed.reward_error or "")


@pytest.mark.parametrize("response", ["sleep_forever", "ignore_sigterm"])
def test_time_out_really_kills(response: str) -> None:
    async def run(service: ScoringService) -> None:
        before = int((await service.score(trajectory("pid"))).reward or 0)
        started = time.monotonic()
        failed = await service.score(trajectory(response))
        assert time.monotonic() - started < 30
        assert failed.reward is None and "no answer within 0.5 s" in (failed.reward_error or "")
        assert failed.reward_seconds == 0.5
        after = int((await service.score(trajectory("pid"))).reward or 0)
        assert after not in (0, before)
        assert not is_running(before)

    # Replacing a process is not on the clock of the sample that needs it, so a short limit is safe on a busy machine.
    with_service(block(timeout_seconds=0.5), run)


def test_time_out_kills_what_the_reward_started(tmp_path: Path) -> None:
    reward = block(
        {"function": "hostile_rewards:by_response", "params": {"folder": str(tmp_path)}}, timeout_seconds=1.0
    )
    (failed,) = scored(reward, "leave_a_child")
    assert failed.reward is None
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and wait_until(lambda: not any(is_running(p) for p in pids))


def test_only_the_hanging_sample_fails() -> None:
    responses = ["good"] * 10 + ["sleep_forever"] + ["good"] * 10 + ["os_exit"] + ["good"] * 10
    done = scored(block(workers=2, timeout_seconds=1.0), *responses, together=True)
    assert [t.sample for t in done if t.reward is None] == [10, 21]
    assert all(t.reward == 0.5 for t in done if t.reward is not None)


def test_inf_and_nan_are_errors_of_their_responses() -> None:
    nan, infinite, good = scored(block(), "nan", "infinite", "good")
    assert nan.reward is infinite.reward is None and infinite.reward_parts == {}
    assert "by_response: ValueError: it returned by_response = nan" in (nan.reward_error or "")
    assert "it returned by_response/huge = inf" in (infinite.reward_error or "")
    assert good.reward == 0.5 and good.reward_error is None


def test_what_a_process_loads_for_its_first_score_has_a_limit_of_its_own() -> None:
    first = block({"function": "hostile_rewards:loads"}, timeout_seconds=0.5, first_timeout_seconds=60.0)
    assert [t.reward for t in scored(first, "x", "y")] == [0.5, 0.5]
    hanging = scored(block(timeout_seconds=0.2, first_timeout_seconds=0.4), *["sleep_forever"] * 4)
    keys = [re.findall(r"within (\S+) s \((reward\.\w+)", t.reward_error or "") for t in hanging]
    assert keys == 3 * [[("0.4", "reward.first_timeout_seconds")]] + [[("0.2", "reward.timeout_seconds")]]
    late = scored(block(timeout_seconds=0.5, first_timeout_seconds=60.0), "good", "sleep_forever")[1]
    assert "no answer within 0.5 s (reward.timeout_seconds)" in (late.reward_error or "")


def test_a_part_of_weight_zero_is_only_looked_at() -> None:
    (done,) = scored(
        block({"function": "hostile_rewards:by_response", "weight": 0.0}, {"function": "ended"}), "infinite"
    )
    assert done.reward == 1.0 and done.reward_parts["by_response/huge"] == math.inf


def test_on_error_zero_keeps_the_error() -> None:
    failed, good = scored(block(on_error="zero"), "fail", "good")
    assert failed.reward == 0.0 and "KeyError" in (failed.reward_error or "")
    assert good.reward == 0.5 and good.reward_error is None


def test_a_failed_part_leaves_no_reward_but_the_other_parts_are_told() -> None:
    reward = block({"function": "ended"}, {"function": "hostile_rewards:by_response"})
    (failed,) = scored(reward, "fail")
    assert failed.reward is None and failed.reward_parts == {"ended": 1.0}


def test_shouting_neither_blocks_nor_breaks(capfd: pytest.CaptureFixture[str]) -> None:
    loud, after = scored(block(), "shout", "good")
    assert loud.reward == 1.0 and after.reward == 0.5
    assert capfd.readouterr().out == ""  # prints go to stderr, never into the console's lines


def test_a_reward_cannot_change_the_record() -> None:
    (done,) = scored(block({"function": "hostile_rewards:mutate"}), "as it was")
    assert done.reward == 1.0 and done.response == "as it was" and done.prompt.messages


def test_the_event_loop_stays_free() -> None:
    async def run(service: ScoringService) -> float:
        task = asyncio.create_task(service.score(trajectory("sleep_forever")))
        longest, last = 0.0, time.monotonic()
        while not task.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest

    assert with_service(block(timeout_seconds=3.0), run) < 2.0


def test_workers_score_side_by_side() -> None:
    async def run(service: ScoringService) -> set[float | None]:
        done = await asyncio.gather(*(service.score(trajectory("pid")) for _ in range(50)))
        return {t.reward for t in done}

    assert len(with_service(block(workers=2), run)) == 2


def judge(**settings: Any) -> Reward:
    return block({"function": "hostile_rewards:by_response_async"}, **{"timeout_seconds": 10.0, **settings})


def test_async_functions_of_several_responses_run_side_by_side_in_one_process() -> None:
    async def run(service: ScoringService) -> tuple[set[float | None], float]:
        await service.score(trajectory("nap"))
        started = time.monotonic()
        done = await asyncio.gather(*(service.score(trajectory("nap")) for _ in range(12)))
        return {t.reward for t in done}, time.monotonic() - started

    pids, seconds = with_service(judge(concurrency=6), run)
    assert len(pids) == 1 and 0.6 <= seconds < 12 * 0.3
    _, by_twos = with_service(judge(concurrency=2), run)
    assert by_twos >= 6 * 0.3


def test_a_hanging_async_score_is_cancelled_and_the_others_go_on_where_they_are() -> None:
    responses = ["nap"] * 3 + ["await_forever"] + ["nap"] * 12
    done = scored(judge(timeout_seconds=1.0, concurrency=5), *responses, together=True)
    assert [t.sample for t in done if t.reward is None] == [3]
    assert "no answer within 1 s" in (done[3].reward_error or "") and done[3].reward_seconds == 1.0
    assert len({t.reward for t in done if t.reward}) == 1, "the process was replaced"


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        ("refuse_to_be_cancelled", "its process was killed"),
        ("block_the_loop", "its process was killed"),
        ("exit_process", "its process died (exit code 3)"),
    ],
)
def test_only_the_one_to_blame_fails_when_a_shared_process_is_lost(hostile: str, said: str) -> None:
    done = scored(judge(timeout_seconds=1.0, concurrency=5), "nap", hostile, "nap", "nap", hostile, together=True)
    assert [t.sample for t in done if t.reward is None] == [1, 4]
    assert all(said in (done[i].reward_error or "") for i in (1, 4))
    assert all(t.reward_error is None and (t.reward or 0) > 1 for t in done if t.sample not in (1, 4))


def test_async_functions_that_raise_what_stops_loops() -> None:
    done = scored(judge(), "raise_exit", "cancel_itself", "nap", together=True)
    assert [t.reward is None for t in done] == [True, True, False]
    assert "SystemExit" in (done[0].reward_error or "") and "CancelledError" in (done[1].reward_error or "")


def test_ordinary_functions_beside_async_ones_have_the_main_thread() -> None:
    reward = block({"function": "hostile_rewards:awaited"}, {"function": "hostile_rewards:needs_the_main_thread"})
    done = scored(reward, "a", "b", "c", together=True)
    assert [t.reward for t in done] == [1.5] * 3, done[0].reward_error
    assert list(done[0].reward_parts) == ["awaited", "needs_the_main_thread"]


def test_a_slow_ordinary_function_does_not_time_out_those_that_wait_for_it() -> None:
    slow = block(
        {"function": "hostile_rewards:awaited"}, {"function": "hostile_rewards:slow"},
        timeout_seconds=0.7, concurrency=8,
    )  # fmt: skip
    assert [t.reward for t in scored(slow, *"abcdefgh", together=True)] == [1.75] * 8


def test_counters_are_told_and_not_paid() -> None:
    (done,) = scored(block({"function": "hostile_rewards:counted", "weight": 2.0}), "x")
    assert done.reward == 3.0
    assert done.reward_parts == {"counted/a": 1.0, "counted/b": 0.5, "counted/tokens": 100.0}


@pytest.mark.parametrize("frozen", ["before it begins", "in the middle", "for ever again"])
def test_a_sample_whose_process_is_frozen_is_scored_again(frozen: str) -> None:
    async def run(service: ScoringService) -> Trajectory:
        pid = int((await service.score(trajectory("pid"))).reward or 0)
        if frozen == "before it begins":
            os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(service.score(trajectory("slow_good")))
        await asyncio.sleep(1.0)
        if frozen != "before it begins":
            os.kill(pid, signal.SIGSTOP)
        if frozen == "for ever again":
            while not ((again := service._alone.process) and again._started):
                assert not task.done(), "it was not scored again"
                await asyncio.sleep(0.05)
            os.kill(again.popen.pid, signal.SIGSTOP)
        return await task

    done = with_service(block(timeout_seconds=4.0), run)
    if frozen == "for ever again":
        assert done.reward is None and "no answer within 4 s" in (done.reward_error or "")
    else:
        assert done.reward == 0.5 and done.reward_error is None


def test_a_score_that_nobody_waits_for_any_more_leaves_a_free_process() -> None:
    async def run(service: ScoringService) -> Trajectory:
        task = asyncio.create_task(service.score(trajectory("sleep_forever")))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await service.score(trajectory("good"))

    assert with_service(block(timeout_seconds=60), run).reward == 0.5


def test_import_failures_surface_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies_at_import.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for function, said in (("last_numbr", "did you mean"), ("dies_at_import:score", "exit code 3")):
        with pytest.raises(ValueError, match=said):
            scored(block({"function": function}), "x")


def test_close_ends_the_processes_also_in_the_middle_of_a_score() -> None:
    async def run() -> None:
        service = ScoringService(block(workers=2, timeout_seconds=60))
        await service.start()
        pid = int((await service.score(trajectory("pid"))).reward or 0)
        hanging = [asyncio.create_task(service.score(trajectory("ignore_sigterm"))) for _ in range(2)]
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await service.close()
        assert time.monotonic() - started < 30
        assert all(t.reward is None and t.reward_error for t in await asyncio.gather(*hanging))
        assert not is_running(pid)
        await service.close()

    asyncio.run(run())


@pytest.mark.parametrize("busy", ["good", "ignore_sigterm"])
def test_processes_end_when_the_parent_is_killed(busy: str, tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
sys.path[:0] = [{HERE!r}, {ROOT!r}]
from test_service import block, trajectory
from rewards.scoring.service import ScoringService
async def main():
    service = ScoringService(block(timeout_seconds=1000))
    await service.start()
    print(int((await service.score(trajectory("pid"))).reward), flush=True)
    await service.score(trajectory({busy!r}))
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    time.sleep(0.3)
    assert is_running(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not is_running(pid)), "the scoring process outlived its parent"


def test_overhead_is_small() -> None:
    async def run(service: ScoringService) -> float:
        items = [trajectory("4", i) for i in range(128)]
        started = time.monotonic()
        await asyncio.gather(*(service.score(t) for t in items))
        return time.monotonic() - started

    reward = block({"function": "last_number", "weight": 0.9}, {"function": "ended", "weight": 0.1})
    # 0.06 s on an idle machine; the bound leaves room for a busy one.
    assert with_service(reward, run) < 128 * 0.02
