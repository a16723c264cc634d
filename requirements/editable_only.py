"""The build backend of pyproject.toml: setuptools, for editable installations only.

FeynRL runs from its checkout: methods, rewards and configurations are files that users read, change and add to. An ordinary
installation would copy packages with names such as `configs` and `eval` among everyone else's, without the YAML files.
"""

from __future__ import annotations

from typing import NoReturn

from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
)

__all__ = ["build_editable", "get_requires_for_build_editable", "prepare_metadata_for_build_editable"]
REFUSAL = "FeynRL runs from its checkout and is not copied into an environment: use `pip install -e .` (docs/guide/INSTALL.md)"


def build_wheel(*_: object, **__: object) -> NoReturn:
    """Refuse an installation that is not editable."""
    raise SystemExit(f"error: {REFUSAL}")


def build_sdist(*_: object, **__: object) -> NoReturn:
    """Refuse to pack the checkout."""
    raise SystemExit(f"error: {REFUSAL}")
