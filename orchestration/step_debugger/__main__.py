"""The step debugger runs a captured update again, offline, and shows what every token contributed to it.

    python -m orchestration.step_debugger runs/grpo                   list what was captured
    python -m orchestration.step_debugger runs/grpo/captured_steps/step_000412_update_0
                                                                      run it again, and show its tokens by share
        --sort ratio --top 50 --html step.html                            show other tokens; write all of them as a page
        --algorithm cispo --set ratio_cap=2                               put the same batch under another method
        --breakpoint                                                      step through the loss in pdb

A run captures the steps in `capture.steps` of its configuration, and every update that was skipped because it held an
Inf or NaN. One process is enough, whatever the run's ranks. See docs/running/STEP_DEBUGGER.md.

Exit codes: 0 done; 1 the rerun should be bit-equal to the live update and is not; 2 an argument is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from orchestration.step_debugger.findings import about_change, about_equality, about_nonfinite, title
from orchestration.step_debugger.loaded_step import LoadedStep, captured_steps, load_captured_step
from orchestration.step_debugger.page import write_page
from orchestration.step_debugger.rerun import Rerun, gradients, rerun, under_method
from orchestration.step_debugger.token_table import COLUMNS, TEXTS, TokenTable, prompts, token_table, with_comparison
from orchestration.trainer.token_objective import TokenObjective

DEFAULT_COLUMNS = (
    "trajectory", "position", "token", "reward", "advantage", "behavior_logprob", "old_logprob", "ref_logprob",
    "logprob", "ratio", "rho", "staleness", "entropy", "value", "return", "loss", "weight", "share", "state",
)  # fmt: skip
COMPARISON_COLUMNS = (  # the default columns with --algorithm
    "trajectory", "position", "token", "advantage", "ratio", "rho", "weight", "other_weight", "share", "other_share",
    "state", "other_state", "change",
)  # fmt: skip
WIDTH_WITHOUT_A_TERMINAL = 180
TONES = {"good": "green", "bad": "bold red", "plain": "default"}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestration.step_debugger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="columns:\n" + "\n".join(f"  {name:<17} {text}" for name, text in COLUMNS.items()),
    )
    add = parser.add_argument
    add("path", type=Path, help="a captured step; or a run, or its folder captured_steps, to list what is there")
    add("--sort", metavar="COLUMN", help="largest first (default: share; with --algorithm, change and then share)")
    add("--ascending", action="store_true", help="smallest first")
    add("--top", type=int, default=20, metavar="N", help="tokens to print (default: 20)")
    add("--trajectory", type=int, metavar="I", help="only the tokens of this response")
    add("--columns", metavar="A,B,...", help="print these columns")
    add("--html", type=Path, metavar="FILE", help="write everything as one page without external files")
    add("--algorithm", metavar="NAME", help="compare with another method: a file in algs/, or your own module:Class")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of that method; repeatable")
    add(
        "--breakpoint",
        action="store_true",
        help="stop in the debugger right before the method's loss, on the micro-batch with the largest |loss|",
    )
    add("--device", choices=("cpu", "cuda"), help="default: the run's model.device")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    options = argument_parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_A_TERMINAL, highlight=False)
    try:
        if (options.path / "rank_0.pkl").is_file():
            return run_again(options, console)
        list_captured(options.path, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def list_captured(folder: Path, console: Console) -> None:
    """Print the captured steps of a run or of its folder captured_steps.

    Raises:
        ValueError: there is none.
    """
    folders = captured_steps(folder)
    if not folders:
        load_captured_step(folder)  # raises the error that says what a captured step is
    table = Table(
        "captured step", "method", "why", "ranks", "tokens", "loss", "gradient norm", box=None, pad_edge=False
    )
    for path in folders:
        captured = load_captured_step(path)
        live = captured.live.means()
        table.add_row(
            Text(str(path)), type(captured.method).__name__, captured.reason, str(len(captured.parts)),
            f"{live['train/action_tokens']:.0f}", f"{live['train/loss']:.6g}", f"{live['train/gradient_norm']:.6g}",
        )  # fmt: skip
    console.print(table)


def run_again(options: argparse.Namespace, console: Console) -> int:
    """Run the update again and show it; return the exit code."""
    if options.set and options.algorithm is None:
        raise ValueError("--set gives a parameter of the method in --algorithm, which is missing; name the method")
    captured = load_captured_step(options.path)
    other = None if options.algorithm is None else method_from_text(options.algorithm, options.set)
    decode = decoder_of(captured)
    with captured_output(options.path / "rerun.log"):  # what libraries print goes there
        run = rerun(captured, options.device)
        variants = [(run.objective, run.tokens)]
        table = token_table(captured.batches, run.tokens, run.objective, decode)
        findings = [*about_equality(run), *about_nonfinite(run, table)]
        if other is not None:
            objective, tokens, notes = under_method(other, run)
            variants.append((objective, tokens))
            table = with_comparison(table, token_table(captured.batches, tokens, objective, decode))
            findings += about_change(run, other, table, gradients(run, variants), notes)
    rows, columns = selected_rows(table, options), selected_columns(table, options)
    if options.breakpoint:
        stop_before_loss(*variants[-1])
    console.print(title(captured), style="bold")
    print_metrics(run, console)
    for finding in findings:
        console.print(Text(finding.text), style=TONES[finding.tone], soft_wrap=True)
    print_tokens(table, rows[: options.top], columns, console)
    if options.html is not None:
        write_page(options.html, title(captured), findings, run.metrics, table, prompts(captured.batches, decode))
        console.print(f"wrote {options.html}")
    return int(run.must_be_equal and bool(run.differing))


def decoder_of(captured: LoadedStep) -> Callable[[list[int]], str]:
    model = captured.settings.model
    return load_tokenizer(model.path, model.trust_remote_code).decode


def selected_rows(table: TokenTable, options: argparse.Namespace) -> np.ndarray:
    """Return the rows that --sort, --ascending and --trajectory select, in order, [M] int64."""
    order = table.order(options.sort or ("change" if "change" in table.columns else "share"), options.ascending)
    if options.trajectory is None:
        return order
    order = order[table["trajectory"][order] == options.trajectory]
    if not len(order):
        raise ValueError(
            f"--trajectory {options.trajectory}: no such response; there are 0 to {table['trajectory'].max()}"
        )
    return order


def selected_columns(table: TokenTable, options: argparse.Namespace) -> list[str]:
    if options.columns is None:
        defaults = COMPARISON_COLUMNS if "change" in table.columns else DEFAULT_COLUMNS
        return [name for name in defaults if name in table.columns]
    names = [name.strip() for name in options.columns.split(",")]
    for name in names:
        if name not in table.columns:
            raise ValueError(f"--columns {name}: no such column here; there are {', '.join(table.columns)}")
    return names


def print_metrics(run: Rerun, console: Console) -> None:
    """Print loss, gradient norms and whatever differs, and the number of the other metrics."""
    printed = [m for m in run.metrics if not m.is_equal or m.name.endswith(("/loss", "/gradient_norm"))]
    table = Table("metric", "live", "rerun", "", box=None, pad_edge=False)
    for m in printed:
        verdict = "bit-equal" if m.is_equal else f"differs by {m.relative_difference:.1e}, relatively"
        if math.isinf(m.relative_difference):
            verdict = "differs"  # one of the values is absent or non-finite
        live, again = ("absent" if x is None else f"{x:.9g}" for x in (m.live, m.rerun))
        table.add_row(m.name, live, again, Text(verdict, style="green" if m.is_equal else "red"))
    console.print(table)
    if rest := len(run.metrics) - len(printed):
        console.print(f"and {rest} further metrics: bit-equal")


def print_tokens(table: TokenTable, rows: np.ndarray, names: list[str], console: Console) -> None:
    view = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        view.add_column(name.replace("_", " "), justify="left" if name in TEXTS else "right", no_wrap=name in TEXTS)
    for row in rows:
        advantage = table["advantage"][row]
        style = "red" if not np.isfinite(advantage) else "dim" if advantage == 0 else "default"
        view.add_row(*(Text(cell(name, table[name][row])) for name in names), style=style)
    console.print(view)


def cell(name: str, value: Any) -> str:
    if name == "token":
        return repr(value)
    if isinstance(value, str | int | np.integer):
        return str(value)
    return f"{value:.1%}" if name.endswith("share") and np.isfinite(value) else f"{value:.4g}"


def stop_before_loss(objective: TokenObjective, tokens: Sequence[PolicyTokens]) -> None:
    """Open pdb right before the method's loss, on the micro-batch that holds the largest |loss|."""
    losses = [float(objective(t).loss.abs().max().nan_to_num(nan=torch.inf)) for t in tokens]
    index = int(np.argmax(losses))
    print(
        f"t: the {len(tokens[index].logprobs)} tokens of micro-batch {index} of {len(losses)}, which has the largest "
        f"|loss|.\ns: step into {type(objective.method).__name__}.loss.  n: run it, into answer.  c: continue."
    )
    step_into(objective.method, dataclasses.replace(tokens[index], logprobs=tokens[index].logprobs.requires_grad_()))


def step_into(method: PolicyMethod, t: PolicyTokens) -> TokenLoss:
    breakpoint()  # noqa: T100  --breakpoint opens pdb here
    answer = method.loss(t)
    return answer  # noqa: RET504  the name makes it visible in pdb


if __name__ == "__main__":
    sys.exit(main())
