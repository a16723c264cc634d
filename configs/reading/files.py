"""Read one job from its YAML file and the files that this one extends: its values, and the place of each of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from configs.reading import yaml_text
from configs.reading.yaml_text import Location
from plugins.nearest import nearest

EXTENDS = "extends"
MOST_FILES = 20  # that extend one another
Origins = dict[Location, str]


def read_job(path: Path) -> tuple[dict[str, Any], Origins]:
    """Return the file's top-level block laid over that of the file it `extends`, and the place of each key ("line 3").

    Blocks merge key by key; lists, texts and numbers replace. The algorithm block replaces as a whole when it names
    another method, and a block that names a `function` when it names another one, because their parameters differ.

    Raises:
        ValueError: a file is missing, unreadable, empty or no block of keys, or files extend one another in a circle.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that no file can have
        raise ValueError(_missing(path, "--config "))
    return _read(path, path, ())


def _read(path: Path, job: Path, below: tuple[Path, ...]) -> tuple[dict[str, Any], Origins]:
    """Return what `read_job` does for one file. `below` are the files on the way from the job to this one."""
    block, lines = _one_file(path)
    origins = {place: f"line {line}" if path == job else f"line {line} of {path}" for place, line in lines.items()}
    if EXTENDS not in block:
        return block, origins
    named, where = block.pop(EXTENDS), f"{path}: {EXTENDS} (line {lines[(EXTENDS,)]})"
    if not isinstance(named, str) or not named:
        raise ValueError(f"{where}: must be the path of one YAML file; given {named!r}")
    above = path.parent / named
    chain = (*below, path)
    if not os.path.isfile(above):
        raise ValueError(f"{where}: {_missing(above)}")
    if len(chain) == MOST_FILES:
        raise ValueError(f"{where}: more than {MOST_FILES} files extend one another; put their keys into fewer")
    if above.resolve() in [file.resolve() for file in chain]:
        raise ValueError(f"{where}: the files extend one another in a circle: {' -> '.join(map(str, (*chain, above)))}")
    base, base_origins = _read(above, job, chain)
    return _laid_over(base, base_origins, block, origins, ())


def _laid_over(
    base: dict[Any, Any], base_origins: Origins, block: dict[Any, Any], origins: Origins, at: Location
) -> tuple[dict[Any, Any], Origins]:
    """Return a block's keys laid over another's, and their places. Copy the blocks, because YAML may share them."""
    merged, merged_origins = dict(base), dict(base_origins)
    for key, value in block.items():
        place = (*at, key)
        if isinstance(value, dict) and isinstance(base.get(key), dict) and not _names_another(place, base[key], value):
            merged[key], merged_origins = _laid_over(base[key], merged_origins, value, origins, place)
        else:
            merged[key] = value
            merged_origins = {known: text for known, text in merged_origins.items() if known[: len(place)] != place}
            merged_origins |= {known: text for known, text in origins.items() if known[: len(place)] == place}
        if place in origins:
            merged_origins[place] = origins[place]
    return merged, merged_origins


def _names_another(place: Location, base: dict[Any, Any], block: dict[Any, Any]) -> bool:
    key = "name" if place == ("algorithm",) else "function"
    return key in block and block[key] != base.get(key)


def _one_file(path: Path) -> tuple[dict[str, Any], dict[Location, int]]:
    try:
        value, lines = yaml_text.parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise ValueError(f"{path}: {what}; a configuration is a block of keys, see configs/grpo.yaml")
    return value, lines


def _missing(path: Path, what: str = "") -> str:
    if os.path.isdir(path):
        return f"{what}{path}: is a folder; give a .yaml file"
    if os.path.exists(path):
        return f"{what}{path}: is a pipe or device, which can be read only once; save its text as a .yaml file"
    siblings = sorted(str(file) for file in path.parent.glob("*.yaml")) if os.path.isdir(path.parent) else []
    guess = nearest(str(path), siblings)
    hint = f"; did you mean {guess}?" if guess else f"; files there: {', '.join(siblings)}" if siblings else ""
    return f"{what}{path}: there is no such file{hint}"
