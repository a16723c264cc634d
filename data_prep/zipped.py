"""Read files that rows name from the zip file in which a repository keeps them."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path, PurePosixPath

from data_prep.recipe import BadRow

# PNG, JPEG, GIF, BMP, WebP
_IMAGE_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF")


class ZippedFiles:
    """A zip file, open for reading. Use it as a context manager; it raises ValueError when the file is no zip file."""

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(f"{path}: it is not readable as a zip file: {error}") from error
        self._by_bare_name = {PurePosixPath(name).name: name for name in self._zip.namelist()}

    def __enter__(self) -> ZippedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def image(self, name: str) -> bytes:
        """Return an image file's bytes, found by its path or by its bare name; raise BadRow when it is not good."""
        member = name if name in self._zip.NameToInfo else self._by_bare_name.get(PurePosixPath(name).name)
        if member is None:
            raise BadRow("the image is not in the zip file", name)
        try:
            image = self._zip.read(member)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise BadRow("the image cannot be unpacked", f"{name}: {error}") from error
        if not image.startswith(_IMAGE_STARTS):
            raise BadRow("the image is no image file", name)
        return image
