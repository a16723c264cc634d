"""Whatever is wrong with what a user gives is accepted or ends in one message; nothing else is raised, nothing hangs.

`make soak` tries thousands: `pytest -m soak unit_tests/orchestration/start/test_start_mutations.py -s` prints how many were handled.
"""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_feeds.chat import template
from unit_tests.mutations import try_configuration, try_model_folder, try_row, try_template
from unit_tests.tiny_model import write_tiny_model

PATIENCE_SECONDS = 30


class HangError(BaseException):
    """No handler for exceptions catches this one."""


def hang(*_: Any) -> None:
    raise HangError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutations")
    write_tiny_model(folder / "model")
    return folder


@pytest.mark.parametrize(
    ("attempt", "tries"),
    [
        (try_configuration, 60), (try_row, 60), (try_template, 12), (try_model_folder, 12),
        *(
            pytest.param(attempt, tries, marks=pytest.mark.soak)
            for attempt, tries in (
                (try_configuration, 2000), (try_row, 1000), (try_template, 200), (try_model_folder, 200),
            )
        ),
    ],
)  # fmt: skip
def test_every_input_is_handled(
    attempt: Callable[[random.Random, Path], None], tries: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.3)
    before = signal.signal(signal.SIGALRM, hang)
    failures, accepted = [], 0
    try:
        for seed in range(tries):
            signal.alarm(PATIENCE_SECONDS)
            try:
                attempt(random.Random(seed), folder)
                accepted += 1
            except ValueError as error:
                if not str(error).strip():
                    failures.append(f"seed {seed}: an empty message")
            except (Exception, HangError) as error:  # noqa: BLE001 that nothing else is raised is the test
                failures.append(f"seed {seed}: {''.join(traceback.format_exception(error)[-3:])}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    print(f"\n{attempt.__name__}: {tries - len(failures)} of {tries} handled, {accepted} of them accepted")
    assert not failures, "\n".join(failures[:5])
