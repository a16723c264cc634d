"""Trainer ranks as plain processes that live for the whole test session: importing DeepSpeed takes longer than most tests.

A piece of work is a module with `run(folder, rank, ranks)`, executed by all ranks together, with the process group set up.
"""

import importlib
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from pathlib import Path

from orchestration.cluster.devices import free_port

TIMEOUT_SECONDS = 300


class Ranks:
    """`count` processes in one process group on this machine's CPU."""

    def __init__(self, count: int) -> None:
        port, context = free_port(), multiprocessing.get_context("spawn")
        self.members = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count, port), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def run(self, module: str, folder: Path) -> None:
        """Raises AssertionError with its traceback when a rank fails, dies or does not come back; all of them end then, since
        the others may wait for it for ever."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.members)}
        for connection in waiting:
            connection.send((module, str(folder)))
        until = time.monotonic() + TIMEOUT_SECONDS
        failure = None
        while waiting and failure is None:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                failure = f"ranks {sorted(waiting.values())} did not come back within {TIMEOUT_SECONDS} s"
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answer = connection.recv()
                except EOFError:
                    answer = f"died with exit code {self.members[rank][0].exitcode}"
                failure = failure or (None if answer is None else f"rank {rank}: {answer}")
        if failure is not None:
            for process, _ in self.members:
                process.kill()
            raise AssertionError(failure)

    def close(self) -> None:
        for process, connection in self.members:
            connection.close()
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(connection, rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
    )  # fmt: skip
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            module, folder = connection.recv()
        except EOFError:
            return
        try:
            from deepspeed.utils import logger

            logger.setLevel("ERROR")
            importlib.import_module(module).run(folder, rank, ranks)
            connection.send(None)
        except BaseException:  # noqa: BLE001 whatever it is, the test is to show it
            connection.send(traceback.format_exc())


def _end_with_parent(parent: int) -> None:
    """A rank may wait for ever in a collective; not longer than the tests that started it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
