"""The two sides of benchmarks/against_trl/supervised.py: our own job and trl's trainers, each a step at a time.

A side is a function that runs in a process of its own. It sends a description of itself, then waits for a number of
steps, answers with a `Step` after each, and sends its peak memory at the end.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from configs.blocks.supervised import SLConfig
    from data_feeds.examples.examples import Example

MAX_TOKENS = 1024  # of an example; the data stays well below


@dataclass(frozen=True)
class Contest:
    """The work of both sides."""

    what: str
    model: str
    rows: str  # JSON lines
    folder: str  # for whatever is written
    steps: int  # warm-up included
    examples: int  # of an optimizer step; for DPO pairs
    trl_rows: int  # examples, pairs or packs of a forward pass of trl's
    pack_tokens: int
    learning_rate: float = 3e-5
    seed: int = 0
    dtype: str = "bfloat16"  # of the arithmetic; weights and optimizer are float32

    @property
    def is_sft(self) -> bool:
        return self.what.startswith("sft")


@dataclass(frozen=True)
class Step:
    """An optimizer step of one side."""

    seconds: float
    work: int  # real tokens; for DPO pairs
    loss: float


def our_config(contest: Contest) -> SLConfig:
    from configs.blocks.supervised import SLConfig

    source: dict[str, Any] = {"file": contest.rows}
    if contest.is_sft:
        source["messages_column"] = "messages"
    return SLConfig.model_validate(
        {
            "run": {"name": "ours", "dir": contest.folder, "seed": contest.seed},
            "model": {"path": contest.model, "dtype": contest.dtype, "device": "cpu"},
            "data": {"sources": [source], "heldout_fraction": 0.0, "shuffle": False, "max_tokens": MAX_TOKENS},
            "algorithm": {"name": "sft" if contest.is_sft else "dpo"},
            "objective": {
                "reference": "precomputed",
                "reference_cache_dir": f"{contest.folder}/reference",
            },
            "train": {
                "batch_size": contest.examples,
                "steps": contest.steps,
                "learning_rate": contest.learning_rate,
            },
            "eval": {"every": 0},
        }
    )


def ours(contest: Contest, turns: Connection) -> None:
    """Run main_sl.py's own loop; it waits for its turn where it writes its report, between steps."""
    from configs.reading.load import run_directory, to_yaml
    from orchestration.run.directory import RunDirectory, read_metrics
    from orchestration.start.load_data import load_examples
    from orchestration.supervised.loop import run_sl

    config = our_config(contest)
    examples = load_examples(config)
    run = RunDirectory.create(run_directory(config), to_yaml(config))
    work = [work_of(contest, example) for example in examples.all_training()]
    left, begun = 0, 0.0

    def after_step(path: Path) -> Path:
        nonlocal left, begun
        ended, row = time.perf_counter(), read_metrics(path)[-1]
        step = int(row["step"])
        if step == 0:
            turns.send("packed into micro-batches")
        else:
            own = work[(step - 1) * contest.examples : step * contest.examples]
            turns.send(Step(ended - begun - row["time/checkpoint_seconds"], sum(own), row["train/loss"]))
            left -= 1
        if not left and step < contest.steps:
            left = turns.recv()
        begun = time.perf_counter()
        return path

    run_sl(config, examples, run, after_step)
    turns.send(peak_gigabytes())


def work_of(contest: Contest, example: Example) -> int:
    return sum(len(t.prompt_ids) + len(t.token_ids) for t in example) if contest.is_sft else 1


def theirs(contest: Contest, turns: Connection) -> None:
    """Run trl's trainer; it waits for its turn at the beginning of a step."""
    from transformers import PrinterCallback, TrainerCallback

    trainer, note = (sft_trainer if contest.is_sft else dpo_trainer)(contest)
    work = works_of_trl(contest, trainer)

    class Turns(TrainerCallback):
        left, begun, seconds = 0, 0.0, 0.0

        def on_step_begin(self, *_: Any, **k: Any) -> None:
            if not self.left:
                self.left = turns.recv()
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **k: Any) -> None:
            self.seconds = time.perf_counter() - self.begun
            self.left -= 1

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **k: Any) -> None:
            if "loss" in logs:  # the last line of a run is a summary
                turns.send(Step(self.seconds, work[state.global_step - 1], logs["loss"]))

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Turns())
    turns.send(note)
    trainer.train()
    turns.send(peak_gigabytes())


