"""Pause of generation per sync, and GB/s of each method against a memcpy: python -m benchmarks.weight_sync

One engine (vLLM, bf16) and one sender on this machine, as in a job with one trainer rank that holds whole weights. For
every model and method: `--syncs` updates with new bytes while a few long responses are being generated. The pause is
the time in which nothing was generated; the rate is over the whole sync, from the first tensor gathered to the last one
loaded, without gathering from shards (ZeRO-3). The models are SmolLM2-135M and a random Qwen2 of about 0.5B parameters;
`--quick` takes a small random model instead, to see that the script works.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from configs.blocks.sync import SyncMethod
from orchestration.cluster.devices import resolve
from orchestration.weight_transfer.broadcaster import WeightBroadcaster
from orchestration.weight_transfer.file_publisher import WeightPublisher
from rollouts.vllm.engine import LoadReport, VLLMEngine
from rollouts.vllm.sampling import Sampling
from rollouts.vllm.weight_file import TensorInfo

SMOL = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct"
RESPONSES = 4


@dataclass(frozen=True)
class Row:
    """The results of one model and method."""

    model: str
    method: str
    megabytes: float
    pause_seconds: float  # median over syncs
    sync_seconds: float
    read_back_seconds: float  # of the pause, to compare what the engine holds with what it was sent

    @property
    def gigabytes_per_second(self) -> float:
        return self.megabytes / 1e3 / self.sync_seconds


def random_qwen(folder: Path, quick: bool) -> Path:
    """Write a Qwen2 with random weights in bf16: 494M parameters, the shape of Qwen2.5-0.5B, or 4M when quick."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size: dict[str, int] = (
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 16_384}
        if quick
        else {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936}
    )
    heads = {"num_attention_heads": size["hidden_size"] // 64, "num_key_value_heads": 2}
    config = Qwen2Config(**size, **heads, tie_word_embeddings=True, max_position_embeddings=2048)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def weights_of(model: Path) -> list[tuple[str, Tensor]]:
    """Return the model's own tensors, under its own names."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    return [(name, parameter.detach()) for name, parameter in loaded.named_parameters()]


def memcpy_gigabytes_per_second(size_bytes: int) -> float:
    """Copy the same number of bytes within this process; return the best rate of three after a first one."""
    source, target = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return size_bytes / 1e9 / min(seconds[1:])


class Sender:
    """The trainer's side of one method."""

    def __init__(self, method: SyncMethod, folder: Path) -> None:
        self.method = method
        self.pool = ThreadPoolExecutor(1)
        self.broadcaster = WeightBroadcaster(resolve("cpu"), bucket_mib=1.0) if method == "nccl" else None
        self.publisher = WeightPublisher(method, folder) if method != "nccl" else None

    async def connect(self, engine: VLLMEngine) -> None:
        if self.broadcaster is not None:
            offer = self.broadcaster.offer()
            joining = self.pool.submit(self.broadcaster.join, offer, 2, 600.0, 60.0)
            await engine.join_transfer(
                {**offer, "first_rank": 1, "size": 2, "timeout_seconds": 600.0, "join_seconds": 60.0}
            )
            joining.result()

    async def sync(self, engine: VLLMEngine, version: int, tensors: list[tuple[str, Tensor]]) -> LoadReport:
        """Send a version and return the engine's report."""
        if self.broadcaster is not None:
            infos = [TensorInfo.of(*pair) for pair in tensors]
            sending = self.pool.submit(self.broadcaster.send, version, tensors, infos)
            report = await engine.load_weights(version, {"version": version})
            sending.result()
        else:
            assert self.publisher is not None
            notice = await asyncio.wrap_future(self.pool.submit(self.publisher.publish, version, iter(tensors)))
            report = await engine.load_weights(version, notice)
        return report

    def close(self) -> None:
        for side in (self.broadcaster, self.publisher):
            if side is not None:
                side.close()
        self.pool.shutdown()


async def measured(name: str, model: Path, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure every method on one engine."""
    engine = VLLMEngine(str(model), dtype="bfloat16", device="cpu", max_model_len=2048, threads=options.threads)
    await engine.start()
    tensors, version = weights_of(model), 0
    megabytes = sum(tensor.nbytes for _, tensor in tensors) / 1e6
    rows = []
    for method in options.methods:
        sender = Sender(method, folder / "weights")
        await sender.connect(engine)
        reports, seconds = [], []
        for _ in range(options.syncs + 1):
            calls = list(begin_responses(engine, version))
            await asyncio.sleep(options.between_seconds)
            version += 1
            started = time.perf_counter()
            reports.append(await sender.sync(engine, version, tensors))
            seconds.append(time.perf_counter() - started)
            await engine.abort()
            await asyncio.gather(*calls)
        sender.close()
        pause_seconds = statistics.median(report.pause_seconds for report in reports[1:])
        read_back_seconds = statistics.median(report.read_back.seconds for report in reports[1:])
        rows.append(Row(name, method, megabytes, pause_seconds, statistics.median(seconds[1:]), read_back_seconds))
        print(shown(rows[-1]), flush=True)
    await engine.shutdown()
    return rows


def begin_responses(engine: VLLMEngine, step: int) -> Iterator[asyncio.Task[Any]]:
    """Yield responses that continue until they are ended."""
    sampling = Sampling(max_new_tokens=1500)
    for i in range(RESPONSES):
        yield asyncio.create_task(engine.generate([5, 6, 7], sampling, step, "p", i))


def shown(row: Row) -> str:
    return (
        f"{row.model:<14}{row.method:<8}{row.megabytes:>9.0f} MB{row.pause_seconds:>10.3f} s pause"
        f" ({row.read_back_seconds:.3f} s read back)"
        f"{row.sync_seconds:>9.3f} s in all{row.gigabytes_per_second:>9.2f} GB/s"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weight_sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    methods: tuple[SyncMethod, ...] = get_args(SyncMethod)
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    parser.add_argument("--syncs", type=int, default=7, help="measured updates per method, after one that is not")
    parser.add_argument("--threads", type=int, default=1, help="of the engine; the sender works beside it")
    parser.add_argument("--between-seconds", type=float, default=1.0, help="generation before each update")
    parser.add_argument("--quick", action="store_true", help="a model of 4M parameters and two updates")
    options = parser.parse_args(argv)
    if options.quick:
        options.syncs, options.between_seconds = 2, 0.2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"random 4M": random_qwen(folder / "model", quick=True)} if options.quick else {"SmolLM2-135M": SMOL}
        if not options.quick:
            models["random 0.5B"] = random_qwen(folder / "model", quick=False)
        rows = [row for name, model in models.items() for row in asyncio.run(measured(name, model, options, folder))]
        print(
            f"\n{'model':<14}{'method':<8}{'MB':>8}{'pause s':>10}{'read back s':>13}{'GB/s':>8}{'memcpy GB/s':>13}{'of memcpy':>11}"
        )
        for row in rows:
            memcpy = memcpy_gigabytes_per_second(int(1e6 * row.megabytes))
            print(
                f"{row.model:<14}{row.method:<8}{row.megabytes:>8.0f}{row.pause_seconds:>10.3f}"
                f"{row.read_back_seconds:>13.3f}{row.gigabytes_per_second:>8.2f}{memcpy:>13.2f}{row.gigabytes_per_second / memcpy:>11.0%}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
