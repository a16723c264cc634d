"""Build a page without external files: markup, style, script and data in one HTML file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parent / "page_assets"


def html_page(title: str, data: dict[str, Any], assets: Path, scripts: Sequence[str] = ("page.js",)) -> str:
    """Return a page made of the folder's body.html, style.css and scripts; these find `data` as a constant `data`.

    Raises:
        ValueError: a number in the data is not finite.
    """
    parts = {
        "title": html.escape(title),
        "style": _text(SHARED / "style.css", assets / "style.css"),
        "body": _text(assets / "body.html"),
        "script": _text(SHARED / "page.js", *(assets / name for name in scripts)),
        # Inside <script>, only "<" can end the element or start a comment; JSON allows its escaped form in strings.
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text(SHARED / "page.html"))


def _text(*paths: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)
