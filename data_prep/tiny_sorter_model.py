"""Make everything for configs/grpo_tiny.yaml: the data, and a tiny Llama taught to copy, reverse and sort a little.

    python -m data_prep.tiny_sorter_model [--out models/tiny-sorter]

The supervised steps run on the same trainer, packing and loss code as every other job, with one rank in this process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from data_prep import tiny_sorter

DEFAULT_OUT = Path("models/tiny-sorter")
STEPS, BATCH, LEARNING_RATE = 250, 64, 3e-3


def teach(untrained: Path, out: Path, seed: int, steps: int = STEPS) -> float:
    """Run supervised steps from the model in `untrained`; write the result to `out` and return the last loss."""
    from algs.sft import SFT
    from configs.blocks.rl import Model, Train
    from data_feeds.chat.template import load_tokenizer
    from data_feeds.packing import pack
    from data_feeds.responses import Responses
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer

    train = Train(steps=steps, learning_rate=LEARNING_RATE, schedule="cosine", warmup_steps=10, zero_stage=0)
    model = Model(path=str(untrained), dtype="float32", device="cpu")
    trainer = Trainer(TrainerSettings(model, train, 1.0, seed, steps), SFT(SFT.Params()), resolve("cpu"))
    tokenizer = load_tokenizer(str(untrained))
    examples = tiny_sorter.sft_trajectories(steps * BATCH, seed, tokenizer)
    loss = float("nan")
    for step in range(steps):
        rows = examples[step * BATCH : (step + 1) * BATCH]
        tokens = sum(row.action_tokens for row in rows)
        responses = Responses(rows)
        batches = pack(
            responses,
            groups=np.arange(BATCH),
            loss_weights=np.full(BATCH, 1 / tokens, dtype=np.float32),
            columns=responses.columns(0, advantages=np.zeros(BATCH, dtype=np.float32)),
            max_tokens=train.max_tokens_per_micro_batch,
            ranks=1,
            share_prompts=False,
        )
        loss = trainer.step([batches[0]]).means()["train/loss"]
        if (step + 1) % 50 == 0:
            print(f"supervised step {step + 1}/{steps}  loss {loss:.3f}", flush=True)
    trainer.weights.save(out)
    return loss


def make(out: Path, seed: int = 0) -> Path:
    """Make data and model in `out`, complete or not at all; do nothing when they are there."""
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return out
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tiny_sorter.write_data(partial / "data", seed=seed)
    teach(tiny_sorter.make_untrained(partial / "untrained", seed), partial, seed)
    shutil.rmtree(partial / "untrained")
    os.rename(partial, out)
    print(f"wrote {out}")
    return out


def main(arguments: list[str] | None = None) -> None:
    from orchestration.cluster.devices import environment_for_trainer, free_port

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data, initial weights and order (default: %(default)s)")
    options = parser.parse_args(arguments)
    wanted = environment_for_trainer("cpu", threads=1) | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(wanted)
    make(options.out, options.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
