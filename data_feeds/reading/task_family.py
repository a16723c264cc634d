"""Import only the part of reasoning_gym that holds a task. All of it takes several seconds: one task needs matplotlib."""

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
    """Return reasoning_gym's registry of tasks, in which the task is, or all there are when no such task is found."""
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
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _family_of(task: str) -> str | None:
    """Return the sub-package with the one file that declares the task; None when no file or several do."""
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
        del sys.modules[PACKAGE]  # whoever imports the whole later gets the whole
