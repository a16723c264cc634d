"""Reward responses that have the configured form."""

from __future__ import annotations

import re

from plugins.marks import checked_by
from records.rollout import Trajectory


def _pattern_or_tags(pattern: str | None, tags: list[str] | None) -> None:
    if (pattern is None) == (tags is None):
        raise ValueError("params: name either a pattern or tags")
    if tags is not None and (not tags or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags)):
        raise ValueError(f"params.tags: {tags} must be at least one name, without the angle brackets")
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"params.pattern: {pattern!r} is no regular expression: {error}") from error


@checked_by(_pattern_or_tags)
def format_match(trajectory: Trajectory, pattern: str | None = None, tags: list[str] | None = None) -> float:
    """Return 1 when the response as a whole has the configured form, else 0.

    `pattern` is a regular expression for it, from the first character to the last; a dot also matches a line break, so
    that `<think>.+</think>.+` spans lines. `tags: [think, answer]` stands for `<think>...</think><answer>...</answer>`:
    each tag once, in this order, not empty, with none of these tags inside, and with nothing but white space around.
    """
    expression = _tagged(tags) if pattern is None else pattern
    return float(re.fullmatch(expression, trajectory.response, re.DOTALL) is not None)


def _tagged(tags: list[str] | None) -> str:
    assert tags, "either pattern or tags is given"
    no_tag = rf"(?:(?!</?(?:{'|'.join(tags)})>).)"
    return r"\s*" + r"\s*".join(rf"<{tag}>\s*(?=\S){no_tag}+</{tag}>" for tag in tags) + r"\s*"
