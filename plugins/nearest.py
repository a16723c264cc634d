"""The name that a mistyped one most likely means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate a mistyped or abbreviated word most likely means, or None."""
    names = list(dict.fromkeys(candidates))
    plain = {name.lower().replace("-", "_"): name for name in names}
    wanted = word.lower().replace("-", "_")
    if wanted in plain:
        return plain[wanted]
    initials = [name for name in names if "".join(part[:1] for part in name.split("_")) == wanted and len(wanted) > 1]
    close = difflib.get_close_matches(wanted, list(plain), n=1, cutoff=0.6)
    if close:
        return plain[close[0]]
    if initials:
        return initials[0]
    containing = [name for key, name in plain.items() if len(wanted) > 3 and (wanted in key or key in wanted)]
    return containing[0] if containing else None
