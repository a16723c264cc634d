"""The base of every configuration block, and the block of a function that is named in the configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Block(BaseModel):
    """Keys are closed, types are strict (true is no 1, "8" is no 8), values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Named(Block):
    """One of our functions or your own, with its arguments. `function: rloo` may be written as just `rloo`."""

    function: str = Field(
        min_length=1, description="One of ours by its name, or your own by dotted path (`my_lab.parts:mine`)."
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments given to the function.")

    @model_validator(mode="before")
    @classmethod
    def _just_a_name(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value
