"""One trainer rank of test_trainer.py; see ranks.py.

Trains a tiny model for one step under each case and, on rank 0, saves the resulting weights.
"""

CASES = {  # name: ZeRO stage, micro-batch budget, updates per step, KL coefficient, share prompts
    "zero0": (0, 10**6, 1, 0.0, True),
    "zero1": (1, 16, 1, 0.0, False),
    "zero2": (2, 70, 1, 0.0, True),
    "zero3": (3, 20, 1, 0.0, True),
    "zero3_dummy": (3, 6, 1, 0.0, True),  # on two ranks one has a dummy micro-batch last
    "zero3_reference": (3, 60, 1, 0.1, False),
    "two_updates": (1, 60, 2, 0.1, True),
    "zero3_two_updates": (3, 6, 2, 0.1, True),
}
MAX_GRAD_NORM = 0.5
LEARNING_RATE = 0.1
EPS = 1.0  # AdamW's step is then smooth in the gradient: equal weights mean equal gradients


def run(folder: str, rank: int, ranks: int) -> None:
    import pickle

    import torch

    from algs.grpo import GRPO
    from configs.blocks.objective import KL, Objective
    from configs.blocks.rl import Model, Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer

    with open(f"{folder}/micro_batches.pkl", "rb") as file:
        micro_batches = pickle.load(file)
    for name, (stage, _, updates, kl_coef, _) in CASES.items():
        train = Train(
            learning_rate=LEARNING_RATE, betas=(0.0, 0.0), eps=EPS, max_grad_norm=MAX_GRAD_NORM, zero_stage=stage,
            updates_per_step=updates, deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
        )  # fmt: skip
        model = Model(path=f"{folder}/model", dtype="float32", device="cpu")
        settings = TrainerSettings(
            model, train, temperature=0.7, seed=0, total_updates=updates, objective=Objective(kl=KL(coef=kl_coef))
        )
        trainer = Trainer(settings, GRPO(GRPO.Params()), resolve("cpu"))
        names = trainer.objective.recomputed_columns(updates)
        own = [update[rank] for update in micro_batches[name, ranks]]
        columns = [trainer.recompute(batches, names) for batches in own]
        filled = [[b.with_columns(c) for b, c in zip(*pair, strict=True)] for pair in zip(own, columns, strict=True)]
        tally = trainer.step(filled)
        weights = {name: tensor.detach().clone() for name, tensor in trainer.weights.sent()}
        torch.save((weights, tally), f"{folder}/{name}_{ranks}_{rank}.pt")
