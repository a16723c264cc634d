"""Load the data of a supervised job: open and check the sources, split them so that no held-out row leaks, and mix
them.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.blocks.source import Source
from configs.blocks.supervised_data import SLData
from data_feeds.chat.loss_mask import check_template
from data_feeds.examples.examples import Example, ExampleMaker, ExampleSource, LeftOut
from data_feeds.examples.mixture import MixedExamples
from data_feeds.examples.rows import ExampleRow, Kind, check_columns
from data_feeds.prompts.prompts import question_text, split_key
from data_feeds.reading.rows import Rows
from data_feeds.reading.sources import open_rows, source_seed, unique_names
from records.rollout import Prompt

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class SupervisedData:
    """The data of a supervised job."""

    sampler: MixedExamples
    heldout: list[Example]  # in random order: the first n are a fair sample of all sources
    sources: list[ExampleSource]  # training sources
    heldout_sources: list[ExampleSource]

    @property
    def training_rows(self) -> int:
        """Return the number of rows in one pass over all training sources."""
        return sum(len(source) for source in self.sources)

    def all_training(self) -> Iterator[Example]:
        """Yield every usable training example once, source after source."""
        for source in self.sources:
            yield from source

    def __str__(self) -> str:
        lines = [f"{self.training_rows} training rows, {len(self.heldout)} held-out examples read"]
        for kind, sources in (("training", self.sources), ("held out", self.heldout_sources)):
            for source in sources:
                lines.append(f"  {source.name} ({kind}): {len(source)} rows; {source.left_out}")
                lines += [f"    {reason}" for reason in source.left_out.reasons]
        return "\n".join(lines)


def load_supervised_data(
    data: SLData, kind: Kind, tokenizer: Any, seed: int, max_heldout: int | None = None
) -> SupervisedData:
    """Open, check and split all sources. The split depends on `data` alone, the training order on `seed` too.

    Every row is read and checked once. With data.bad_rows or data.too_long set to error it is tokenised as well, so
    that no step meets a bad row. The first `max_heldout` held-out examples are tokenised (None: all of them).

    Raises:
        ValueError: a source is wrong (see data_feeds/reading/sources.py), it holds no usable row, rows are refused, the
            chat template cannot be learned from, or a side of the split is empty.
    """
    check_template(tokenizer)
    loader = _Loader(data, ExampleMaker(tokenizer, data, kind))
    train = loader.scan(data.sources, "sources")
    if data.heldout_sources:
        heldout = loader.scan(data.heldout_sources, "heldout_sources")
        _remove_leaks(train, heldout, data)
    else:
        train, heldout = _split(train, data)
    sources = [scan.source(loader.maker) for scan in train]
    heldout_sources = [scan.source(loader.maker) for scan in heldout]
    for source in sources:
        if len(source) and next(iter(source), None) is None:
            raise ValueError(
                f"data.sources: no row of '{source.name}' can be learned from ({source.left_out}); the first: "
                f"{'; '.join(source.left_out.reasons)}"
            )
    sampler = MixedExamples(sources, seed, data.mixture, data.mixture_concentration, data.shuffle)
    examples = _read_heldout(heldout_sources, [scan.keys for scan in heldout], max_heldout)
    if any(len(source) for source in heldout_sources) and not examples:
        reasons = "; ".join(reason for source in heldout_sources for reason in source.left_out.reasons)
        raise ValueError(f"data: no held-out row can be used; the first: {reasons}")
    return SupervisedData(sampler, examples, sources, heldout_sources)


@dataclass
class _Scan:
    """One source after its rows were read once. n of them may be used."""

    name: str
    config: Source
    rows: Rows
    row_numbers: NDArray[np.int64]  # [n]
    keys: Hashes  # [n] hashes of the split keys; sorting by them gives a seeded random order
    chats: Hashes  # [n] hashes of everything in a row when duplicates are dropped, else empty
    left_out: LeftOut

    def keep(self, mask: NDArray[np.bool_]) -> None:
        self.row_numbers, self.keys = self.row_numbers[mask], self.keys[mask]

    def source(self, maker: ExampleMaker) -> ExampleSource:
        source = ExampleSource(self.name, self.config, self.rows, maker, self.row_numbers)
        source.left_out = self.left_out
        return source


class _Loader:
    def __init__(self, data: SLData, maker: ExampleMaker) -> None:
        self.data, self.maker = data, maker
        self._names = iter(unique_names([*data.sources, *data.heldout_sources]))
        self._tokenise = "error" in (data.bad_rows, data.too_long)

    def scan(self, sources: list[Source], key: str) -> list[_Scan]:
        """Read every row of a list of sources once."""
        scans = []
        for index, source in enumerate(sources):
            place = f"data.{key}.{index}"
            seed = source_seed(self.data.split_seed, key, index)
            rows = open_rows(source, seed, place, self.data.cache_dir)
            check_columns(rows, source, self.maker.kind, place)
            scans.append(self._scan_one(next(self._names), source, rows, place))
        if self.data.drop_duplicates:
            _drop_duplicates(scans)
        return scans

    def _scan_one(self, name: str, source: Source, rows: Rows, place: str) -> _Scan:
        row_numbers, keys, chats, left_out = array("q"), array("Q"), array("Q"), LeftOut()
        for index, row in enumerate(rows.all()):
            where = rows.where(index)
            try:
                if isinstance(row, ValueError):
                    raise row
                parsed = self.maker.parse(row, source, where)
                if self._tokenise:
                    self.maker.make(parsed, name, name, where)
            except ValueError as error:
                left_out.note(error)
                continue
            row_numbers.append(index)
            if self.data.drop_duplicates:
                chats.append(_hash(_whole_text(parsed)))
            keys.append(_hash(f"{self.data.split_seed}\n{self._split_key(parsed)}"))
        self._refuse(left_out, place)
        if not row_numbers:
            raise ValueError(f"{place}: no row can be used; the first: {'; '.join(left_out.reasons)}")
        hashes = np.asarray(keys, np.uint64), np.asarray(chats, np.uint64)
        return _Scan(name, source, rows, np.asarray(row_numbers, np.int64), *hashes, left_out)

    def _refuse(self, left_out: LeftOut, place: str) -> None:
        """Raise ValueError when there are rows that the configuration calls an error."""
        bad = left_out.bad if self.data.bad_rows == "error" else 0
        too_long = left_out.too_long if self.data.too_long == "error" else 0
        if bad or too_long:
            reasons = "\n  ".join(left_out.reasons)
            raise ValueError(
                f"{place}: {left_out.bad} bad rows and {left_out.too_long} too long ones; repair them, or leave them "
                f"out with data.bad_rows: skip and data.too_long: skip (or truncate). The first:\n  {reasons}"
            )

    def _split_key(self, row: ExampleRow) -> str:
        if self.data.split_by == "row" or not question_text(row.prompt).strip():
            return _whole_text(row)
        return split_key(Prompt("", row.prompt), self.data.split_by)


def _drop_duplicates(scans: list[_Scan]) -> None:
    """Keep only the first row of each chat over all sources of a list."""
    first = np.unique(np.concatenate([scan.chats for scan in scans]), return_index=True)[1]
    start = 0
    for scan in scans:
        mask = np.zeros(len(scan.row_numbers), dtype=np.bool_)
        mask[first[(first >= start) & (first < start + len(mask))] - start] = True
        start += len(mask)
        scan.left_out.duplicates = int((~mask).sum())
        scan.keep(mask)


def _remove_leaks(train: list[_Scan], heldout: list[_Scan], data: SLData) -> None:
    """Remove the training rows that share a split key with a held-out row."""
    heldout_keys = np.unique(np.concatenate([scan.keys for scan in heldout]))
    for scan in train:
        leaks = np.isin(scan.keys, heldout_keys)
        scan.left_out.leaks = int(leaks.sum())
        scan.keep(~leaks)
    if not any(len(scan.row_numbers) for scan in train):
        raise ValueError(
            "data.sources: all training rows are also in data.heldout_sources (by data.split_by: "
            f"{data.split_by}); hold out other rows, or leave heldout_sources out and use data.heldout_fraction"
        )


def _split(train: list[_Scan], data: SLData) -> tuple[list[_Scan], list[_Scan]]:
    """Hold out `heldout_fraction` of the keys, rounded: the smallest ones, since keys are seeded hashes."""
    if data.heldout_fraction == 0:
        return train, []
    order = np.unique(np.concatenate([scan.keys for scan in train]))
    count = round(data.heldout_fraction * len(order))
    if count in (0, len(order)):
        side = "held-out" if count == 0 else "training"
        raise ValueError(
            f"data.heldout_fraction: {data.heldout_fraction} of {len(order)} split keys (data.split_by: "
            f"{data.split_by}) leaves the {side} set empty; give more rows, another fraction (0: nothing is held out), "
            "or data.heldout_sources"
        )
    last = order[count - 1]
    heldout = []
    for scan in train:
        is_held = scan.keys <= last
        if is_held.any():
            rows, keys = scan.row_numbers[is_held], scan.keys[is_held]
            heldout.append(replace(scan, row_numbers=rows, keys=keys, left_out=LeftOut()))
        scan.keep(~is_held)
    return train, heldout


def _read_heldout(sources: list[ExampleSource], keys: list[Hashes], most: int | None) -> list[Example]:
    """Return the first usable held-out examples, at most `most`, in the random order of their keys."""
    if not sources:
        return []
    source_of = np.concatenate([np.full(len(source), i) for i, source in enumerate(sources)])
    positions = np.concatenate([np.arange(len(source)) for source in sources])
    examples: list[Example] = []
    for at in np.argsort(np.concatenate(keys), kind="stable"):
        if most is not None and len(examples) >= most:
            break
        example = sources[source_of[at]].get(int(positions[at]))
        if example is not None:
            examples.append(example)
    return examples


def _whole_text(row: ExampleRow) -> str:
    return json.dumps([row.prompt, row.responses, row.label], sort_keys=True, ensure_ascii=False, default=repr)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
