"""Run a program that nobody has read: within limits, and away from network, files, secrets and other processes.

rewards/sandbox/jail.py confines the program. This file says what the program gets, and reads what comes back.
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Isolation = Literal["namespaces", "limits_only"]

JAIL = str(Path(__file__).with_name("jail.py"))
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
RESULT_FD = "RESULT_FD"  # the command's environment variable with the pipe it may write to besides stdout
CHANNEL_FD = "CHANNEL_FD"
START_SECONDS = 10.0  # limit for the start of the jail itself, on a busy machine
END_SECONDS = 2.0
ERROR_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """The limits of a program.

    Seconds limit wall-clock time and each process's processor time. Memory and the size of a file are per process. The
    scratch folder, which is in memory when there are namespaces, is for all processes together.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    processes: int = 8  # threads count as processes
    scratch_mb: int = 64
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Ran:
    """The end of a program, and what it wrote."""

    ended: Literal["exit", "time", "output"]  # by itself, or because it exceeded a limit
    exit_code: int | None  # minus the signal's number when a signal killed it; None unless ended is "exit"
    output: bytes
    result: bytes  # written to the result pipe
    errors: str  # the end of stderr
    seconds: float


def run(
    command: list[str],
    files: dict[str, str],
    given: bytes = b"",
    limits: Limits = Limits(),
    *,
    isolation: Isolation,
    channel: int | None = None,
) -> Ran:
    """Run a command on the given standard input in a folder with the given text files. The folder is gone afterwards.

    channel: an end of a socket for the command, which finds its number in CHANNEL_FD. It is closed here.

    With `limits_only` there is no isolation: the program can read this user's files and processes, use the network and
    leave processes behind. That stops accidents, not attacks.

    Raises:
        RuntimeError: the sandbox cannot be set up; the program has not run.
    """
    pipes = {name: os.pipe() for name in ("output", "errors", "result", "status")}
    settings = _settings(command, files, limits, isolation, pipes["result"][1])
    channels = [] if channel is None else [channel]
    if channel is not None:
        settings["environment"][CHANNEL_FD] = str(channel)
    inputs = [_file_of(json.dumps(settings).encode()), _file_of(given)]
    started = time.monotonic()
    try:
        jail = subprocess.Popen(
            [sys.executable, "-I", "-S", JAIL, str(inputs[0]), str(pipes["status"][1])],
            stdin=inputs[1],
            stdout=pipes["output"][1],
            stderr=pipes["errors"][1],
            pass_fds=[inputs[0], pipes["status"][1], pipes["result"][1], *channels],
            env={},
        )
    finally:
        for fd in (*inputs, *channels, *(write_end for _, write_end in pipes.values())):
            os.close(fd)
    try:
        texts, ended = _read_all({name: read_end for name, (read_end, _) in pipes.items()}, limits)
    finally:
        _end(jail)
        for read_end, _ in pipes.values():
            os.close(read_end)
    seconds = time.monotonic() - started
    errors = texts["errors"].decode(errors="replace")
    status: dict[str, Any] = {}
    for line in texts["status"].splitlines():
        status = {**json.loads(line), **status}
    if "error" in status or "started" not in status or (ended == "exit" and "exit" not in status):
        why = status.get("error") or f"its jail did not start the program ({ended}, {jail.returncode}): {errors[-300:]}"
        raise RuntimeError(f"the sandbox cannot be set up: {why}")
    return Ran(ended, status["exit"] if ended == "exit" else None, texts["output"], texts["result"], errors, seconds)


@functools.lru_cache
def check(isolation: Isolation) -> None:
    """Raise ValueError when this machine does not let us isolate programs in this way."""
    try:
        ran = run(
            [sys.executable, "-I", "-c", "print(6 * 7)"], {}, limits=Limits(seconds=START_SECONDS), isolation=isolation
        )
    except RuntimeError as error:
        raise ValueError(
            f"programs cannot be isolated on this machine: {error}. Allow unprivileged user namespaces (sysctl "
            "user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns; in a container also its "
            "seccomp profile), or set params.isolation: limits_only, which lets programs read your files and use the "
            "network"
        ) from error
    if ran.output != b"42\n":
        raise ValueError(
            f"Python does not run in the sandbox: {ran.ended}, exit code {ran.exit_code}: {ran.errors[-300:]}; it must "
            f"be readable by every user: {sys.prefix}, {sys.base_prefix}"
        )


def _settings(
    command: list[str], files: dict[str, str], limits: Limits, isolation: Isolation, result_fd: int
) -> dict[str, Any]:
    one_mb = 1 << 20
    bounds = {
        "RLIMIT_AS": limits.memory_mb * one_mb,
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.scratch_mb * one_mb,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    if isolation == "namespaces":  # without them, all processes of the user would count
        bounds["RLIMIT_NPROC"] = limits.processes + 2  # the jail's own two processes count when they have the same user
    folder = os.path.dirname(sys.executable)
    return {
        "isolation": isolation,
        "parent": os.getpid(),
        "command": command,
        "files": files,
        "limits": bounds,
        "scratch_bytes": limits.scratch_mb * one_mb,
        "binds": _outermost([*filter(os.path.lexists, SYSTEM_FOLDERS), sys.prefix, sys.base_prefix]),
        "environment": {
            "PATH": f"{folder}:/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # so that a program that prints a set is judged alike every time
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            RESULT_FD: str(result_fd),
        },
    }


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not inside another one."""
    outermost: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{other}/") for other in outermost):
            outermost.append(path)
    return outermost


def _file_of(content: bytes) -> int:
    """Return a file in memory that holds `content`. Unlike a pipe, it takes any amount while nobody reads.

    Nobody can write to it, because what a program adds would be memory that no limit counts.
    """
    fd = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read_all(pipes: dict[str, int], limits: Limits) -> tuple[dict[str, bytes], Any]:
    """Read all pipes until they end, the time is over or there is too much output; return the texts and which it was.

    The program's time counts from its start. Only the end of stderr is kept.
    """
    texts = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as selector:
        for name, fd in pipes.items():
            selector.register(fd, selectors.EVENT_READ, name)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return texts, "time"
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                if key.data == "status" and piece and not texts["status"]:
                    deadline = time.monotonic() + limits.seconds
                texts[key.data] += piece
                if key.data == "errors":
                    texts["errors"] = texts["errors"][-ERROR_BYTES:]
                elif len(texts[key.data]) > limits.output_bytes:
                    return texts, "output"
    return texts, "exit"


def _end(jail: subprocess.Popen[bytes]) -> None:
    """Let the jail end by SIGTERM, so that it can clean up, and kill it when it does not."""
    if jail.poll() is None:
        jail.send_signal(signal.SIGTERM)
        try:
            jail.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            jail.kill()
            jail.wait()
