"""How Ray is started."""

from __future__ import annotations

import pytest
import ray

from orchestration.cluster.ray_session import init_ray

TIMED_OUT = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


@pytest.mark.parametrize(
    ("failures", "attempts", "raised"),
    [
        ([], 1, None),
        ([TIMED_OUT], 2, None),
        ([TIMED_OUT, TIMED_OUT], 2, TIMED_OUT),
        (["no such host"], 1, "no such host"),
    ],
)
def test_ray_is_given_a_second_attempt_to_start_in_time(
    monkeypatch: pytest.MonkeyPatch, failures: list[str], attempts: int, raised: str | None
) -> None:
    """Only that: anything else that keeps it from starting would be met again."""
    asked = []

    def init(**options: str) -> None:
        asked.append(options)
        if failures:
            raise Exception(failures.pop(0))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append({}))  # this process may have a Ray of other tests
    if raised is None:
        init_ray(address="local")
    else:
        with pytest.raises(Exception, match=raised):
            init_ray(address="local")
    assert asked == [{"address": "local"}, {}, {"address": "local"}][: 2 * attempts - 1]
