"""The default job against trl's GRPOTrainer: wall-clock to a held-out greedy accuracy, on the same machine.

    python -m benchmarks.against_trl [--target 0.7] [--peer-steps 14]

Same model, prompts, split, reward, batch (16 x 8), temperature, length limit, learning rate, float32 masters with
bfloat16 compute. Both are judged on the same held-out prompts every two steps; judging and start-up are not counted on
either side. The two run one after the other, each until it reaches the target. Prints the ratio (aim: 3 or better).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EVERY = 2  # steps between evaluations, on both sides


def ours(target: float, folder: Path) -> list[tuple[float, float]]:
    """Run the default job until it reaches the target; return (training seconds, held-out accuracy) per evaluation."""
    command = [sys.executable, "main_rl.py", "--config", "configs/grpo.yaml", "--run-dir", str(folder)]
    process = subprocess.Popen([*command, "--set", f"eval.every={EVERY}"], start_new_session=True)
    while process.poll() is None and reached(our_curve(folder), target) is None:
        time.sleep(1)
    if process.poll() is None:
        process.terminate()
    if process.wait() not in (0, 130):
        raise SystemExit("the default job failed; see above")
    return our_curve(folder)


def our_curve(folder: Path) -> list[tuple[float, float]]:
    from orchestration.run.directory import read_metrics

    curve, seconds = [], 0.0
    for row in read_metrics(folder):
        if row["step"] > 0:
            seconds += row["time/step_seconds"] - row["time/eval_seconds"] - row["time/checkpoint_seconds"]
        if "eval/greedy_accuracy" in row:
            curve.append((seconds, row["eval/greedy_accuracy"]))
    return curve


def peer(target: float, steps: int) -> list[tuple[float, float]]:
    """Do the same as `ours` for trl's GRPOTrainer, in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from configs.blocks.rl import RLConfig
    from configs.reading.load import load
    from data_feeds.chat.template import load_tokenizer
    from data_feeds.prompts.prompts import load_prompts
    from rewards.last_number import find_last_number

    config = load("configs/grpo.yaml", RLConfig)
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(config.data, tokenizer)
    heldout = prompts.heldout[: config.eval.max_prompts]
    rows = [{"prompt": p.messages, "answer": str(p.answer)} for p in prompts.train]

    def correct(text: str, answer: Any) -> bool:
        return find_last_number(text) == find_last_number(str(answer))

    def reward(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            0.9 * correct(text, wanted) + 0.1 * (ids[-1] == tokenizer.eos_token_id)
            for text, ids, wanted in zip(texts, completion_ids, answer, strict=True)
        ]

    def accuracy(model: Any) -> float:
        rendered = [
            tokenizer.apply_chat_template(p.messages, tokenize=False, add_generation_prompt=True) for p in heldout
        ]
        batch = tokenizer(rendered, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out = model.generate(**batch, max_new_tokens=config.rollout.max_new_tokens, do_sample=False)
        texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(correct(text, p.answer) for text, p in zip(texts, heldout, strict=True)) / len(heldout)

    curve: list[tuple[float, float]] = []

    class Judge(TrainerCallback):
        seconds, resumed = 0.0, 0.0

        def on_train_begin(self, *_: Any, **k: Any) -> None:
            self.resumed = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **k: Any) -> None:
            self.seconds += time.monotonic() - self.resumed
            if state.global_step % EVERY == 0:
                model = k["model"]
                model.eval()
                curve.append((self.seconds, accuracy(model)))
                model.train()
                print(f"trl step {state.global_step}: {self.seconds:.0f} s, held-out {curve[-1][1]:.3f}", flush=True)
                control.should_training_stop = curve[-1][1] >= target
            self.resumed = time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        group = config.rollout.responses_per_prompt
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=config.rollout.prompts_per_step * group,
            num_generations=group,
            max_completion_length=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            learning_rate=config.train.learning_rate,
            lr_scheduler_type="constant",
            max_steps=steps,
            report_to=[],
            save_strategy="no",
            seed=config.run.seed,
        )
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Judge()],
        )
        trainer.train()
    return curve


def reached(curve: list[tuple[float, float]], target: float) -> float | None:
    """Return the training seconds at the first evaluation that reached the target; None without one."""
    return next((seconds for seconds, accuracy in curve if accuracy >= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.7, help="held-out greedy accuracy (default: %(default)s)")
    parser.add_argument("--peer-steps", type=int, default=20, help="trl's steps at most (default: %(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as folder:
        mine = ours(options.target, Path(folder) / "run")
    theirs = peer(options.target, options.peer_steps)
    print("seconds, held-out greedy accuracy")
    print("  ours", [(round(s), round(a, 3)) for s, a in mine])
    print("  trl ", [(round(s), round(a, 3)) for s, a in theirs])
    our_seconds, their_seconds = reached(mine, options.target), reached(theirs, options.target)
    if our_seconds is None or their_seconds is None:
        raise SystemExit(f"{options.target} not reached by both: ours {our_seconds}, trl {their_seconds}; no ratio")
    ratio = their_seconds / our_seconds
    print(f"to {options.target}: ours {our_seconds:.0f} s, trl {their_seconds:.0f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
