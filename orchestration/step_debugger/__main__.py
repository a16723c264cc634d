"""A microscope for one optimizer step: runs a captured one again, offline, and shows what every token did to it.

    python -m orchestration.step_debugger runs/grpo                   what was captured
    python -m orchestration.step_debugger runs/grpo/captured_steps/step_000412_update_0
                                                                      the step again, and its tokens by share
        --sort ratio --top 50 --html step.html                            other tokens; all of them as a page
        --algorithm cispo --set ratio_cap=2                               the same batch under another method
        --breakpoint                                                      step through the loss in the debugger

A run captures the steps named in `capture.steps` of its configuration, and every update that was skipped because something
in it was not finite. One process is enough, whatever the run's ranks. See docs/running/STEP_DEBUGGER.md.

Exit codes: 0 done, 1 the step should be bit-equal to the live one and is not, 2 a mistake in what was given.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from algs.method import PolicyMethod
from algs.records import PolicyTokens, TokenLoss
from configs.reading.load import method_from_text
from data_feeds.chat.template import load_tokenizer
from orchestration.run.logs import captured_output
from orchestration.step_debugger.findings import about_change, about_equality, about_not_finite, title
from orchestration.step_debugger.loaded_step import LoadedStep, captured_steps, load_captured_step
from orchestration.step_debugger.page import write_page
from orchestration.step_debugger.rerun import Rerun, gradients, rerun, under
from orchestration.step_debugger.token_table import COLUMNS, TEXTS, TokenTable, beside, prompts, token_table
from orchestration.trainer.token_objective import TokenObjective

SHOWN = (
    "trajectory", "position", "token", "reward", "advantage", "behavior_logprob", "old_logprob", "ref_logprob", "logprob",
    "ratio", "rho", "staleness", "entropy", "value", "return", "loss", "weight", "share", "state",
)  # fmt: skip
SHOWN_BESIDE = (
    "trajectory", "position", "token", "advantage", "ratio", "rho", "weight", "other_weight", "share", "other_share",
    "state", "other_state", "change",
)  # fmt: skip
WIDTH_WITHOUT_A_TERMINAL = 180
TONES = {"good": "green", "bad": "bold red", "plain": "default"}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m orchestration.step_debugger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="columns:\n" + "\n".join(f"  {name:<17} {text}" for name, text in COLUMNS.items()),
    )
    add = found.add_argument
    add("path", type=Path, help="a captured step; or a run, or its folder captured_steps, to list what is there")
    add("--sort", metavar="COLUMN", help="largest first (default: share; with --algorithm, change and then share)")
    add("--ascending", action="store_true", help="smallest first")
    add("--top", type=int, default=20, metavar="N", help="tokens to print (default: 20)")
    add("--trajectory", type=int, metavar="I", help="only the tokens of this response")
    add("--columns", metavar="A,B,...", help="print these columns")
    add("--html", type=Path, metavar="FILE", help="write all of it as one page that needs nothing else")
    add("--algorithm", metavar="NAME", help="compare with another method: a file in algs/, or your own module:Class")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of that method; repeatable")
    add(
        "--breakpoint",
        action="store_true",
        help="stop in the debugger right before the method's loss, on the micro-batch with the largest |loss|",
    )
    add("--device", choices=("cpu", "cuda"), help="default: as the run's model.device")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_A_TERMINAL, highlight=False)
    try:
        if (given.path / "rank_0.pkl").is_file():
            return run_again(given, console)
        list_captured(given.path, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def list_captured(folder: Path, console: Console) -> None:
    """Print what is captured in a run or in its folder captured_steps. Raises ValueError when nothing is."""
    found = captured_steps(folder)
    if not found:
        load_captured_step(folder)  # refuses it, saying what a captured step is
    table = Table(
        "captured step", "method", "why", "ranks", "tokens", "loss", "gradient norm", box=None, pad_edge=False
    )
    for path in found:
        captured = load_captured_step(path)
        live = captured.live.means()
        table.add_row(
            Text(str(path)), type(captured.method).__name__, captured.reason, str(len(captured.parts)),
            f"{live['train/action_tokens']:.0f}", f"{live['train/loss']:.6g}", f"{live['train/gradient_norm']:.6g}",
        )  # fmt: skip
    console.print(table)


def run_again(given: argparse.Namespace, console: Console) -> int:
    """Run the step again and show it; returns the exit code."""
    if given.set and given.algorithm is None:
        raise ValueError("--set gives a parameter of the method in --algorithm, which is missing")
    captured = load_captured_step(given.path)
    other = None if given.algorithm is None else method_from_text(given.algorithm, given.set)
    text = token_text(captured)
    with captured_output(given.path / "rerun.log"):  # the libraries' chatter
        run = rerun(captured, given.device)
        asked = [(run.objective, run.tokens)]
        table = token_table(captured.batches, run.tokens, run.objective, text)
        findings = [*about_equality(run), *about_not_finite(run, table)]
        if other is not None:
            objective, tokens, notes = under(other, run)
            asked.append((objective, tokens))
            table = beside(table, token_table(captured.batches, tokens, objective, text))
            findings += about_change(run, other, table, gradients(run, asked), notes)
    chosen, columns = selected(table, given), columns_of(table, given)
    if given.breakpoint:
        stop_before_loss(run, *asked[-1])
    console.print(title(captured), style="bold")
    print_metrics(run, console)
    for finding in findings:
        console.print(Text(finding.text), style=TONES[finding.tone], soft_wrap=True)
    print_tokens(table, chosen[: given.top], columns, console)
    if given.html is not None:
        write_page(given.html, title(captured), findings, run.metrics, table, prompts(captured.batches, text))
        console.print(f"wrote {given.html}")
    return int(run.must_be_equal and bool(run.differing))


def token_text(captured: LoadedStep) -> Callable[[list[int]], str]:
    model = captured.settings.model
    return load_tokenizer(model.path, model.trust_remote_code).decode


def selected(table: TokenTable, given: argparse.Namespace) -> np.ndarray:
    """Rows in the order that was asked for, of the response that was asked for. [M] int64"""
    order = table.order(given.sort or ("change" if "change" in table.columns else "share"), given.ascending)
    if given.trajectory is None:
        return order
    order = order[table["trajectory"][order] == given.trajectory]
    if not len(order):
        raise ValueError(
            f"--trajectory {given.trajectory}: no such response; there are 0 to {table['trajectory'].max()}"
        )
    return order


def columns_of(table: TokenTable, given: argparse.Namespace) -> list[str]:
    if given.columns is None:
        return [name for name in (SHOWN_BESIDE if "change" in table.columns else SHOWN) if name in table.columns]
    names = [name.strip() for name in given.columns.split(",")]
    for name in names:
        if name not in table.columns:
            raise ValueError(f"--columns {name}: no such column here; there are {', '.join(table.columns)}")
    return names


def print_metrics(run: Rerun, console: Console) -> None:
    """Loss, gradient norms and whatever differs; the rest in one line."""
    shown = [m for m in run.metrics if not m.is_equal or m.name.endswith(("/loss", "/gradient_norm"))]
    table = Table("metric", "live", "rerun", "", box=None, pad_edge=False)
    for m in shown:
        told = "bit-equal" if m.is_equal else f"differs by {m.relative_difference:.1e}, relatively"
        if math.isinf(m.relative_difference):
            told = "differs"  # one of them is absent or not finite
        live, again = ("absent" if x is None else f"{x:.9g}" for x in (m.live, m.rerun))
        table.add_row(m.name, live, again, Text(told, style="green" if m.is_equal else "red"))
    console.print(table)
    if rest := len(run.metrics) - len(shown):
        console.print(f"and {rest} further metrics: bit-equal")


def print_tokens(table: TokenTable, rows: np.ndarray, names: list[str], console: Console) -> None:
    printed = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        printed.add_column(name.replace("_", " "), justify="left" if name in TEXTS else "right", no_wrap=name in TEXTS)
    for row in rows:
        advantage = table["advantage"][row]
        style = "red" if not np.isfinite(advantage) else "dim" if advantage == 0 else "default"
        printed.add_row(*(Text(cell(name, table[name][row])) for name in names), style=style)
    console.print(printed)


def cell(name: str, value: object) -> str:
    if name == "token":
        return repr(value)
    if isinstance(value, str | int | np.integer):
        return str(value)
    return f"{value:.1%}" if name.endswith("share") and np.isfinite(value) else f"{value:.4g}"  # type: ignore[str-bytes-safe,call-overload]


def stop_before_loss(run: Rerun, objective: TokenObjective, tokens: Sequence[PolicyTokens]) -> None:
    """Open the debugger right before the method's loss of the micro-batch that holds the largest |loss|."""
    losses = [float(objective(t).loss.abs().max().nan_to_num(nan=torch.inf)) for t in tokens]
    index = int(np.argmax(losses))
    print(
        f"t: the {len(tokens[index].logprobs)} tokens of micro-batch {index} of {len(losses)}, with the largest |loss|.\n"
        f"s: step into {type(objective.method).__name__}.loss.  n: run it, into answer.  c: go on."
    )
    step_into(objective.method, dataclasses.replace(tokens[index], logprobs=tokens[index].logprobs.requires_grad_()))


def step_into(method: PolicyMethod, t: PolicyTokens) -> TokenLoss:
    breakpoint()  # noqa: T100  what --breakpoint asks for
    answer = method.loss(t)
    return answer  # noqa: RET504  to be looked at


if __name__ == "__main__":
    sys.exit(main())
