"""The type of what a rule finds wrong."""

from __future__ import annotations

Problem = tuple[str, str]  # dotted key, message with the way out
