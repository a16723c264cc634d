"""What keeps a job on one machine to itself. That nothing listens elsewhere is seen in e2e/test_commands.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.cluster.loopback import init_method, keep_token_private


def test_the_token_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".ray" / "auth_token"
    keep_token_private()
    token = path.read_text()
    assert len(token) == 64 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # as Ray makes it
    keep_token_private()
    assert path.read_text() == token and path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["auth_token"]


@pytest.mark.parametrize(
    ("variables", "method"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, "loopback://"),
        ({"MASTER_ADDR": "192.0.2.7"}, None),
        ({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, None),
    ],
)
def test_ranks_of_one_machine_meet_on_loopback_unless_torchrun_brought_them_together(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], method: str | None
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # so that nothing of it outlives the test
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert init_method() == method
