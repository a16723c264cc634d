"""Find a part's files: in a folder laid out as the hub repository, or on the hub, fetched through `datasets`."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from data_prep.recipe import Part

HUB_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class SourceFile:
    """A file of a repository: its path there, and its path on this machine."""

    name: str
    path: Path


@dataclass(frozen=True)
class Located:
    """The places where a part's files were found; `commit` is that of the repository, empty for a local folder."""

    files: tuple[SourceFile, ...]
    companion: Path | None
    commit: str = ""


def in_folder(part: Part, folder: Path) -> Located:
    """Return the part's files below `folder`. Raise ValueError, naming pattern and folder, when there are none."""
    root = folder / part.folder
    if not root.is_dir():
        raise ValueError(f"--source: there is no folder {root}")
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    where = f"--source: {root}"
    files = tuple(SourceFile(name, root / name) for name in _matching(names, part.files, where))
    companion = root / _matching(names, part.companion, where)[0] if part.companion else None
    return Located(files, companion)


def on_hub(part: Part) -> Located:
    """Return the part's files, downloaded into the hub's cache at one commit.

    Raise ValueError, naming the repository and the option --source, when the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # What the hub's HTTP library itself raises (no name, no route, too slow), whichever library that is.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        info = HfApi().dataset_info(part.repository, revision=part.revision, timeout=HUB_TIMEOUT_SECONDS)
        names = sorted(file.rfilename for file in info.siblings or ())
        where = f"the hub's {part.repository} at {part.revision}"
        wanted = _matching(names, part.files, where)
        zipped = _matching(names, part.companion, where)[:1] if part.companion else []
        from datasets import DownloadConfig, DownloadManager  # seconds to load: not before the hub has answered

        manager = DownloadManager(download_config=DownloadConfig(max_retries=2))
        root = f"hf://datasets/{part.repository}@{info.sha}/"
        paths = [Path(manager.download(root + name)) for name in [*wanted, *zipped]]
    except (OSError, http_error) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"the hub's {part.repository} at {part.revision} could not be read; fetch its files elsewhere and give their "
            f"folder with --source FOLDER instead of --from-hub ({said[:200]})"
        ) from error
    files = tuple(SourceFile(name, path) for name, path in zip(wanted, paths, strict=False))
    return Located(files, paths[-1] if zipped else None, str(info.sha))


def _matching(names: list[str], pattern: str, where: str) -> list[str]:
    found = fnmatch.filter(names, pattern)
    if not found:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(f"{where} has no file {pattern}; there are: {shown or 'none'}")
    return found
