"""What two CPU sides cost each other: trainer and engine alone, in turn and at once: python -m benchmarks.core_split

Real vLLM engine and real trainer of one model, each in a process of its own, working for a fixed time in every case. The
last column says whether working at the same time pays: the share of its speed alone on all cores that each side keeps,
added up. Taking turns is 1; above 1, more work is done in the same time. --tiny tries the script out in a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from orchestration.cluster.cpu_cores import bind_to
from orchestration.cluster.devices import environment_for_trainer
from orchestration.cluster.launcher_rank import join_ranks

IDS = 4, 16  # token ids that every model has
MARK = "core_split "  # begins the lines that are meant for the parent; vLLM prints too


class Case(NamedTuple):
    """Who works, on how many threads each, and on which cores ((): wherever the kernel puts them)."""

    name: str
    generate: tuple[int, tuple[int, ...]] | None
    train: tuple[int, tuple[int, ...]] | None


def cases(cores: int) -> list[Case]:
    """Alone on all cores and on its part; both at once. The trainer's part is as configs/blocks/placement.py shares out cores."""
    engines = max(1, cores // 2)
    trainer = max(1, cores - engines)
    first, last = tuple(range(trainer)), tuple(range(trainer, cores))
    return [
        Case(f"generate alone, {cores} threads", (cores, ()), None),
        Case(f"generate alone, {engines} threads", (engines, ()), None),
        Case(f"train alone, {cores} threads", None, (cores, ())),
        Case(f"train alone, {trainer} threads", None, (trainer, ())),
        Case(f"both at once, {engines} + {trainer} threads", (engines, ()), (trainer, ())),
        Case(f"both at once, {engines} + {trainer} bound", (engines, last), (trainer, first)),
        Case(f"both at once, {cores} threads each", (cores, ()), (cores, ())),
    ]


def work(phase: Callable[[], int], seconds: float) -> float:
    """Tokens per second of whole phases, as many as end in time (at least one), after one to warm up and a word from the
    parent. A phase more is begun, so that the other side is not left alone before its time is over."""
    phase()
    print(f"{MARK}ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the parent is gone")
    began, tokens, rate = time.perf_counter(), 0, 0.0
    while time.perf_counter() - began < seconds or not rate:
        tokens += phase()
        spent = time.perf_counter() - began
        if spent <= seconds or not rate:
            rate = tokens / spent
    return rate


def generate(options: argparse.Namespace) -> float:
    from rollouts.vllm.engine import VLLMEngine
    from rollouts.vllm.sampling import Sampling

    sampling = Sampling(max_new_tokens=options.new_tokens, seeded=False)
    prompts = np.random.default_rng(0).integers(*IDS, (options.sequences, options.prompt_tokens))
    engine = VLLMEngine(
        options.model,
        dtype=options.dtype,
        max_model_len=options.prompt_tokens + options.new_tokens,
        threads=options.threads,
    )
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())

    async def all_at_once() -> int:
        made = await asyncio.gather(*(engine.generate(p, sampling, 0, str(i), 0) for i, p in enumerate(prompts)))
        return sum(len(one.token_ids) for one in made)

    try:
        return work(lambda: loop.run_until_complete(all_at_once()), options.seconds)
    finally:
        loop.run_until_complete(engine.shutdown())


