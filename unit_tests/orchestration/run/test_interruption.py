"""The first signal is noted, the next one and the end of the grace leave, and handlers are put back."""

import os
import signal

import pytest

from orchestration.run.interruption import finishing_first
from unit_tests.waiting import wait_for


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_leaves(number: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), finishing_first(60) as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        assert asked()
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_grace_ends() -> None:
    with pytest.raises(KeyboardInterrupt), finishing_first(0.05) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        wait_for(lambda: False, "the grace ends")


def test_without_a_grace_the_first_signal_leaves() -> None:
    with pytest.raises(KeyboardInterrupt), finishing_first(0):
        os.kill(os.getpid(), signal.SIGINT)
