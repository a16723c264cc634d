"""Runs a program that nobody has read: away from network, files, secrets and other processes, within limits.

What it is kept in is rewards/sandbox/jail.py's; here is what it is given, and what comes back.
"""

from __future__ import annotations

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
RESULT_FD = "RESULT_FD"  # variable of the command: where it may write besides stdout
START_SECONDS = 10.0  # for the jail itself, on a busy machine
END_SECONDS = 2.0
ERROR_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """Seconds are of the clock, and of the processor per process; memory, files and their number are per process,
    the scratch folder (in memory, where there are namespaces) is for all together."""

    seconds: float = 5.0
    memory_mb: int = 512
    processes: int = 8  # threads count
    scratch_mb: int = 64
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Ran:
    """How a program ended, and what it wrote."""

    ended: Literal["exit", "time", "output"]
    exit_code: int | None  # minus the signal's number when one killed it; None unless ended is "exit"
    output: bytes
    result: bytes  # what was written to the result pipe
    errors: str  # the last of stderr
    seconds: float


def run(
    command: list[str], files: dict[str, str], given: bytes = b"", limits: Limits = Limits(), *, isolation: Isolation
) -> Ran:
    """Run a command on the given standard input in a folder with the given text files; all is gone afterwards.

    With `limits_only` there is no isolation: the program can read this user's files and processes, use the network and
    leave processes behind. It stops accidents, not attacks.

    Raises:
        RuntimeError: the sandbox does not stand; nothing has run.
    """
    ways = {name: os.pipe() for name in ("output", "errors", "result", "status")}
    settings = _settings(command, files, limits, isolation, ways["result"][1])
    inputs = [_file_of(json.dumps(settings).encode()), _file_of(given)]
    started = time.monotonic()
    try:
        jail = subprocess.Popen(
            [sys.executable, "-I", "-S", JAIL, str(inputs[0]), str(ways["status"][1])],
            stdin=inputs[1],
            stdout=ways["output"][1],
            stderr=ways["errors"][1],
            pass_fds=[inputs[0], ways["status"][1], ways["result"][1]],
            env={},
        )
    finally:
        for fd in (*inputs, *(theirs for _, theirs in ways.values())):
            os.close(fd)
    try:
        heard, ended = _heard({name: ours for name, (ours, _) in ways.items()}, limits)
    finally:
        _end(jail)
        for ours, _ in ways.values():
            os.close(ours)
    seconds = time.monotonic() - started
    errors = heard["errors"].decode(errors="replace")
    told: dict[str, Any] = {}
    for line in heard["status"].splitlines():
        told = {**json.loads(line), **told}
    if "error" in told or "started" not in told or (ended == "exit" and "exit" not in told):
        why = told.get("error") or f"its jail did not start the program ({ended}, {jail.returncode}): {errors[-300:]}"
        raise RuntimeError(f"the sandbox does not stand: {why}")
    return Ran(ended, told["exit"] if ended == "exit" else None, heard["output"], heard["result"], errors, seconds)


@functools.lru_cache
def check(isolation: Isolation) -> None:
    """Raises ValueError, with the ways out, when this machine does not let us isolate programs as asked."""
    try:
        ran = run(
            [sys.executable, "-I", "-c", "print(6 * 7)"], {}, limits=Limits(seconds=START_SECONDS), isolation=isolation
        )
    except RuntimeError as error:
        raise ValueError(
            f"programs cannot be isolated on this machine: {error}. Allow unprivileged user namespaces (sysctl "
            "user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns; in a container also its seccomp "
            "profile), or accept programs that can read your files and use the network: params.isolation: limits_only"
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
    if isolation == "namespaces":  # elsewhere all processes of the user would count
        bounds["RLIMIT_NPROC"] = limits.processes + 2  # the jail's own two, where they are the same user
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
            "PYTHONHASHSEED": "0",  # a program that prints a set is judged alike every time
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            RESULT_FD: str(result_fd),
        },
    }


def _outermost(paths: Iterable[str]) -> list[str]:
    """Those that are not within another."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def _file_of(content: bytes) -> int:
    """A file in memory, to be read from its start. Unlike a pipe it takes any amount while nobody reads."""
    fd = os.memfd_create("sandbox", 0)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _heard(ways: dict[str, int], limits: Limits) -> tuple[dict[str, bytes], Any]:
    """Read all pipes until their ends, the time or too much output; of stderr the last is kept. The program's time
    counts from its start."""
    heard = dict.fromkeys(ways, b"")
    deadline = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as selector:
        for name, fd in ways.items():
            selector.register(fd, selectors.EVENT_READ, name)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return heard, "time"
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                if key.data == "status" and piece and not heard["status"]:
                    deadline = time.monotonic() + limits.seconds
                heard[key.data] += piece
                if key.data == "errors":
                    heard["errors"] = heard["errors"][-ERROR_BYTES:]
                elif len(heard[key.data]) > limits.output_bytes:
                    return heard, "output"
    return heard, "exit"


def _end(jail: subprocess.Popen[bytes]) -> None:
    """Ask it to end, so that it can clean up, then make it."""
    if jail.poll() is None:
        jail.send_signal(signal.SIGTERM)
        try:
            jail.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            jail.kill()
            jail.wait()
