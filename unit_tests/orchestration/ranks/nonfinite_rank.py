"""One trainer rank of test_nonfinite.py; see ranks.py.

For each ZeRO stage and compute type: good updates, and after each one that is poisoned on the last rank only.
"""

POISONS = ("advantage", "logits", "gradient", "loss")
CASES = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("float32", "bfloat16")]


def run(folder: str, rank: int, ranks: int) -> None:
    import pickle

    import numpy as np
    import torch

    from algs.grpo import GRPO
    from configs.blocks.rl import Model, Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer
    from unit_tests.orchestration.ranks.poisonable import Poisonable

    def build(stage, dtype, name):
        train = Train(learning_rate=0.01, eps=1e-3, zero_stage=stage)
        model = Model(path=f"{folder}/model", dtype=dtype, device="cpu")
        settings = TrainerSettings(model, train, 0.7, 0, 10, capture_folder=f"{folder}/replay_{ranks}/{name}")
        return Trainer(settings, Poisonable(GRPO.Params()), resolve("cpu"))

    def poisoned_update(trainer, poison, batches, step):
        is_here = rank == ranks - 1
        spoil = float("nan") if poison == "logits" else float("inf")
        norm = trainer.policy.hf_model.base_model.norm
        hook = None
        if is_here and poison == "advantage":
            bad = batches[0].columns["advantages"].copy()  # the last may be a dummy
            bad[0] = np.nan
            batches = [batches[0].with_columns({"advantages": bad}), *batches[1:]]
        elif is_here and poison == "logits":
            hook = norm.register_forward_hook(lambda module, args, output: output * spoil)
        elif is_here and poison == "gradient":
            hook = norm.register_forward_hook(lambda m, a, output: output.register_hook(lambda g: g * spoil) and None)
        trainer.method.is_poisoned = is_here and poison == "loss"
        found = trainer.step([batches], step=step)
        trainer.method.is_poisoned = False
        if hook is not None:
            hook.remove()
        return found

    with open(f"{folder}/micro_batches.pkl", "rb") as file:
        batches = pickle.load(file)[ranks][rank]
    results = {}

    def weights(trainer):
        return {name: tensor.detach().clone() for name, tensor in trainer.weights.sent()}

    def equal(a, b):
        return all(torch.equal(a[name], b[name]) for name in b)

    for stage, dtype in CASES:
        clean, trainer = build(stage, dtype, "clean"), build(stage, dtype, f"{stage}_{dtype}")
        for step, poison in enumerate(POISONS):
            clean.step([batches])
            good = trainer.step([batches])
            before = weights(trainer)
            tally = poisoned_update(trainer, poison, batches, step)
            results[stage, dtype, poison] = {
                "same": equal(weights(trainer), before),
                "as if it never was": equal(before, weights(clean)),  # also what the earlier poisons left of Adam's state
                "skipped": tally.totals["train/skipped_updates"], "in_a_row": trainer.counters.skipped_in_a_row,
                "norm": good.means()["train/gradient_norm"],
            }  # fmt: skip
    torch.save(results, f"{folder}/results_{ranks}_{rank}.pt")
