"""Compare our tokens per second with those of a bare `vllm.LLM.generate`: python -m benchmarks.rollout_throughput

Same prompts, model, engine arguments, threads and sampling, each in processes of its own, one after the other, in
rounds. The target is a ratio of at least 0.9. The bare engine returns no log-probabilities, which favours it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

from rollouts.vllm.engine import VLLMEngine
from rollouts.vllm.sampling import Sampling
from rollouts.vllm.settings import cpu_environment

SUBJECTS = ("bare", "bare_logprobs", "ours", "ours_seeded")
TARGET = 0.9


def arithmetic_prompts(model: str, count: int) -> list[list[int]]:
    """Return chat prompts like those of the default job, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(0)
    prompts = []
    for _ in range(count):
        question = (
            f"State the final answer to the following arithmetic problem: {draw.randint(0, 9)} + {draw.randint(0, 9)} ="
        )
        messages = [
            {"role": "system", "content": "Answer with a single number."},
            {"role": "user", "content": question},
        ]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return prompts


def engine_of(options: argparse.Namespace) -> VLLMEngine:
    return VLLMEngine(
        options.model, dtype=options.dtype, device=options.device, max_model_len=options.max_model_len, threads=options.threads,
        engine=json.loads(options.engine),
    )  # fmt: skip


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its children; other processes hardly change them."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def report(tokens: int, clock_start: float, cpu_start: float) -> dict[str, float]:
    return {"tokens": tokens, "seconds": time.perf_counter() - clock_start, "cpu_seconds": cpu_seconds() - cpu_start}


async def measure_ours(options: argparse.Namespace, sampling: Sampling) -> list[dict[str, float]]:
    """Measure phases of our engine: all requests of a step at once, each on its own."""
    prompts = arithmetic_prompts(options.model, options.prompts)
    engine = engine_of(options)
    await engine.start()
    phases = []
    for step in range(options.phases + 1):
        clock, cpu = time.perf_counter(), cpu_seconds()
        calls = [
            engine.generate(prompt, sampling, step, str(i), sample)
            for i, prompt in enumerate(prompts)
            for sample in range(options.responses)
        ]
        made = await asyncio.gather(*calls)
        phases.append(report(sum(len(m.token_ids) for m in made), clock, cpu))
    await engine.shutdown()
    return phases[1:]  # the first one warms up


def measure_bare(options: argparse.Namespace, sampling: Sampling, logprobs: bool) -> list[dict[str, float]]:
    """Measure phases of vllm.LLM with the arguments that our engine would give, except those for weight transfer."""
    prompts = arithmetic_prompts(options.model, options.prompts)
    engine = engine_of(options)
    arguments = {k: v for k, v in engine.arguments.items() if not k.startswith(("worker_extension", "weight_transfer"))}
    from vllm import LLM

    llm = LLM(**arguments)
    parameters = sampling.to_vllm(0, "", 0)
    parameters.logprobs = 0 if logprobs else None
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(options.responses)]
    phases = []
    for _ in range(options.phases + 1):
        clock, cpu = time.perf_counter(), cpu_seconds()
        made = llm.generate(asked, parameters, use_tqdm=False)
        phases.append(report(sum(len(m.outputs[0].token_ids) for m in made), clock, cpu))
    return phases[1:]


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    sampling = Sampling(max_new_tokens=options.max_new_tokens, seeded=options.measure == "ours_seeded")
    if options.measure.startswith("ours"):
        return asyncio.run(measure_ours(options, sampling))
    return measure_bare(options, sampling, logprobs=options.measure == "bare_logprobs")


def in_its_own_process(subject: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run a measurement in a new process, started with the same threads for both sides."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    if options.device == "cpu":
        environment |= cpu_environment(options.threads)
    command = [sys.executable, "-m", "benchmarks.rollout_throughput", *sys.argv[1:], "--measure", subject]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder in Hugging Face format")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where vLLM runs")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="compute type")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per phase")
    parser.add_argument("--responses", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="limit of a response")
    parser.add_argument("--max-model-len", type=int, default=1040, help="prompt and response tokens")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the engine; 0: all cores")
    parser.add_argument("--phases", type=int, default=5, help="measured generation phases per engine")
    parser.add_argument("--rounds", type=int, default=1, help="times each engine is started and measured")
    parser.add_argument("--engine", default="{}", help="JSON of further vLLM arguments, for both sides")
    parser.add_argument("--measure", choices=SUBJECTS, help="measure one subject and print its phases as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    phases: dict[str, list[dict[str, float]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(options.rounds):
        for subject in SUBJECTS:
            print(f"measuring {subject} ...", file=sys.stderr, flush=True)
            phases[subject] += in_its_own_process(subject, options)
    print(f"{options.prompts} prompts x {options.responses} responses, up to {options.max_new_tokens} tokens; medians")
    clock = {s: statistics.median(p["tokens"] / p["seconds"] for p in phases[s]) for s in SUBJECTS}
    work = {s: statistics.median(p["tokens"] / p["cpu_seconds"] for p in phases[s]) for s in SUBJECTS}
    for subject in SUBJECTS:
        print(
            f"{subject:14s} {clock[subject]:8.0f} tokens/s  (ratio to bare {clock[subject] / clock['bare']:.3f})   "
            f"{work[subject]:8.0f} tokens per CPU second  (ratio to bare {work[subject] / work['bare']:.3f})"
        )
    ratio = clock["ours"] / clock["bare"]
    print(f"generation phase: {ratio:.2f} of bare vLLM (target: at least {TARGET})")
    print(f"seeding every request: {clock['ours_seeded'] / clock['ours']:.2f} of the unseeded tokens/s")


if __name__ == "__main__":
    main()
