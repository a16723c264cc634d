"""The sandbox against hostile programs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rewards.sandbox import run as sandbox
from rewards.sandbox.run import Limits, Ran

ROOT = Path(__file__).parents[3]


def ran(program: str, isolation: Any = "namespaces", given: bytes = b"", **limits: Any) -> Ran:
    command = [sys.executable, "-I", "program.py"]
    bounds = Limits(**{"seconds": 20.0, **limits})
    return sandbox.run(command, {"program.py": textwrap.dedent(program)}, given, bounds, isolation=isolation)


def leftovers(marker: str) -> list[int]:
    """Processes that run a program with this marker in its command line."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or [])]


def test_input_output_exit_code(isolation: Any) -> None:
    done = ran("import sys; print(sys.stdin.read()[::-1]); print('e', file=sys.stderr); sys.exit(3)", isolation, b"abc")
    assert (done.ended, done.exit_code, done.output, done.errors) == ("exit", 3, b"cba\n", "e\n")
    killed = ran("import os; os.kill(os.getpid(), 9)", isolation)
    assert (killed.ended, killed.exit_code) == ("exit", -signal.SIGKILL)


def test_endless_loop_is_ended(isolation: Any) -> None:
    done = ran("print('on', flush=True)\nwhile True: pass", isolation, seconds=1.0)
    assert (done.ended, done.exit_code, done.output) == ("time", None, b"on\n")
    assert 1.0 <= done.seconds < 10


def test_deaf_to_signals(isolation: Any) -> None:
    program = """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True: time.sleep(1)
    """
    assert ran(program, isolation, seconds=1.0).ended == "time"


def test_memory_hog(isolation: Any) -> None:
    done = ran("try:\n x = bytearray(2**30)\nexcept MemoryError:\n print('no')", isolation, memory_mb=256)
    assert done.output == b"no\n"


def test_gigabytes_of_output_end_it(isolation: Any) -> None:
    done = ran("import os\nwhile True: os.write(1, b'x' * 65536)", isolation)
    assert done.ended == "output" and len(done.output) < 2**21
    noisy = ran("import os\nfor _ in range(200): os.write(2, b'x' * 65536)\nprint('done')", isolation)
    assert noisy.output == b"done\n" and len(noisy.errors) <= 4096


def test_big_files_are_refused(isolation: Any) -> None:
    program = """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            with open("big", "wb") as file:
                for _ in range(64): file.write(b"x" * 2**20)
        except OSError as error:
            print(error.errno)
    """
    assert ran(program, isolation, scratch_mb=4).output in (b"27\n", b"28\n")  # EFBIG, or ENOSPC first


def test_the_scratch_folder_is_bounded_as_a_whole(namespaces: str) -> None:
    program = """
        try:
            for n in range(64):
                with open(f"{n}", "wb") as file: file.write(b"x" * 2**20)
        except OSError as error:
            print(error.errno)
    """
    assert ran(program, scratch_mb=4).output == b"28\n"  # ENOSPC


def test_empty_files_are_counted(namespaces: str) -> None:
    program = """
        import os
        made = 0
        try:
            for n in range(10**5):
                os.mknod(str(n)); made += 1
        except OSError as error:
            print(error.errno, made < 4096)
    """
    assert ran(program).output == b"28 True\n"  # ENOSPC


def test_the_input_cannot_be_made_longer(isolation: Any) -> None:
    program = """
        import os
        for fd in (0, os.open("/proc/self/fd/0", os.O_WRONLY) if os.access("/proc/self/fd/0", os.W_OK) else 0):
            try: print(os.pwrite(fd, b"x" * 2**20, 3))
            except OSError as error: print(error.errno in (1, 9), os.fstat(0).st_size)
    """
    assert ran(program, isolation, b"abc").output == b"True 3\n" * 2  # EPERM


