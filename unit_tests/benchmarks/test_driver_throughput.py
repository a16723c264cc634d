"""What the driver's benchmark pushes through is all there: nothing but groups of equal rewards is left out."""

from __future__ import annotations

from benchmarks.driver_throughput import Driver, Shape, measure


def test_every_response_is_packed_or_filtered() -> None:
    driver = Driver(Shape(groups=4, responses=3, prompt_tokens=5, response_tokens=8))
    done = sum(driver.step() for _ in range(5))
    assert driver.packed == 5 * 4 * 3
    waiting = 3 * (len(driver.finished) + driver.admission.running)
    assert driver.version == 5
    assert done >= driver.packed + waiting
    assert done <= 3 * driver.count
    assert all(seconds > 0 for seconds in driver.seconds.values())


def test_rate_and_memory_are_printed(capsys) -> None:
    measure(Shape(groups=2, responses=2, prompt_tokens=3, response_tokens=4), trajectories=40)
    printed = capsys.readouterr().out
    assert "trajectories/s; target 20,000" in printed
    assert printed.count("\n") == 1 + 10 + 4 + 1
