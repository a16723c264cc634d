"""Paid when the response has the form that was asked for."""

from __future__ import annotations

import re

from plugins.lookup import checked_by
from records.rollout import Trajectory


def _one_way_to_say_it(pattern: str | None, tags: list[str] | None) -> None:
    if (pattern is None) == (tags is None):
        raise ValueError("params: name either a pattern or tags")
    if tags is not None and (not tags or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags)):
        raise ValueError(f"params.tags: {tags} must be at least one name, without the angle brackets")
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"params.pattern: {pattern!r} is no regular expression: {error}") from error


@checked_by(_one_way_to_say_it)
def format_match(trajectory: Trajectory, pattern: str | None = None, tags: list[str] | None = None) -> float:
    """1 when the response as a whole has the asked-for form, else 0.

    `pattern` is a regular expression for it, from the first character to the last; a dot also matches a line break,
    so that `<think>.+</think>.+` spans lines. `tags: [think, answer]` asks for `<think>...</think><answer>...</answer>`:
    each once, in this order, neither empty nor holding another of these tags, with nothing but white space around them.
    """
    expression = _tagged(tags) if pattern is None else pattern
    return float(re.fullmatch(expression, trajectory.response, re.DOTALL) is not None)


def _tagged(tags: list[str] | None) -> str:
    assert tags, "the rule on the parameters lets one of the two through"
    no_tag = rf"(?:(?!</?(?:{'|'.join(tags)})>).)"
    return r"\s*" + r"\s*".join(rf"<{tag}>\s*(?=\S){no_tag}+</{tag}>" for tag in tags) + r"\s*"
