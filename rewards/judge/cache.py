"""A judge's answers on disk, so that the same question is paid for once: one sqlite file that all processes share."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from typing import Any

WAIT_SECONDS = 30.0  # for another process that is writing


def key_of(request: dict[str, Any]) -> str:
    """Return the request's key, which depends on all its fields but not on their order."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def find(path: str, key: str) -> str | None:
    """Return the stored answer, or None. The call blocks."""
    with closing(_open(path)) as database:
        row = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def keep(path: str, key: str, answer: str) -> None:
    """Store an answer, in place of an earlier one. The call blocks."""
    with closing(_open(path)) as database, database:
        database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))


def check(path: str) -> None:
    """Raise ValueError when the file cannot be made, or is no such database."""
    try:
        _open(path).close()
    except sqlite3.Error as error:
        raise ValueError(f"params.cache: {path}: {error}; name a file of its own, in a folder that exists") from error


def _open(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=WAIT_SECONDS)
    try:
        database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
    except BaseException:
        database.close()
        raise
    return database
