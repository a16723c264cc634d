"""Load and pack many rows: is time linear, is memory bounded?

    python -m benchmarks.load_rows                      # 100,000, 300,000 and 1,000,000 rows: a quarter of an hour
    python -m benchmarks.load_rows --draw 100000        # all opened, 100,000 of each drawn
    python -m benchmarks.load_rows --rows 10000 30000   # a minute

For each size, in a process of its own: a parquet file of questions and answers is written; the feed of a supervised job
is opened (every row is read, checked and hashed for the split); then one epoch (or --draw rows of it) is drawn in
random order, tokenised by the model's chat template with its mask, and packed. Rates count rows and real tokens per
processor second (one thread), which are valid on a busy machine too; wall-clock time is printed beside them. Memory is
the process's own (anonymous) at its highest after the libraries were loaded; pages of mapped files are shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from configs.blocks.supervised_data import SLData
from data_feeds.chat.template import load_tokenizer
from data_feeds.examples.supervised_data import load_supervised_data
from data_feeds.packing import pack
from data_feeds.responses import Responses

WORDS = ("a", "quick", "fox", "jumps", "over", "the", "lazy", "dog", "while", "seven", "old", "wizards", "count")
ROWS_PER_BATCH = 256
TOKENS_PER_MICRO_BATCH = 8192


@dataclass(frozen=True)
class Result:
    rows: int
    drawn: int
    file_mb: float
    open_cpu: float  # processor seconds: copy, check, hash, split
    feed_cpu: float  # processor seconds: draw, tokenise, pack
    open_wall: float  # seconds
    feed_wall: float
    tokens: int
    micro_batches: int
    base_mb: float  # own memory with libraries and tokenizer loaded
    peak_mb: float  # highest own memory after
    mapped_mb: float  # mapped files in memory at the end


def write_rows(path: Path, rows: int) -> None:
    """Write distinct questions with answers of unequal length, 10,000 rows at a time."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 10_000):
            numbers = range(start, min(start + 10_000, rows))
            lengths = np.exp(rng.normal(2, 0.8, len(numbers))).astype(int).clip(1, 200)
            words = [[WORDS[(i + k) % len(WORDS)] for k in range(n)] for i, n in zip(numbers, lengths, strict=True)]
            prompts = [f"question {i}: what does {WORDS[i % len(WORDS)]} mean?" for i in numbers]
            writer.write_table(pa.table({"prompt": prompts, "answer": [" ".join(w) for w in words]}, schema=schema))


def measure(rows: int, draw: int, model: str) -> Result:
    """Measure one size, in this process; `draw` of its rows are tokenised and packed."""
    tokenizer = load_tokenizer(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_rows(path, rows)
        data = SLData.model_validate(
            {"sources": [{"file": str(path)}], "heldout_fraction": 0.0, "cache_dir": str(Path(folder) / "cache")}
        )
        base = peak = memory_mb("RssAnon")
        started, started_cpu = time.perf_counter(), time.process_time()
        feed = load_supervised_data(data, "demonstrations", tokenizer, seed=0)
        opened, opened_cpu = time.perf_counter(), time.process_time()
        peak = max(peak, memory_mb("RssAnon"))
        tokens = micro_batches = drawn = 0
        while drawn < draw:
            batch = feed.sampler.next(min(ROWS_PER_BATCH, draw - drawn))
            drawn += len(batch)
            members = [t for example in batch for t in example]
            responses, ones = Responses(members), np.ones(len(members), dtype=np.float32)
            columns = responses.columns(0, advantages=ones)
            (packed,) = pack(responses, np.arange(len(members)), ones, columns, TOKENS_PER_MICRO_BATCH, 1, False)
            tokens += sum(micro.tokens for micro in packed)
            micro_batches += len(packed)
            peak = max(peak, memory_mb("RssAnon"))
            if drawn // 100_000 > (drawn - len(batch)) // 100_000 and drawn < draw:
                rate = drawn / (time.process_time() - opened_cpu)
                print(
                    f"    {drawn:,} of {rows:,} rows: {rate:,.0f} rows per processor second",
                    file=sys.stderr,
                    flush=True,
                )
        ended, ended_cpu = time.perf_counter(), time.process_time()
        assert feed.sampler.metrics()["epoch/rows"] == draw / rows
        return Result(
            rows,
            draw,
            path.stat().st_size / 1e6,
            opened_cpu - started_cpu,
            ended_cpu - opened_cpu,
            opened - started,
            ended - opened,
            tokens,
            micro_batches,
            base,
            peak,
            memory_mb("RssFile"),
        )


def memory_mb(kind: str) -> float:
    """Return this process's memory now: RssAnon (its own) or RssFile (mapped files), in 10^6 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"/proc/self/status has no {kind}: this benchmark needs Linux")


def table(results: list[Result]) -> list[str]:
    """Return a line per size; rates are relative to the first: 1.0 in every line means linear time."""
    lines = [
        f"{'rows':>10} {'file MB':>8} | {'open: wall s':>12} {'rows/s':>8} {'rel.':>5} | {'drawn':>9} {'wall s':>7} {'rows/s':>7} "
        f"{'rel.':>5} {'tokens/s':>9} | {'own MB before':>13} {'peak':>6} {'bytes/row':>9} {'mapped MB':>9}"
    ]
    first = results[0]
    for r in results:
        opening, feeding = r.rows / r.open_cpu, r.drawn / r.feed_cpu
        lines.append(
            f"{r.rows:>10,} {r.file_mb:>8.1f} | {r.open_wall:>12.1f} {opening:>8,.0f} "
            f"{opening / (first.rows / first.open_cpu):>5.2f} | {r.drawn:>9,} {r.feed_wall:>7.1f} {feeding:>7,.0f} "
            f"{feeding / (first.drawn / first.feed_cpu):>5.2f} {r.tokens / r.feed_cpu:>9,.0f} | "
            f"{r.base_mb:>13.0f} {r.peak_mb:>6.0f} {(r.peak_mb - r.base_mb) * 1e6 / r.rows:>9.0f} {r.mapped_mb:>9.0f}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument(
        "--model", default="models/SmolLM2-135M-Instruct", help="folder with tokenizer and chat template"
    )
    parser.add_argument("--draw", type=int, help="rows to draw of each size; default: all, one epoch")
    parser.add_argument("--one", action="store_true", help="measure the first size in this process and print JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(asdict(measure(given.rows[0], given.draw or given.rows[0], given.model))))
        return 0
    results = []
    for rows in given.rows:
        command = [sys.executable, "-m", "benchmarks.load_rows", "--one", "--rows", str(rows), "--model", given.model]
        command += ["--draw", str(min(rows, given.draw or rows))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        fields: dict[str, Any] = json.loads(done.stdout)
        results.append(Result(**fields))
        print("\n".join(table(results)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
