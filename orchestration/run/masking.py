"""Mask what looks like a secret in a configuration or command line before others see it."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
_NAMES = "key|token|secret|password|authorization"  # parts of a secret's name
_SECRET = re.compile(rf"(?i){_NAMES}")
_USER = re.compile(r"(?<=://)[^/\s@]+@")
_SETTING = re.compile(rf"""(?i)((?:{_NAMES})[\w-]*["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^,}}\]]+)""")


def masked(value: Any, key: str = "") -> Any:
    """Return plain values with those under a secret's key replaced, and the user and password in addresses.

    Numbers of tokens stay, and so does the name of an environment variable (api_key_env).
    """
    if isinstance(value, dict):
        return {name: masked(inner, f"{key}.{name}" if _is_secret(key) else str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, key) for inner in value]
    if _is_secret(key) and (isinstance(value, str) or (type(value) is int and "token" not in key.lower())):
        return MASK
    return _USER.sub(f"{MASK}@", value) if isinstance(value, str) else value


def masked_word(word: str) -> str:
    """Return a word of a command line with the same replaced: `--set a.api_key=x`, `--set 'a={api_key: x}'`."""

    def replaced(found: re.Match[str]) -> str:
        name, given = found[1].strip(" \"'=:"), found[2]
        is_count = "token" in name.lower() and given.strip().isdecimal()
        return found[0] if is_count or name.endswith("_env") else found[1] + MASK

    return _SETTING.sub(replaced, _USER.sub(f"{MASK}@", word))


def _is_secret(key: str) -> bool:
    return _SECRET.search(key) is not None and not key.endswith("_env")