def train(options: argparse.Namespace) -> float:
    os.environ |= environment_for_trainer("cpu", options.threads)  # before torch is imported
    join_ranks()
    from algs.grpo import GRPO
    from configs.blocks.rl import Model, Train
    from data_feeds.packing import pack
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer
    from records.rollout import Prompt, Trajectory

    draw, new = np.random.default_rng(0), options.new_tokens
    trajectories = [
        Trajectory(
            Prompt(f"{i}", []), f"{i}", 0, draw.integers(*IDS, options.prompt_tokens).astype(np.int32),
            token_ids=draw.integers(*IDS, new).astype(np.int32), behavior_logprobs=np.full(new, -4, np.float32),
            versions=np.zeros(new, np.int32), is_action=np.ones(new, np.bool_), turn=np.zeros(new, np.int32),
        )
        for i in range(options.sequences)
    ]  # fmt: skip
    count = len(trajectories)
    batches = pack(
        trajectories, np.arange(count), draw.normal(size=count), np.full(count, 1 / count / new), version=0, max_tokens=2048,
        ranks=1, share_prompts=False,
    )  # fmt: skip
    settings = TrainerSettings(
        Model(path=options.model, dtype=options.dtype, device="cpu"),
        Train(),
        temperature=1.0,
        seed=0,
        total_updates=1000,
    )
    trainer = Trainer(settings, GRPO(GRPO.Params(clip_low=0.2, clip_high=0.2)), resolve("cpu"))

    def step() -> int:
        trainer.step([batches[0]])
        return sum(len(batch.input_ids) for batch in batches[0])

    return work(step, options.seconds)


SIDES = {"generate": generate, "train": train}


def started(side: str, threads: int, positions: Sequence[int], arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.core_split", *arguments, "--side", side, "--threads", str(threads)]
    command += ["--cores", ",".join(map(str, positions))]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def heard(side: str, stream: IO[str]) -> str:
    """The next line meant for the parent. Raises RuntimeError: the side ended without one."""
    for line in stream:
        if line.startswith(MARK):
            return line.removeprefix(MARK).strip()
    raise RuntimeError(
        f"the side that should {side} ended early; run it on its own: python -m benchmarks.core_split --side {side}"
    )


def measured(case: Case, arguments: list[str]) -> dict[str, float]:
    """Tokens per second of each side of the case."""
    sides = {side: how for side, how in (("generate", case.generate), ("train", case.train)) if how is not None}
    processes = {side: started(side, threads, cores, arguments) for side, (threads, cores) in sides.items()}
    try:
        for side, process in processes.items():
            assert process.stdout is not None
            assert heard(side, process.stdout) == "ready"
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return {side: float(heard(side, p.stdout)) for side, p in processes.items() if p.stdout is not None}
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for process in processes.values():
            process.wait()


def print_table(found: dict[str, dict[str, float]]) -> None:
    """One line a case; the first and the third are what the others are compared with."""
    rates = list(found.values())
    best = {"generate": rates[0]["generate"], "train": rates[2]["train"]}
    print(f"{'':36s} {'generate':>12s} {'train':>12s}   work, where taking turns is 1")
    for name, rate in found.items():
        cells = [f"{rate[side]:8.0f} t/s" if side in rate else f"{'':12s}" for side in SIDES]
        kept = sum(rate[side] / best[side] for side in rate)
        print(f"{name:36s} {cells[0]} {cells[1]}   {f'{kept:.2f}' if len(rate) == 2 else f'({kept:.2f} of all cores)'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder in Hugging Face format")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="compute type")
    parser.add_argument(
        "--tiny", action="store_true", help="the half-million-parameter model, in float32, for 5 seconds"
    )
    parser.add_argument(
        "--sequences", type=int, default=64, help="of a generation phase, and of an optimizer step (64)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=40, help="of each (40)")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each (16)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of measured work per case (40)")
    parser.add_argument("--side", choices=tuple(SIDES), help="be one side; the parent starts these")
    parser.add_argument("--threads", type=int, default=1, help="of the side")
    parser.add_argument("--cores", default="", help="that the side is bound to")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.dtype, options.seconds = "models/tiny-sorter", "float32", 5.0
    if options.side:
        bind_to([int(core) for core in options.cores.split(",") if core])
        print(f"{MARK}{SIDES[options.side](options)}", flush=True)
        return
    if not Path(options.model).is_dir():
        parser.error(
            f"{options.model} is not there; make it with python -m data_prep.smollm2 or data_prep.tiny_sorter_model"
        )
    found: dict[str, dict[str, float]] = {}
    for case in cases(len(os.sched_getaffinity(0))):
        print(f"measuring: {case.name} ...", file=sys.stderr, flush=True)
        found[case.name] = measured(case, sys.argv[1:])
    print_table(found)


if __name__ == "__main__":
    main()
