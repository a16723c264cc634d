"""The gain from packing and shared prompts: forward and backward of a training step, head included.

    python -m benchmarks.packing                     # float32, about two minutes on two cores
    python -m benchmarks.packing --dtype bfloat16

Packed against padded, with otherwise the same code (attention, head, token budget), on lengths drawn log-normally with
sigma 0.8. Padded in three ways: to the longest of the step, to the longest of each micro-batch in the order drawn, and
the same after sorting; padded responses go through the head as well, as in any trainer on rectangular tensors. Then a
group's prompt computed once against once per response. Rates count real tokens only. Both wall-clock and processor
seconds are printed; the latter are valid on a busy machine too. A small model with random weights keeps this short.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import transformers

from data_feeds.packing import MicroBatch, Segment, pack
from data_feeds.responses import Responses
from orchestration.cluster.devices import resolve
from orchestration.model.policy_model import PolicyModel
from orchestration.model.prepared_batch import to_device
from records.rollout import Prompt, Trajectory

VOCABULARY = 8_192


def build_model(dtype: torch.dtype) -> PolicyModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    hf_model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=resolve("cpu").attention)
    return PolicyModel(hf_model).to(dtype)


def trajectory(group: int, prompt_ids: np.ndarray, length: int, rng: np.random.Generator) -> Trajectory:
    return Trajectory(
        prompt=Prompt(str(group), []),
        group_id=str(group),
        sample=0,
        prompt_ids=prompt_ids,
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        is_action=np.ones(length, bool),
        turn=np.zeros(length, np.int32),
    )


def log_normal(count: int, median: float, sigma: float, prompt: int, rng: np.random.Generator) -> list[Trajectory]:
    lengths = np.exp(rng.normal(np.log(median), sigma, size=count)).astype(int).clip(1, 2048)
    return [trajectory(i, rng.integers(0, VOCABULARY, prompt).astype(np.int32), n, rng) for i, n in enumerate(lengths)]


def packed(trajectories: list[Trajectory], max_tokens: int, share_prompts: bool) -> list[MicroBatch]:
    groups = np.asarray([int(t.group_id) for t in trajectories])
    weights = np.full(len(trajectories), 1.0 / sum(t.action_tokens for t in trajectories))
    advantages = np.random.default_rng(1).normal(size=len(trajectories))
    responses = Responses(trajectories)
    columns = responses.columns(0, advantages=advantages)
    return pack(responses, groups, weights, columns, max_tokens, 1, share_prompts)[0]


def padded(trajectories: list[Trajectory], max_tokens: int, how: str) -> list[MicroBatch]:
    """Return micro-batches of at most max_tokens tokens, padding included; how: "step", "micro-batch" or "sorted"."""
    single = packed(trajectories, 1, False)  # a budget of one token: every trajectory alone
    single.sort(key=lambda b: (b.tokens if how == "sorted" else 0, b.trajectory_index[0]))
    least = max(b.tokens for b in single) if how == "step" else 0
    rows: list[list[MicroBatch]] = []
    for batch in single:
        if rows and (len(rows[-1]) + 1) * max(least, *(b.tokens for b in [*rows[-1], batch])) <= max_tokens:
            rows[-1].append(batch)
        else:
            rows.append([batch])
    return [_as_rectangle(row, max(least, *(b.tokens for b in row), 0)) for row in rows]


def _as_rectangle(row: list[MicroBatch], longest: int) -> MicroBatch:
    """Return every sequence continued with padding to `longest`; padding is predicted too, with weight 0."""
    missing = [longest - batch.tokens for batch in row]
    predict = [np.arange(batch.predict[0], longest) + i * longest for i, batch in enumerate(row)]

    def stretched(of: Callable[[MicroBatch], np.ndarray]) -> np.ndarray:
        return np.concatenate([np.pad(of(b), (0, extra)) for b, extra in zip(row, missing, strict=True)])

    return replace(
        row[0],
        position_ids=np.tile(np.arange(longest), len(row)),
        segments=tuple(Segment(i * longest, longest) for i in range(len(row))),
        predict=np.concatenate(predict),
        sequence=np.repeat(np.arange(len(row)), [len(p) for p in predict]),
        group=np.concatenate([batch.group for batch in row]),
        trajectory_index=np.concatenate([batch.trajectory_index for batch in row]),
        input_ids=stretched(lambda b: b.input_ids),
        targets=stretched(lambda b: b.targets),
        loss_weights=stretched(lambda b: b.loss_weights),
        columns={"advantages": stretched(lambda b: b.columns["advantages"])},
    )


def step(model: PolicyModel, batches: list[MicroBatch]) -> tuple[float, float]:
    """Run a step forward and backward, adding gradients up in the model; return (wall, processor) seconds."""
    model.zero_grad()
    wall, processor = time.perf_counter(), time.process_time()
    for batch in batches:
        prepared = to_device(batch, "cpu")
        logprobs, _ = model(prepared)
        (logprobs * prepared.columns["advantages"] * prepared.loss_weights).sum().backward()
    return time.perf_counter() - wall, time.process_time() - processor


def compare(
    model: PolicyModel, ways: dict[str, Callable[[], list[MicroBatch]]], real_tokens: int, repeats: int
) -> None:
    """Run all ways in turn; print their best times, and ratios and gradient differences to the first."""
    batches = {name: make() for name, make in ways.items()}
    seconds = dict.fromkeys(ways, (np.inf, np.inf))
    gradients: dict[str, list[torch.Tensor]] = {}
    for _ in range(repeats):
        for name in ways:
            wall, processor = step(model, batches[name])
            seconds[name] = min(wall, seconds[name][0]), min(processor, seconds[name][1])
            gradients[name] = [p.grad.float().clone() for p in model.parameters() if p.grad is not None]
    first = next(iter(ways))
    scale = max(float(g.abs().max()) for g in gradients[first])
    for name in ways:
        wall, processor = seconds[name]
        computed = sum(batch.tokens for batch in batches[name])
        difference = max(float((a - b).abs().max()) for a, b in zip(gradients[name], gradients[first], strict=True))
        print(
            f"{name:28} {len(batches[name]):3} micro-batches  {computed:6} tokens computed  {real_tokens / wall:6.0f} real tokens/s"
            f"   {wall:5.1f} s wall  {processor:5.1f} s processor   {first} is {wall / seconds[first][0]:.2f}x (wall),"
            f" {processor / seconds[first][1]:.2f}x (processor) as fast   gradient difference {difference / scale:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=int, default=4096, help="tokens per micro-batch")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build_model(getattr(torch, args.dtype))
    rng = np.random.default_rng(0)
    step(model, packed(log_normal(4, 50, 0.1, 8, rng), args.budget, False))  # warm-up

    drawn = log_normal(args.sequences, 150, 0.8, 16, rng)
    lengths = np.asarray([len(t.prompt_ids) + len(t.token_ids) for t in drawn])
    print(
        f"{args.dtype}, {args.threads} threads; {len(drawn)} sequences, mean {lengths.mean():.0f}, longest {lengths.max()}"
    )
    ways: dict[str, Callable[[], list[MicroBatch]]] = {
        "packed": lambda: packed(drawn, args.budget, False),
        "padded to the step": lambda: padded(drawn, args.budget, "step"),
        "padded to the micro-batch": lambda: padded(drawn, args.budget, "micro-batch"),
        "padded, sorted by length": lambda: padded(drawn, args.budget, "sorted"),
    }
    compare(model, ways, int(lengths.sum()), args.repeats)

    groups = []
    for group in range(3):
        prompt_ids = rng.integers(0, VOCABULARY, 256).astype(np.int32)
        groups += [trajectory(group, prompt_ids, 64, rng) for _ in range(8)]
    print("3 groups of 8 responses, prompt 256, response 64")
    ways = {
        "shared prompt": lambda: packed(groups, args.budget, True),
        "repeated prompt": lambda: packed(groups, args.budget, False),
    }
    compare(model, ways, len(groups) * 320, args.repeats)


if __name__ == "__main__":
    main()
