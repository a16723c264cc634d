"""The plan of a job, in tables: what `--dry-run` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.blocks.block import Named
from configs.blocks.lora import Lora
from configs.blocks.rl import Algorithm, Model
from orchestration.start.preflight import Checked

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[str, str]
Section = tuple[str, Iterable[Row]]


@dataclass(frozen=True)
class Plan:
    """What a job will do: sections of rows, each a name and a value."""

    of_what: str
    sections: list[Section]


def print_plan(plan: Plan, warnings: list[str], console: Console | None = None) -> None:
    """Print a plan, then the warnings. Write no file."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table

    if console is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, rows in plan.sections:
        for index, (name, value) in enumerate(rows):
            table.add_row(title if index == 0 else "", name, value)
        table.add_section()
    notes = [f"[yellow]warning[/]: {text}" for text in warnings] or ["no warnings"]
    title = f"plan of {plan.of_what}; no engine or trainer was started, nothing was written"
    console.print(Panel(Group(table, "", *notes), title=title, title_align="left", border_style="dim"))


def model_rows(model: Model, checked: Checked) -> Iterable[Row]:
    """Yield the rows about the model."""
    yield "path", model.path
    yield "kind", f"{checked.model.architecture}, {checked.model.parameters:,} parameters, {model.dtype} compute"


def algorithm_row(algorithm: Algorithm) -> Row:
    """Return the row of the method and its parameters."""
    return "algorithm", _with_params(algorithm.name, algorithm.params)


def adapter_text(lora: Lora, checked: Checked) -> str:
    """Return a text on what LoRA trains."""
    assert checked.adapter is not None
    trained, whole = checked.adapter.parameters, checked.model.parameters
    return (
        f"LoRA of rank {lora.rank} on {checked.adapter.matrices} matrices: {trained:,} trained parameters "
        f"({trained / whole:.1%} of the model's)"
    )


def function_text(block: Named) -> str:
    """Return a function and its arguments as text."""
    return _with_params(block.function, block.params)


def _with_params(name: str, params: dict[str, object]) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in params.items())
    return f"{name}{f' ({shown})' if shown else ''}"
