"""YAML without YAML 1.1's traps: 3e-5 is a number, a key given twice is refused, and every value knows its line."""

from __future__ import annotations

import re
from typing import Any

import yaml

Location = tuple[str | int, ...]
UNUSUAL_LINE_ENDS = "\x85\u2028\u2029\ufeff"  # survive in double quotes only

_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Load safe YAML: read 3e-5 as a number and refuse duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                line = seen[key.value].line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' is given twice (first on line {line})", key.start_mark
                )
            seen[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Write what `_Loader` reads: texts that look like numbers get quotes, shared values are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if any(mark in text for mark in UNUSUAL_LINE_ENDS) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))


def parse(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    """Return the value of a YAML text, and the line (from 1) of every key and list item in it.

    Raises:
        ValueError: it is no YAML; the message names source, line and column.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{source}, line {line}: no valid YAML: a character that may not be in it") from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[Location, int] = {}
        _note_lines(node, (), lines)
        return loader.construct_document(node), lines
    except RecursionError:
        raise ValueError(f"{source}: a value contains itself (an anchor '&' used inside its own block)") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{source}{where}: no valid YAML: {_plain(error)}") from error
    except ValueError as error:  # a scalar that looks like a date or number and is none, e.g. 2024-13-45
        raise ValueError(f"{source}: no valid YAML value: {error}; put quotes around it") from error
    finally:
        loader.dispose()


def _plain(error: yaml.MarkedYAMLError) -> str:
    """Return the parser's complaint, with its usual cause."""
    text = ", ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in text:
        return f"{text} (indent with spaces, not tabs)"
    if "mapping values are not allowed" in text:
        return f"{text} (a ':' inside a text needs quotes around the text; or the indentation is off)"
    return text


def _note_lines(node: yaml.Node, location: Location, lines: dict[Location, int]) -> None:
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[(*location, key.value)] = key.start_mark.line + 1
                _note_lines(value, (*location, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(value, (*location, index), lines)


def dump(value: Any) -> str:
    """Return plain values as YAML text, keys in their order, that `parse` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
