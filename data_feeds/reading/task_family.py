"""Import only the part of reasoning_gym that holds a task, because the whole package takes several seconds."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "reasoning_gym"


def task_classes(task: str) -> dict[str, Any]:
    """Return reasoning_gym's registry of tasks. It holds the task, or all tasks when there is no such task."""
    family = None if PACKAGE in sys.modules else _family_of(task)
    if family is None:
        importlib.import_module(PACKAGE)
    else:
        _import_alone(family)
    registry: dict[str, Any] = importlib.import_module(f"{PACKAGE}.factory").DATASETS
    if task not in registry and family is not None:
        importlib.import_module(PACKAGE)
    return registry


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _family_of(task: str) -> str | None:
    """Return the sub-package whose file declares the task; None when no file or more than one does."""
    declares = re.compile(rf'^DATASET_NAME = "{re.escape(task)}"$', re.MULTILINE)
    families = [
        file.parent.name for file in _folder().glob("*/*.py") if declares.search(file.read_text(encoding="utf-8"))
    ]
    return families[0] if len(families) == 1 else None


def _import_alone(family: str) -> None:
    """Import a sub-package without running its parent's __init__, which imports all the others."""
    parent = ModuleType(PACKAGE)
    parent.__path__ = [str(_folder())]
    sys.modules[PACKAGE] = parent
    try:
        importlib.import_module(f"{PACKAGE}.{family}")
    finally:
        del sys.modules[PACKAGE]  # so that a later import of the package gets all of it
