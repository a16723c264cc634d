"""Find the name that a mistyped one most likely means, and write a hint that says so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FEW = 12  # names that a message lists beside the nearest


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that a mistyped or abbreviated word most likely means, or None."""
    names = list(dict.fromkeys(candidates))
    plain = {name.lower().replace("-", "_"): name for name in names}
    wanted = word.lower().replace("-", "_")
    if wanted in plain:
        return plain[wanted]
    if close := difflib.get_close_matches(wanted, list(plain), n=1, cutoff=0.6):
        return plain[close[0]]
    initials = [name for name in names if "".join(part[:1] for part in name.split("_")) == wanted and len(wanted) > 1]
    containing = [name for key, name in plain.items() if len(wanted) > 3 and (wanted in key or key in wanted)]
    return next(iter(initials + containing), None)


def hint(word: str, candidates: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest one, and all if they are few or none is near."""
    names = list(dict.fromkeys(candidates))
    guess, all_names = nearest(word, names), f"there are: {', '.join(names) or 'none'}"
    if guess is None:
        return all_names
    return f"did you mean {guess}? {all_names}" if len(names) <= FEW else f"did you mean {guess}?"
