"""Memory and time of chunked log-probabilities against the naive way, forward and backward.

    python -m benchmarks.chunked_logprobs                    # 4,096 tokens, vocabulary 151,936, hidden 896
    python -m benchmarks.chunked_logprobs --dtype float32

Each way runs in a process of its own. Memory is the peak resident size above what the process held before the first
forward pass (inputs and weight), so the weight's gradient counts. Time is the second of two passes: the first one also
pays for fresh pages. Processor seconds (over all threads), printed beside wall-clock, are valid on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

WAYS = ("naive", "chunked")


def measure(way: str, tokens: int, vocabulary: int, hidden: int, dtype: str) -> dict[str, float]:
    import torch

    from orchestration.model.chunked_logprobs import token_logprobs

    torch.manual_seed(0)
    states = torch.randn(tokens, hidden).to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn(vocabulary, hidden) * 0.05).to(getattr(torch, dtype)).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    factors = torch.randn(tokens)

    def naive() -> tuple[torch.Tensor, torch.Tensor]:
        logp = torch.log_softmax((states @ weight.T).float(), dim=-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(1, targets[:, None])[:, 0], entropy

    held = resident_bytes()
    for _ in range(2):
        states.grad = weight.grad = None
        wall, processor = time.perf_counter(), time.process_time()
        logprobs, entropy = naive() if way == "naive" else token_logprobs(states, weight, targets)
        (logprobs * factors).sum().backward()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert states.grad is not None
    return {
        "gibibytes": (peak - held) / 2**30,
        "wall_seconds": wall,
        "processor_seconds": processor,
        "logprob_sum": float(logprobs.detach().double().sum()),
        "entropy_sum": float(entropy.detach().double().sum()),
        "gradient_norm": float(states.grad.double().norm()),
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.tokens, args.vocabulary, args.hidden, args.dtype)))
        return
    print(
        f"{args.tokens} tokens x {args.vocabulary} vocabulary, hidden {args.hidden}, {args.dtype}, {args.threads} threads"
    )
    results = {}
    for way in WAYS:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.chunked_logprobs", *sys.argv[1:], "--way", way],
            env={**os.environ, "OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        r = results[way] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{way:8} peak {r['gibibytes']:.2f} GiB   {r['wall_seconds']:.1f} s wall   {r['processor_seconds']:.1f} s processor"
            f"   sum log p {r['logprob_sum']:.3f}   sum entropy {r['entropy_sum']:.3f}   |gradient| {r['gradient_norm']:.5f}"
        )
    ratio = {key: results["chunked"][key] / results["naive"][key] for key in results["naive"]}
    print(f"memory ratio {ratio['gibibytes']:.3f} (goal: at most 0.25)")
    print(
        f"time ratio {ratio['wall_seconds']:.2f} wall, {ratio['processor_seconds']:.2f} processor (goal: at most 1.3)"
    )


if __name__ == "__main__":
    main()
