"""Make a folder of parquet files and their card from a recipe's plan; the folder appears complete or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.hub import Located, in_folder, on_hub
from data_prep.reading import fields_of, merged, rows_of
from data_prep.recipe import TEXT, BadRow, Generated, Part, Row
from data_prep.writing import OutputFile, Tally, digest
from data_prep.zipped import ZippedFiles

CARD = "card.json"
BAD_ROWS = "bad_rows.jsonl"
Step = Part | Generated


@dataclass(frozen=True)
class Order:
    """The result to be made, and its place. `options` are the recipe's own, as they go into the card."""

    recipe: str
    out: Path
    options: Mapping[str, Any]
    command: str
    source: Path | None = None  # None: the hub, or nothing is read
    test_fraction: float = 0.0
    strict: bool = False
    force: bool = False


def prepare(order: Order, plan: Sequence[Step]) -> Path:
    """Make the folder unless it is there already, made by the same options.

    Raises:
        ValueError: the source is wrong, no row is good, a row is bad and `strict` is set, or `out` is something else;
            the message names file and row and the way out.
    """
    if _is_there(order):
        print(f"{order.out}: already there, nothing to do (--force makes it anew)")
        return order.out
    located = [_locate(step, order.source) for step in plan]
    partial_out = order.out.absolute().with_name(f".{order.out.absolute().name}.partial")
    shutil.rmtree(partial_out, ignore_errors=True)  # of a run that was killed
    partial_out.mkdir(parents=True)
    try:
        card = _write(order, plan, located, partial_out)
        text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
        (partial_out / CARD).write_text(text, encoding="utf-8")
        _replace(order.out.absolute(), partial_out)
    finally:
        shutil.rmtree(partial_out, ignore_errors=True)
    for name, output in card["outputs"].items():
        print(f"{order.out / name}.parquet: {output['rows']:,} rows")
    for reason, count in card["dropped"].items():
        print(f"  left out: {count:,} rows: {reason}")
    return order.out


def _replace(out: Path, made: Path) -> None:
    """Put the finished folder in its place; the earlier one stays beside it until then."""
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    made.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _is_there(order: Order) -> bool:
    """Return whether `out` already holds the result. Raise ValueError when its content may not be replaced."""
    if not order.out.exists() or (order.out.is_dir() and not any(order.out.iterdir())):
        return False
    card = order.out / CARD
    if not card.is_file():
        raise ValueError(f"--out: {order.out} exists and was not made by data_prep (it has no {CARD}); choose another")
    if order.force:
        return False
    made = json.loads(card.read_text(encoding="utf-8"))
    if (made["recipe"], made["options"]) == (order.recipe, dict(order.options)):
        return True
    raise ValueError(
        f"--out: {order.out} was made by another command ({made['command']}); choose another folder, or add --force"
    )


def _locate(step: Step, source: Path | None) -> Located | None:
    if isinstance(step, Generated):
        return None
    return on_hub(step) if source is None else in_folder(step, source)


def _write(order: Order, plan: Sequence[Step], located: list[Located | None], out: Path) -> dict[str, Any]:
    """Write all output files into `out`; return the card."""
    schemas: dict[str, dict[str, pa.DataType]] = {}
    for step, place in zip(plan, located, strict=True):
        for name, kind in _columns(step, place).items():
            known = schemas.setdefault(step.output, {})
            known[name] = merged(known.get(name, kind), kind)
    if order.test_fraction:
        assert list(schemas) == ["train"], "only data without a test split is split here"
        schemas["test"] = schemas["train"]
    tally = Tally(order.recipe, out / BAD_ROWS, order.strict)
    with ExitStack() as stack:
        files = {n: stack.enter_context(OutputFile(out / f"{n}.parquet", columns)) for n, columns in schemas.items()}
        for step, place in zip(plan, located, strict=True):
            for made in _good_rows(step, place, tally):
                identity = digest([made.get("prompt", made.get("messages")), made.get("images")])
                held = int.from_bytes(identity, "big") < order.test_fraction * 2 ** (8 * len(identity))
                files["test" if held else step.output].add(made, identity)
    for name, file in files.items():
        if not file.rows:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in tally.dropped.items())
            raise ValueError(f"{name}.parquet would be empty: {tally.read} rows were read ({reasons or 'none bad'})")
    return {
        "recipe": order.recipe,
        "command": order.command,
        "options": dict(order.options),
        "sources": [_source_card(step, place) for step, place in zip(plan, located, strict=True)],
        "rows_read": tally.read,
        "dropped": dict(tally.dropped.most_common()),
        "outputs": {name: _output_card(file) for name, file in files.items()},
        "versions": {name: importlib.metadata.version(name) for name in ("datasets", "pyarrow", "reasoning-gym")},
    }


def _columns(step: Step, place: Located | None) -> dict[str, pa.DataType]:
    """Return the output's columns: those made, constants, and the source's other columns, which are checked here."""
    made = dict(step.columns)
    if isinstance(step, Generated):
        return made
    assert place is not None
    passed: dict[str, pa.DataType] = {}
    for file in place.files:
        fields = fields_of(file.path)
        lacking = [name for name in step.needs if name not in fields]
        if lacking:
            raise ValueError(f"{file.name}: there is no column {', '.join(lacking)}; there are: {', '.join(fields)}")
        for name, kind in fields.items():
            if name not in (*made, *step.constants, *step.drops):
                passed[name] = merged(passed.get(name, kind), kind)
    named = {name: TEXT if pa.types.is_null(kind) else kind for name, kind in passed.items()}
    return made | dict.fromkeys(step.constants, TEXT) | named


def _good_rows(step: Step, place: Located | None, tally: Tally) -> Iterator[Row]:
    """Yield the output rows of a step; bad ones go to the tally."""
    if isinstance(step, Generated):
        for number, row in enumerate(step.rows(), 1):
            tally.take()
            if isinstance(row, BadRow):
                tally.drop(row, step.origin, number)
            else:
                yield row
        return
    assert place is not None
    with ExitStack() as stack:
        convert = step.convert
        if place.companion:
            convert = partial(convert, stack.enter_context(ZippedFiles(place.companion)))
        for file in place.files:
            for number, row in rows_of(file.path):
                tally.take()
                try:
                    if isinstance(row, BadRow):
                        raise row
                    made = convert(row)
                except BadRow as bad:
                    tally.drop(bad, file.name, number)
                    continue
                yield {k: v for k, v in row.items() if k not in step.drops} | dict(step.constants) | made


def _source_card(step: Step, place: Located | None) -> dict[str, Any]:
    if isinstance(step, Generated):
        return {"generated": step.origin}
    assert place is not None
    files = [{"file": f.name, "bytes": f.path.stat().st_size} for f in place.files]
    return {"repository": step.repository, "revision": step.revision, "commit": place.commit or None, "files": files}


def _output_card(file: OutputFile) -> dict[str, Any]:
    schema = {field.name: str(field.type) for field in file.schema}
    return {"rows": file.rows, "repeated_prompts": file.repeated(), "schema": schema}
