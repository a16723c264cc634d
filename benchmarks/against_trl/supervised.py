"""Supervised and preference learning against trl's SFTTrainer and DPOTrainer: rates, peak memory and loss curves.

    python -m benchmarks.against_trl.supervised                      # all three figures, about eight minutes on 2 cores
    python -m benchmarks.against_trl.supervised --what sft-padding   # or sft-packing, dpo

Same model, tokens, trained tokens, learning rate, optimizer; bfloat16 compute with float32 masters. The two sides are
processes that take turns, a block of steps each, while the other sleeps: noise hits both, and each has a peak memory of
its own. Our side is main_sl.py's own code, with tokenising; trl tokenises before it starts, which is not counted.

sft-padding: both see the same examples at every step, so the losses are compared too. trl pads as many rows per forward
pass as fill about our micro-batch. sft-packing: trl's default strategy (bfd) makes rows of --pack-tokens; a step of
either side has about as many tokens. Without flash attention, only the mask that transformers makes of restarted
positions separates packed examples in trl; the difference between packed and separate log-probabilities is printed.
dpo: reference log-probabilities are computed before the first step on both sides.

Losses differ in the last digits: ours runs in bfloat16 throughout, trl by autocast with a float32 residual stream. With
the same weights of SmolLM2-135M, losses of batches of these chats (about 1.4) differed by 0.001 to 0.005 for that
reason.

Left out on both sides: start-up and --warmup steps. Rates count real tokens, never padding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.against_trl.supervised_sides import Contest, Step, ours, theirs

AIMS = {"sft-packing": 1.0, "sft-padding": 1.8, "dpo": 1.5}
LONGEST = 600  # tokens a drawn example is meant to have at most

Side = Callable[[Contest, Connection], None]
SIDES: dict[str, Side] = {"ours": ours, "trl": theirs}


@dataclass(frozen=True)
class Measured:
    """The results of one side."""

    blocks: list[list[Step]]
    peak_gigabytes: float  # resident, of the process, libraries included
    note: str

    @property
    def steps(self) -> list[Step]:
        return [step for block in self.blocks for step in block]


@contextmanager
def started(side: Side, contest: Contest) -> Iterator[Connection]:
    """Start a side in a process of its own, and yield the connection to it."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=side, args=(contest, other), daemon=True)
    process.start()
    other.close()  # so that reading ends when the process does
    try:
        yield mine
    finally:
        process.kill()  # it has said all there is; what trl saves at its end nobody needs
        process.join()


def compete(contest: Contest, warmup: int, block: int) -> dict[str, Measured]:
    """Run both sides in turns; return their blocks without the warm-up."""
    counts = [warmup] + [min(block, contest.steps - first) for first in range(warmup, contest.steps, block)]
    with started(ours, contest) as a, started(theirs, contest) as b:
        pipes = dict(zip(SIDES, (a, b), strict=True))
        notes = {name: pipe.recv() for name, pipe in pipes.items()}
        blocks: dict[str, list[list[Step]]] = {name: [] for name in pipes}
        for count in counts:
            for name, pipe in pipes.items():
                pipe.send(count)
                blocks[name].append([pipe.recv() for _ in range(count)])
        return {name: Measured(blocks[name][1:], pipe.recv(), notes[name]) for name, pipe in pipes.items()}


def rate(steps: list[Step]) -> float:
    return sum(step.work for step in steps) / sum(step.seconds for step in steps)


def show(contest: Contest, found: dict[str, Measured]) -> None:
    unit = "tokens" if contest.is_sft else "pairs"
    print(f"\n{contest.what}: {len(found['ours'].steps)} steps of {contest.examples} examples")
    for name, side in found.items():
        seconds = np.mean([step.seconds for step in side.steps])
        work = np.mean([step.work for step in side.steps])
        print(
            f"  {name:5} {rate(side.steps):8.2f} {unit}/s  {seconds:6.2f} s a step of {work:.0f} {unit}"
            f"  peak {side.peak_gigabytes:.1f} GB  ({side.note})"
        )
    ratios = [rate(a) / rate(b) for a, b in zip(found["ours"].blocks, found["trl"].blocks, strict=True)]
    ratio = rate(found["ours"].steps) / rate(found["trl"].steps)
    print(f"  ratio {ratio:.2f} (blocks {min(ratios):.2f} to {max(ratios):.2f}; aim: {AIMS[contest.what]} or better)")
    if contest.what == "sft-packing":
        return  # the sides see other examples at a step
    losses = {name: np.asarray([step.loss for step in side.steps]) for name, side in found.items()}
    gap = np.abs(losses["ours"] - losses["trl"])
    for name, curve in losses.items():
        print(f"  loss, {name:5} {' '.join(f'{loss:.4f}' for loss in curve)}")
    print(f"  loss differs by {gap.mean():.4f} in the mean, {gap.max():.4f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("all", *AIMS), default="all")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those (default: %(default)s)")
    parser.add_argument("--block", type=int, default=2, help="steps before the other's turn (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=16, help="examples of an SFT step (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of a DPO step (default: %(default)s)")
    parser.add_argument(
        "--pack-tokens", type=int, default=1024, help="tokens of a packed row of trl's (default: %(default)s)"
    )
    parser.add_argument(
        "--pack-rows", type=int, default=1, help="packed rows of a forward pass of trl's (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="float32 shows whether both compute the same loss: their roundings are alike then (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="of either side (default: %(default)s)")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS=str(options.threads), OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
    for what in AIMS if options.what == "all" else (options.what,):
        with tempfile.TemporaryDirectory() as folder:
            contest = prepared(what, options.model, Path(folder), options.warmup + options.steps, options)
            show(contest, compete(contest, options.warmup, options.block))


def prepared(what: str, model: str, folder: Path, steps: int, options: argparse.Namespace) -> Contest:
    """Return the contest, with its rows written."""
    from benchmarks.against_trl.ragged_chats import write_chats, write_pairs

    rows = folder / "rows.jsonl"
    contest = Contest(
        what, model, str(rows), str(folder), steps, options.examples, 1, options.pack_tokens, dtype=options.dtype
    )
    if what == "sft-packing":
        contest = replace(contest, trl_rows=options.pack_rows)
    elif what == "sft-padding":
        contest = replace(contest, trl_rows=max(1, options.examples // 2))
    else:
        contest = replace(contest, examples=options.pairs, trl_rows=max(1, options.pairs // 2), learning_rate=5e-6)
    write = write_chats if contest.is_sft else write_pairs
    write(rows, (steps + 1) * contest.examples, contest.seed, LONGEST)
    return contest


if __name__ == "__main__":
    main()
