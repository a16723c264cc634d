"""Load a checked configuration from a YAML file and `--set` overrides, and write one back to YAML.

    config = load("configs/grpo.yaml", RLConfig, overrides=["train.steps=10"])

Every mistake ends in one ConfigError that lists all problems found, each with its dotted key and the remedy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from configs.blocks.block import Block
from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import Algorithm, RLConfig
from configs.reading import yaml_text
from configs.reading.files import EXTENDS, read_job
from configs.reading.messages import problems
from configs.rules.every_job import problems_of
from configs.rules.schedule import completed

if TYPE_CHECKING:
    from algs.method import PolicyMethod
    from configs.blocks.supervised import SLConfig

Config = TypeVar("Config", bound=Block)
Problems = list[tuple[yaml_text.Location, str]]
FROM_COMMAND_LINE = "from the command line"  # in place of a line


class ConfigError(ValueError):
    """The error of a wrong configuration, file or machine: one message with every problem and its remedy."""


def load(
    path: str | os.PathLike[str], schema: type[Config], overrides: Sequence[str] = (), run_dir: str | None = None
) -> Config:
    """Return a checked configuration from a YAML file.

    Args:
        path: the YAML file; one that it `extends` is read first.
        schema: RLConfig, SLConfig or EvalConfig.
        overrides: "a.b.c=value" each, applied in order; values are YAML, list items go by index
            (data.sources.0.size=50).
        run_dir: the run's directory; replaces run.dir and run.name.

    The current directory is put on sys.path, so that users' own dotted paths (my_lab.rewards:score) resolve from there.

    Raises:
        ConfigError: the file is missing or no YAML, or the configuration is refused.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a user's folder cannot hide one of ours
    try:
        raw, origins = read_job(Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    found: Problems = []
    for override in overrides:
        found += _override(raw, override, origins)
    if run_dir is not None:
        _set_run_dir(raw, run_dir, origins)
    try:
        config, refusals = _ruled(schema.model_validate(raw))
        found += refusals
    except ValidationError as error:
        found += problems(error, schema, raw)
    if found:
        raise _config_error(str(path), found, origins)
    return config


def checked(config: Config) -> Config:
    """Return a configuration that was made in code as `load` would return it: completed, and checked by every rule.

    Raises:
        ConfigError: a rule refuses it.
    """
    config, refusals = _ruled(config)
    if refusals:
        raise _config_error("the configuration", refusals, {})
    return config


def _ruled(config: Config) -> tuple[Config, Problems]:
    """Return the configuration with what the schedule adds to it, and what the rules on several keys refuse."""
    whole: Any = completed(config) if isinstance(config, RLConfig) else config
    return whole, [(_location(key), f"{key}: {text}") for key, text in problems_of(whole)]


def _location(key: str) -> yaml_text.Location:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def _set_run_dir(raw: dict[str, Any], run_dir: str, origins: dict[yaml_text.Location, str]) -> None:
    folder = Path(run_dir)
    if folder.name in ("", ".."):  # "." and ".." name a folder only once resolved
        folder = folder.resolve()
    block = raw.get("run")
    raw["run"] = {**(block if isinstance(block, dict) else {}), "dir": str(folder.parent), "name": folder.name}
    origins |= {("run", "dir"): FROM_COMMAND_LINE, ("run", "name"): FROM_COMMAND_LINE}


def _override(raw: dict[str, Any], override: str, origins: dict[yaml_text.Location, str]) -> Problems:
    """Put one `a.b.c=value` into the raw configuration, in place; the schema checks later whether the key exists."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return [((), f"--set {override}: must be key=value, e.g. --set train.steps=10")]
    if keys == [EXTENDS]:
        return [((), f"--set {override}: {EXTENDS} can only stand in a file; give that file as --config")]
    try:
        value, _ = yaml_text.parse(text, f"--set {path}")
    except ValueError as error:
        return [((), str(error))]
    node: Any = raw
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        here = ".".join(keys[:depth])
        if isinstance(node, list):
            if not (key.isdecimal() and int(key) < len(node)):
                return [
                    ((), f"--set {override}: {here} is a list of {len(node)}; give an index from 0 to {len(node) - 1}")
                ]
            place: Any = int(key)
        elif isinstance(node, dict):
            place = key
            if not is_last and node.get(key) is None:
                node[key] = {}
        else:
            return [((), f"--set {override}: {here} is {node!r}, which has no key '{key}'")]
        if is_last:
            node[place] = value
            location = _location(path.strip())
            for below in [known for known in origins if known[: len(location)] == location]:
                del origins[below]  # what stood in the file there is replaced
            origins[location] = FROM_COMMAND_LINE
        else:
            node = node[place]
    return []


def _config_error(path: str, found: Problems, origins: dict[yaml_text.Location, str]) -> ConfigError:
    texts = []
    for location, text in found:
        origin = origins.get(location) if location else None
        texts.append(f"{text} ({origin})" if origin else text)
    if len(texts) == 1:
        return ConfigError(f"{path}: {texts[0]}")
    return ConfigError("\n  ".join([f"{path}: {len(texts)} problems", *texts]))


def to_yaml(config: Block) -> str:
    """Return the configuration as YAML, with every default; `load` reads it back equal."""
    return yaml_text.dump(config.model_dump())


def method_for(config: RLConfig) -> PolicyMethod:
    """Return the configured method with its parameters, e.g. a GRPO."""
    method: PolicyMethod = config.algorithm.make_method()
    return method


def method_from_text(name: str, settings: Sequence[str] = ()) -> PolicyMethod:
    """Return a method with parameters from a command line, "clip_high=0.28" each; values are YAML.

    Raises:
        ConfigError: there is no such method or parameter, or a value is refused.
    """
    raw: dict[str, Any] = {"name": name}
    found = [problem for setting in settings for problem in _override(raw, setting, {})]
    try:
        block = Algorithm.model_validate(raw)
    except ValidationError as error:
        found += problems(error, Algorithm, raw)
    if found:
        raise ConfigError("; ".join(text.removeprefix("name: ") for _, text in found))
    method: PolicyMethod = block.make_method()
    return method


def run_directory(config: RLConfig | SLConfig | EvalConfig) -> Path:
    """Return the path <run.dir>/<run.name>."""
    return Path(config.run.dir) / config.run.name
