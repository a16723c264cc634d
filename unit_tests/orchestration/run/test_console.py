import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestration.run.console import Console, clock

ROOT = Path(__file__).resolve().parents[3]
METRICS = {
    "reward/mean": 0.5,
    "rollout/response_tokens": 8.25,
    "rollout/tokens_per_second": 1234.0,
    "time/step_seconds": 2.0,
}


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    with Console("grpo", steps=2, stream=stream) as console:
        with console.phase("starting engines"):
            pass
        console.step(0, {"eval/accuracy": 0.25})
        with console.phase("generate"):
            pass
        console.step(1, METRICS)
        console.warning("2 responses could not be scored [see samples]")
        console.step(2, {**METRICS, "eval/accuracy": 0.75})
    console.summary("done", {"report": Path("runs/a/report.html"), "samples": "x" * 200})
    lines = stream.getvalue().split("\n")
    assert lines[:2] == ["starting engines ...", "step 0/2  held-out 0.250"]
    assert lines[2].startswith("step 1/2  reward 0.500  response 8.2 tokens  1,234 tokens/s  2.0 s  remaining ")
    assert lines[3] == "warning: 2 responses could not be scored [see samples]"
    assert lines[4].startswith("step 2/2  reward 0.500  held-out 0.750")
    assert lines[5:] == ["", "done", "  report   runs/a/report.html", "  samples  " + "x" * 200, ""]
    assert "\x1b" not in stream.getvalue()


def test_responses_that_could_not_be_scored_are_shown() -> None:
    stream = io.StringIO()
    console = Console("grpo", steps=2, stream=stream)
    console.step(1, {**METRICS, "reward/errors": 0, "rollout/responses": 512, "eval/errors": 0})
    console.step(2, {**METRICS, "reward/errors": 25, "rollout/responses": 512, "eval/errors": 3})
    without, with_errors = stream.getvalue().splitlines()
    assert "errors" not in without
    assert "reward 0.500  reward errors 25 of 512  held-out reward errors 3" in with_errors


def test_remaining_time_is_judged_by_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    console = Console("grpo", steps=30, stream=io.StringIO())
    now[0] += 500.0  # start-up does not count
    console.step(0, {})
    assert console.remaining_seconds() is None
    for step in range(1, 21):
        now[0] += 9.0 if step <= 10 else 3.0
        console.step(step, {})
    assert console.remaining_seconds() == pytest.approx(10 * 3.0)
    now[0] += 1.0
    assert console.remaining_seconds() == pytest.approx(10 * 3.0 - 1.0)


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 61, 3600, 3725)] == ["0:00", "1:00", "1:01", "1:00:00", "1:02:05"]


ON_A_TERMINAL = """
import time
from orchestration.run.console import Console
from orchestration.run.logs import captured_output
import sys
with captured_output(sys.argv[1]) as screen, Console("grpo", 3, screen) as console:
    console.step(0, {"eval/accuracy": 0.25})
    with console.phase("generate"):
        print("noise of a library")
        time.sleep(0.6)
    console.step(1, {"reward/mean": 0.5, "eval/accuracy": 0.75})
    console.note("a note")
    time.sleep(0.4)
    if len(sys.argv) > 2:
        raise KeyboardInterrupt
print("finished")
"""


def run_on_a_terminal(*arguments: str) -> str:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, *arguments]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment):
        os.close(slave)
        seen = b""
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # Linux answers EIO once the other end is closed
                break
            if not chunk:
                break
            seen += chunk
    os.close(master)
    return seen.decode()


def test_a_terminal_gets_a_live_panel_and_lines_that_stay(tmp_path: Path) -> None:
    seen = run_on_a_terminal(str(tmp_path / "driver.log"))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert "generate 0:0" in plain and "step 0/3 done" in plain and "step 1/3 done" in plain
    assert "held-out 0.750 (step 1)" in plain and "a note" in plain
    assert "noise of a library" not in seen
    assert (tmp_path / "driver.log").read_text() == "noise of a library\n"
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor must be shown again"
    assert plain.rstrip().endswith("finished")


def test_ctrl_c_leaves_the_terminal_usable(tmp_path: Path) -> None:
    seen = run_on_a_terminal(str(tmp_path / "driver.log"), "interrupt")
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")
    assert "KeyboardInterrupt" in seen, "what ends the program is shown on the screen, not in the log"