def trl_arguments(contest: Contest) -> dict[str, Any]:
    """Return the common arguments of SFTConfig and DPOConfig. Everything else is trl's default."""
    is_packing = contest.what == "sft-packing"
    rows = -(-contest.examples * mean_tokens(contest) // contest.pack_tokens) if is_packing else contest.examples
    return {
        "output_dir": f"{contest.folder}/trl",
        "use_cpu": True,
        "bf16": contest.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": contest.trl_rows,
        "gradient_accumulation_steps": max(1, rows // contest.trl_rows),
        "learning_rate": contest.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": contest.steps,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": contest.seed,
    }


def examples_of(contest: Contest) -> list[Example]:
    """Return our own tokens, in the order in which both sides see them."""
    from orchestration.start.load_data import load_examples

    config = our_config(contest)
    return list(load_examples(config).all_training())


def mean_tokens(contest: Contest) -> int:
    return round(float(np.mean([work_of(contest, example) for example in examples_of(contest)])))


def load_model(contest: Contest) -> tuple[Any, Any]:
    """Return model, float32, and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from data_feeds.chat.template import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(contest.model, dtype=torch.float32, attn_implementation="sdpa")
    return model, load_tokenizer(contest.model)


def sft_trainer(contest: Contest) -> tuple[Any, str]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = []
    for (t,) in examples_of(contest):
        labels = np.where(t.is_action, t.token_ids, -100)
        ids = np.concatenate([t.prompt_ids, t.token_ids])
        rows.append({"input_ids": ids.tolist(), "labels": [-100] * len(t.prompt_ids) + labels.tolist()})
    is_packing = contest.what == "sft-packing"
    model, tokenizer = load_model(contest)
    arguments = SFTConfig(
        **trl_arguments(contest),
        packing=is_packing,
        shuffle_dataset=is_packing,  # packs come longest example first
        max_length=contest.pack_tokens if is_packing else MAX_TOKENS,
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    if not is_packing:
        return trainer, f"padded, {contest.trl_rows} rows a forward pass"
    gap = packing_gap(trainer)
    kind = arguments.packing_strategy
    return trainer, f"{kind}, rows of {contest.pack_tokens}; packed against separate log-probabilities: {gap:.1e}"


def packing_gap(trainer: Any) -> float:
    """Return the largest difference between log-probabilities of a row's examples packed and each alone, float32."""
    import torch

    row = next(row for row in trainer.train_dataset if len(row["seq_lengths"]) > 1)
    lengths = row["seq_lengths"][:3]  # a few will do
    start = sum(lengths)
    cut = {name: row[name][:start] for name in ("input_ids", "labels")}
    batch = trainer.data_collator([{**cut, "seq_lengths": lengths}])
    model, ids = trainer.model.eval(), batch["input_ids"]
    with torch.no_grad():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        packed = model(**inputs, use_cache=False).logits[0].log_softmax(-1).split(lengths)
        parts = ids[0].split(lengths)
        alone = [model(input_ids=part[None], use_cache=False).logits[0].log_softmax(-1) for part in parts]
    model.train()
    return max(float((a - b).abs().max()) for a, b in zip(packed, alone, strict=True))


def dpo_trainer(contest: Contest) -> tuple[Any, str]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = load_model(contest)
    examples, rows = examples_of(contest), []

    def text(ids: np.ndarray) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    for example in examples:
        prompt = text(example[0].prompt_ids)
        whole = [text(np.concatenate([t.prompt_ids, t.token_ids])) for t in example]
        chosen, rejected = (response.removeprefix(prompt) for response in whole)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    arguments = DPOConfig(**trl_arguments(contest), precompute_ref_log_probs=True, beta=0.1, max_length=MAX_TOKENS)
    trainer = DPOTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    for example, row in zip(examples, trainer.train_dataset, strict=True):
        for t, name in zip(example, ("chosen_ids", "rejected_ids"), strict=True):
            mine = [*t.prompt_ids.tolist(), *t.token_ids.tolist()]
            assert row["prompt_ids"] + row[name] == mine, "trl has other tokens than ours"
    return trainer, f"padded, {contest.trl_rows} pairs a forward pass"


def works_of_trl(contest: Contest, trainer: Any) -> list[int]:
    """Return the work of each step; without shuffling, rows come in order."""
    if not contest.is_sft:
        return [contest.examples] * contest.steps
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    per_step = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    return [sum(lengths[i * per_step : (i + 1) * per_step]) for i in range(contest.steps)]


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
