"""Answers of a judge on disk, so that the same question is paid for once: one sqlite file, shared by all processes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from typing import Any

WAIT_SECONDS = 30.0  # for another process that is writing


def key_of(request: dict[str, Any]) -> str:
    """A request's key: everything that it is made of, in any order."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def find(path: str, key: str) -> str | None:
    """The stored answer, or None. Blocking."""
    with closing(_open(path)) as database:
        row = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def keep(path: str, key: str, answer: str) -> None:
    """Store an answer; the latest counts. Blocking."""
    with closing(_open(path)) as database, database:
        database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))


def check(path: str) -> None:
    """Raises ValueError when there is no such file and none can be made, or it is something else."""
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
