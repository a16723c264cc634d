"""The base of every configuration block, and the block of a function that is named in the configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from plugins.kinds import find
from plugins.parameters import checked, parameters_of


class Block(BaseModel):
    """A block of keys: no others are taken, types are strict (true is no 1, "8" is no 8), values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Named(Block):
    """One of our functions or your own, with its arguments. `function: rloo` may be written as just `rloo`."""

    kind: ClassVar[str]  # of plugins.kinds.KINDS
    function: str = Field(
        min_length=1, description="One of ours by its name, or your own by dotted path (`my_lab.parts:mine`)."
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments given to the function.")

    @model_validator(mode="before")
    @classmethod
    def _just_a_name(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    def bound(self) -> Callable[..., Any]:
        """Return the function with its parameters given. It can be pickled.

        Raises:
            ValueError: it is not found.
        """
        return functools.partial(find(self.kind, self.function), **self.params)


class Component(Named):
    """A function in algs/ or your own. It is found, and its parameters are checked, as soon as it is named."""

    params: dict[str, Any] = Field(
        default_factory=dict,
        validate_default=True,
        description="Keyword arguments given to the function.",
    )

    @field_validator("params")
    @classmethod
    def _fit(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return checked(cls.kind, info.data["function"], given) if "function" in info.data else given

    @field_validator("function")
    @classmethod
    def _exists(cls, name: str) -> str:
        find(cls.kind, name)
        return name


def parameter_fields(kind: str, name: Any) -> dict[str, Any]:
    """Return the parameters of what a raw block names, as pydantic fields; empty when nothing of that name is found."""
    if not isinstance(name, str):
        return {}
    try:
        return dict(parameters_of(find(kind, name)).model_fields)
    except ValueError:  # reported as a problem of the name already
        return {}


def error_at(key: str, text: str, given: Any) -> ValidationError:
    """Return the error of one key, to be raised by a validator of the key's block."""
    error = PydanticCustomError("rule", "{text}", {"text": text})
    return ValidationError.from_exception_data("block", [InitErrorDetails(type=error, loc=(key,), input=given)])


def located(path: str) -> str:
    """Return a path that names a folder here in full, and a hub name as it is. Other processes, which may have other
    current directories, get nothing else."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path
