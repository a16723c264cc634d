from plugins.kinds import find

"""One trainer rank of test_resume.py; see ranks.py.

Trains a tiny model for four steps under each case, saving its state after the second; then a fresh trainer that loads the
state takes the last two steps again. Tallies, weights, random numbers: both lines are kept for the test to compare.
"""

CASES = {  # name: ranks, method, ZeRO stage, compute type, critic, LoRA
    "one_zero0": (1, "grpo", 0, "float32", "separate", False),
    "one_bfloat16_zero2": (1, "grpo", 2, "bfloat16", "separate", False),
    "one_shared_critic": (1, "ppo", 1, "float32", "shared", False),
    "one_lora_zero0": (1, "grpo", 0, "float32", "separate", True),
    "zero0": (2, "grpo", 0, "float32", "separate", False),
    "zero2": (2, "grpo", 2, "float32", "separate", False),
    "zero3": (2, "grpo", 3, "float32", "separate", False),
    "bfloat16_zero0": (2, "grpo", 0, "bfloat16", "separate", False),
    "bfloat16_zero1": (2, "grpo", 1, "bfloat16", "separate", False),
    "bfloat16_zero3": (2, "grpo", 3, "bfloat16", "separate", False),
    "critic_zero2": (2, "ppo", 2, "bfloat16", "separate", False),
    "critic_zero3": (2, "ppo", 3, "float32", "separate", False),
    "lora_zero2": (2, "grpo", 2, "bfloat16", "separate", True),
    "lora_zero3": (2, "grpo", 3, "float32", "separate", True),
}
STEPS, SAVED_AFTER, UPDATES = 4, 2, 2
PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def run(folder: str, rank: int, ranks: int) -> None:
    import pickle
    from pathlib import Path

    import numpy as np
    import torch

    from configs.blocks.lora import Lora
    from configs.blocks.objective import Critic
    from configs.blocks.rl import Model, Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer

    updates = [update[rank] for update in pickle.loads(Path(f"{folder}/packed_{ranks}.pkl").read_bytes())]

    def made(name: str) -> Trainer:
        _, method, stage, dtype, critic, lora = CASES[name]
        train = Train(
            learning_rate=0.02, schedule="linear", warmup_steps=1, zero_stage=stage, max_grad_norm=0.5,
            weight_decay=0.1, updates_per_step=UPDATES, deepspeed=PARTITIONED if stage == 3 and "critic" in name else {},
        )  # fmt: skip
        settings = TrainerSettings(
            Model(path=f"{folder}/model", dtype=dtype, device="cpu"), train, temperature=0.7, seed=3,
            total_updates=STEPS * UPDATES, critic=Critic(kind=critic, warmup_steps=1, learning_rate=0.01),
            lora=Lora(rank=2) if lora else None,
        )  # fmt: skip
        cls = find("method", method)
        return Trainer(settings, cls(cls.Params()), resolve("cpu"))

    def batches_of(trainer: Trainer, step: int) -> list:
        rng = np.random.default_rng([step, rank])
        names = [*trainer.objective.recomputed_columns(UPDATES), *(["returns"] if trainer.objective.has_values else [])]
        return [
            [batch.with_columns({n: rng.normal(-2, 1, len(batch.targets)).astype(np.float32) for n in names}) for batch in batches]
            for batches in updates
        ]  # fmt: skip

    def trained(trainer: Trainer, steps: range, save_to: Path | None) -> list:
        """Of every step: its metrics, all weights, the counters, and random numbers drawn after it."""
        line = []
        for step in steps:
            tally = trainer.step(batches_of(trainer, step), step)
            weights = {name: tensor.detach().cpu().clone() for name, tensor in trainer.weights.sent()}
            values = trainer.weights.value_parameters()
            line.append(
                (tally.means(), weights, values, (trainer.counters.steps, trainer.counters.updates), torch.rand(3))
            )
            if step == SAVED_AFTER and save_to is not None:
                trainer.save_state(save_to)
        return line

    for name, (wanted, *_) in CASES.items():
        if wanted == ranks:
            state = Path(folder) / name
            live = trained(made(name), range(1, STEPS + 1), state)
            again = made(name)
            again.load_state(state)
            resumed = trained(again, range(SAVED_AFTER + 1, STEPS + 1), None)
            torch.save((live, resumed), f"{folder}/{name}_{rank}.pt")

    if ranks == 2:  # the pool of one rank has run before
        for wrong in ("absent", "one_zero0"):
            try:
                made("zero0").load_state(Path(folder) / wrong)
            except ValueError as error:
                Path(f"{folder}/{wrong}_{rank}.txt").write_text(str(error))