def test_no_variable_of_ours_is_seen(isolation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    assert b"secret" not in ran("import os; print(os.environ)", isolation).output


def test_temporary_folders_are_gone_afterwards(isolation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("pass", "import os; os.mkdir('d'); open('d/f', 'w'); os.chmod('d', 0)", "while True: pass"):
        folder = ran(f"import os; print(os.getcwd(), flush=True)\n{program}", isolation, seconds=1.5).output.decode()
        assert folder.startswith("/tmp")
        assert folder.strip() == "/tmp" or not Path(folder.strip()).exists()


def test_fork_bomb(namespaces: str) -> None:
    program = """
        import os, sys
        children = 0
        while True:
            try:
                if os.fork() == 0: children = 0
                else: children += 1
            except BlockingIOError:
                print("full", flush=True)
                while True: pass
    """
    before = len(psutil.pids())
    counts: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            counts.append(len(psutil.pids()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = ran(program, seconds=1.5, processes=8)
    stop.set()
    watcher.join()
    assert done.ended == "time" and b"full" in done.output
    assert max(counts) < before + 100  # others come and go; a bomb makes thousands


def test_files_of_the_machine_are_neither_seen_nor_written(namespaces: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("very-secret")
    program = f"""
        import os, sys
        for path in ({str(secret)!r}, "/etc/shadow", "/proc/1/environ", {str(ROOT / "README.md")!r}, {str(ROOT / "rewards")!r}):
            try: print("read", path, os.listdir(path) if os.path.isdir(path) else open(path).read())
            except OSError: pass
        for path in ("/usr/evil", "/evil", "/bin/evil", "/dev/evil", os.path.join(sys.prefix, "evil"), {str(secret)!r}):
            try: open(path, "w").write("x"); print("wrote", path)
            except OSError: pass
        for folder in ("/usr/lib", sys.prefix, "/"):
            try: os.chmod(folder, 0o777); print("changed", folder)
            except OSError: pass
        print("end")
    """
    assert ran(program).output == b"end\n"
    assert secret.read_text() == "very-secret"


def test_what_is_bound_from_within_tmp_is_there_read_only(
    namespaces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/") and path != Path("/tmp"):
            path.chmod(0o755)
    (tmp_path / "module.py").write_text("found = 7")
    monkeypatch.setattr(sandbox, "SYSTEM_FOLDERS", (*sandbox.SYSTEM_FOLDERS, str(tmp_path)))
    program = f"""
        import sys
        sys.path.append({str(tmp_path)!r})
        import module
        print(module.found)
        try: open({str(tmp_path / "evil")!r}, "w")
        except OSError as error: print(error.errno)
        print(open("scratch", "w").write("abc"))
    """
    assert ran(program).output == b"7\n30\n3\n"  # EROFS


def test_deleting_everything_deletes_nothing(namespaces: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    program = f"""
        import os, shutil, sys
        for folder in ("/", {str(tmp_path)!r}, sys.prefix, "/usr/bin"):
            shutil.rmtree(folder, ignore_errors=True)
        print("end")
    """
    assert ran(program).output == b"end\n"
    assert kept.exists() and Path(sys.executable).exists() and Path("/usr/bin").is_dir()


def test_no_network(namespaces: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0feynrl-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        port = tcp.getsockname()[1]
        program = f"""
            import socket
            for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, {name!r}),
                                    (socket.AF_INET, ("10.0.0.1", 80)), (socket.AF_INET6, ("::1", {port}))):
                try:
                    socket.socket(family).connect(address); print("connected", address)
                except OSError as error: print("no")
        """
        assert ran(program).output == b"no\n" * 4


def test_the_parent_is_out_of_reach(namespaces: str) -> None:
    program = f"""
        import os, signal
        for pid in ({os.getpid()}, os.getppid(), 1, 0, -1):
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if pid in (0, -1): signal.signal(number, signal.SIG_IGN)
                try: os.kill(pid, number)
                except OSError: pass
        try: os.kill(1, 9)
        except OSError: pass
        print(os.getpid(), flush=True)
    """
    done = ran(program)
    assert (done.ended, done.output) == ("exit", b"2\n")


def test_no_way_to_more_privileges(namespaces: str) -> None:
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for flags in (0x10000000, 0x20000, 0x40000000, 0x10020000):
            print(libc.unshare(flags), end=" ")
        print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.mount(None, b"/", None, 0x20 | 0x1000, None),
              libc.setuid(0), libc.sethostname(b"evil", 4), libc.chroot(b"/tmp"), os.getuid(), os.geteuid())
    """
    assert ran(program).output == b"-1 -1 -1 -1 -1 -1 -1 -1 -1 1000 1000\n"


def test_memory_that_no_limit_counts_is_refused(namespaces: str) -> None:
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        try: os.memfd_create("hog")
        except OSError as error: print(error.errno)
        print(libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600))
    """
    assert ran(program).output == b"1\n-1 -1\n"


def test_sockets_that_know_no_namespaces_are_refused(namespaces: str) -> None:
    program = """
        import socket
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_ALG):
            try: socket.socket(family, socket.SOCK_STREAM if family < 16 else socket.SOCK_DGRAM).close(); print("made", end=" ")
            except OSError as error: print(error.errno, end=" ")
    """
    assert ran(program).output == b"made made made 1 1 1 "


def test_ordinary_programs_run(isolation: Any) -> None:
    program = """
        import asyncio, concurrent.futures, json, numpy, subprocess, sys, tempfile, threading
        with concurrent.futures.ThreadPoolExecutor(3) as pool: print(sum(pool.map(abs, range(-3, 3))))
        print(numpy.linalg.inv(numpy.eye(3) * 2)[0, 0])
        print(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout.strip())
        with tempfile.TemporaryFile() as file: print(file.write(b"abc"))
        async def soon(): await asyncio.sleep(0.01); return 8
        print(asyncio.run(soon()))
    """
    assert ran(program, isolation).output == b"9\n0.5\n7\n3\n8\n"


def test_background_processes_do_not_stay(isolation: Any) -> None:
    marker = f"leftover-{os.getpid()}-{isolation}"
    program = f"""
        import subprocess, sys
        for session in (False, True):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", {marker!r}], start_new_session=session)
        print("end")
    """
    done = ran(program, isolation)
    assert (done.ended, done.output) == ("exit", b"end\n")
    assert not leftovers(marker)
    ended = ran(textwrap.dedent(program) + "while True: pass\n", isolation, seconds=2.0)
    assert ended.ended == "time" and not leftovers(marker)


def test_all_goes_when_the_scoring_process_is_killed(isolation: Any) -> None:
    marker = f"orphan-{os.getpid()}-{isolation}"
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from rewards.sandbox import run as sandbox
program = "import os, time; os.write(2, b'x'); time.sleep(300)"
sandbox.run([sys.executable, "-I", "-c", program, {marker!r}], {{}}, limits=sandbox.Limits(300), isolation={isolation!r})
"""
    scoring = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    end = time.monotonic() + 60
    while len(leftovers(marker)) < 1 and time.monotonic() < end:
        time.sleep(0.1)
    assert leftovers(marker)
    os.killpg(scoring.pid, signal.SIGKILL)
    scoring.wait()
    end = time.monotonic() + 60
    while leftovers(marker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not leftovers(marker)


def test_a_machine_that_does_not_permit_namespaces_is_refused(tmp_path: Path, namespaces: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from plugins.parameters import check
open("/proc/sys/user/max_user_namespaces", "w").write("0")
check("reward", "code_execution", {{"isolation": "limits_only"}})
check("reward", "code_execution", {{}})
"""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ValueError: reward 'code_execution': programs cannot be isolated on this machine" in done.stderr
    assert "params.isolation: limits_only" in done.stderr.splitlines()[-1]


def test_a_command_that_does_not_exist_is_an_error_of_ours(isolation: Any) -> None:
    with pytest.raises(RuntimeError, match="the sandbox cannot be set up: No such file"):
        sandbox.run(["/no/such/python"], {}, isolation=isolation)
