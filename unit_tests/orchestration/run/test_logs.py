import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_redirected_output_catches_python_c_and_children(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine_0.log"
    code = """
import os, subprocess, sys
from orchestration.run.logs import redirect_output_to
print("before")
redirect_output_to(sys.argv[1])
print("python")
print("python error", file=sys.stderr)
sys.stdout.flush()
os.write(1, b"descriptor\\n")
subprocess.run(["sh", "-c", "echo child; echo child error >&2"])
"""
    result = run(code, str(log))
    assert (result.returncode, result.stdout, result.stderr) == (0, "before\n", "")
    assert sorted(log.read_text().splitlines()) == ["child", "child error", "descriptor", "python", "python error"]
    run(code, str(log))
    assert len(log.read_text().splitlines()) == 10, "a second process adds to the log"


def test_captured_output_gives_the_screen_back_after_an_error(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    code = """
import os, sys
from orchestration.run.logs import captured_output
with captured_output(sys.argv[1]) as screen:
    screen.write("for people\\n")
    os.write(2, b"noise\\n")
    raise RuntimeError("shown")
"""
    result = run(code, str(log))
    assert result.returncode == 1
    assert result.stdout == "for people\n"
    assert "RuntimeError: shown" in result.stderr and "noise" not in result.stderr
    assert log.read_text() == "noise\n"
