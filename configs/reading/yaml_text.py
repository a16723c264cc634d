"""YAML without YAML 1.1's traps: numbers are read as in YAML 1.2 (3e-5 is a number, 010 is ten, 1:30 is text), a key
given twice is refused, and every value knows its line."""

from __future__ import annotations

import re
from typing import Any

import yaml

Location = tuple[str | int, ...]
UNUSUAL_LINE_ENDS = "\x85\u2028\u2029\ufeff"  # survive in double quotes only

MOST_VALUES = 100_000  # of one file, each alias counted with all that it stands for

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = {
    _INT: re.compile(r"^[-+]?(?:[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
    ),
}


class _Loader(yaml.SafeLoader):
    """Load safe YAML: read numbers as YAML 1.2 does, and refuse duplicate keys."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in _NUMBERS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text = str(self.construct_scalar(node)).replace("_", "").lower()
        if node.tag == _FLOAT:
            return float(re.sub(r"\.(?=inf|nan)", "", text))
        return int(text, {"0x": 16, "0o": 8}.get(text.lstrip("+-")[:2], 10))

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
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_constructor(_tag, _Loader.construct_number)
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
    _Dumper.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))  # YAML 1.1's stay: both get quotes


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
    except _TooManyValuesError:
        raise ValueError(
            f"{source}: it stands for more than {MOST_VALUES:,} values, aliases '*' written out; use fewer"
        ) from None
    except RecursionError:
        raise ValueError(
            f"{source}: a value contains itself (an anchor '&' used inside its own block), or blocks are nested too deep"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{source}{where}: no valid YAML: {_plain(error)}") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # no value: 2024-13-45, or !!bool abc
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


class _TooManyValuesError(Exception):
    """Say that a file holds more than MOST_VALUES values. It passes by the handlers of YAML's own errors."""


def _note_lines(node: yaml.Node, location: Location, lines: dict[Location, int]) -> None:
    if len(lines) > MOST_VALUES:
        raise _TooManyValuesError
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
