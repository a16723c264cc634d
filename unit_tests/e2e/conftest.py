"""What the tests of the real stack share: a model, and actors that are started once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from unit_tests.e2e.engine_pair import Pair
    from unit_tests.e2e.shared_stack import SharedStack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A model taught by the project's own trainer; kept between sessions, since making it is deterministic."""
    kept = ROOT / "models" / "tiny-sorter"
    kept.parent.mkdir(exist_ok=True)
    with FileLock(f"{kept}.lock"):  # two processes run tests
        if not (kept / "config.json").exists():
            command = [sys.executable, "-m", "data_prep.tiny_sorter_model", "--out", str(kept)]
            made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
            assert made.returncode == 0, made.stderr[-3000:]
    return kept


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a user's own modules, which every process of the shared stack can import."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder


@pytest.fixture(scope="session")
def stack(tiny_model: Path, user_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStack]:
    """Ray, one engine and two trainer ranks, started once for all tests."""
    from unit_tests.e2e.shared_stack import started_stack

    with started_stack(tmp_path_factory.mktemp("stack"), tiny_model) as started:
        yield started


@pytest.fixture(scope="session")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One engine without Ray, and the model whose weights it should hold, started once for all tests."""
    from unit_tests.e2e.engine_pair import Pair

    pair = Pair(
        tmp_path_factory.mktemp("engine"),
        worker_extension_cls="unit_tests.e2e.forgetful_receiver.ForgetfulExtension",
        weight_transfer_config={"backend": "forgetful"},
    )
    yield pair
    pair.close()
