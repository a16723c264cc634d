"""Validation errors as a user reads them: the dotted key, what is wrong with the value given, and the remedy."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from configs.blocks.block import Component, parameter_fields
from configs.blocks.rl import Algorithm
from configs.reading.renamed import RENAMED_KEYS
from configs.reading.yaml_text import Location
from plugins.nearest import nearest
from plugins.wording import shown, text_of


def problems(error: ValidationError, schema: type[BaseModel], raw: Any) -> list[tuple[Location, str]]:
    """Return each problem as (location, text); the text begins with the dotted key."""
    found = []
    for item in error.errors(include_url=False):
        location: Location = item["loc"]
        if location and location[-1] == "[key]":
            location = location[:-1]
        found.append(
            (location, f"{_dotted(location) or 'the configuration'}: {_text(dict(item), location, schema, raw)}")
        )
    return found


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _text(item: dict[str, Any], location: Location, schema: type[BaseModel], raw: Any) -> str:
    """Return what is wrong, with what only the schema knows: the keys that exist, and the purpose of a missing one."""
    kind = item["type"]
    if kind == "extra_forbidden" and _dotted(location) in RENAMED_KEYS:
        return f"is now called {RENAMED_KEYS[_dotted(location)]}; rename the key"
    if kind == "extra_forbidden":
        return f"unknown key; {_suggestion(location, schema, raw)}"
    if kind == "missing":
        about = _about(fields_at(schema, location[:-1], raw).get(str(location[-1])))
        return f"is missing: {about}" if about else "is missing"
    if kind in ("model_type", "model_attributes_type"):
        keys = ", ".join(fields_at(schema, location, raw))
        return f"must be a block of keys ({keys}); given {shown(item['input'])}"
    return text_of(item)


def _about(field: FieldInfo | None) -> str:
    """Return the purpose of a key: its description, or the first line of its block's docstring."""
    block = model_of(field.annotation) if field else None
    about = (field.description if field else None) or (inspect.getdoc(block) if block else None) or ""
    return about.partition("\n")[0]


def _suggestion(location: Location, schema: type[BaseModel], raw: Any) -> str:
    """Return where the unknown key probably belongs: a near name in its block, the same or a near name elsewhere."""
    block, key = location[:-1], str(location[-1])
    here = list(fields_at(schema, block, raw))
    if guess := nearest(key, here):
        return f"did you mean {_dotted((*block, guess))}?"
    elsewhere: dict[str, list[str]] = {}  # several blocks may have a key of that name
    for path in dotted_keys(schema):
        if path.rpartition(".")[0] != _dotted(block):
            elsewhere.setdefault(path.rpartition(".")[2], []).append(path)
    if guess := nearest(key, elsewhere):
        return f"did you mean {' or '.join(elsewhere[guess])}?"
    return f"keys here: {', '.join(here)}" if here else "no keys are known here"


def fields_at(schema: type[BaseModel], location: Location, raw: Any) -> dict[str, Any]:
    """Return the pydantic fields of the block at a location, or the parameters of the method or function that the raw
    configuration names there; an empty dict when there is none."""
    model: type[BaseModel] | None = schema
    node = raw
    for part in location:
        if model is not None and issubclass(model, Component) and part == "params":
            return parameter_fields(model.kind, node.get("function") if isinstance(node, dict) else None)
        if isinstance(part, str):
            field = model.model_fields.get(part) if model else None
            model = model_of(field.annotation) if field else None
            node = node.get(part) if isinstance(node, dict) else None
        else:
            node = node[part] if isinstance(node, list) and part < len(node) else None
    if model is None:
        return {}
    if model is Algorithm:
        name = node.get("name") if isinstance(node, dict) else None
        return {"name": model.model_fields["name"], **parameter_fields("method", name)}
    return dict(model.model_fields)


def model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the block inside an annotation such as Train, list[Source] or Model | None; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := model_of(inner))), None)


def dotted_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every key of a schema by its dotted path; list items are left out of the path."""
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(f"{prefix}{name}")
        if inner := model_of(field.annotation):
            keys += dotted_keys(inner, f"{prefix}{name}.")
    return keys
