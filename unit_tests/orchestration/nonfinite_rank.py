"""One trainer rank of test_nonfinite.py, run as a process: python nonfinite_rank.py FOLDER RANK RANKS PORT.

For each ZeRO stage and compute type: a good update, one poisoned on the last rank only, and another good one.
"""

import os
import sys
from dataclasses import replace

POISONS = ("advantage", "logits", "gradient", "loss")
CASES = [(stage, "float32", poison) for stage in (0, 1, 2, 3) for poison in POISONS]
CASES += [(stage, "bfloat16", "logits") for stage in (0, 1, 2, 3)]


def main() -> None:
    folder, rank, ranks, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
    )  # fmt: skip
    import pickle

    import numpy as np
    import torch
    from deepspeed.utils import logger

    from algs.grpo import GRPO
    from configs.schema import Model, Train
    from orchestration.devices import resolve
    from orchestration.trainer import Trainer
    from orchestration.trainer_settings import TrainerSettings
    from unit_tests.orchestration.poisonable import Poisonable

    def build(stage, dtype, name):
        train = Train(learning_rate=0.01, eps=1e-3, zero_stage=stage)
        model = Model(path=f"{folder}/model", dtype=dtype, device="cpu")
        settings = TrainerSettings(model, train, 0.7, 0, 10, replay_folder=f"{folder}/replay_{ranks}/{name}")
        return Trainer(settings, Poisonable(GRPO.Params()), resolve("cpu"))

    def poisoned_update(trainer, poison, batches):
        is_here = rank == ranks - 1
        spoil = float("nan") if poison == "logits" else float("inf")
        norm = trainer.policy.hf_model.base_model.norm
        hook = None
        if is_here and poison == "advantage":
            bad = batches[-1].advantages.copy()
            bad[0] = np.nan
            batches = [*batches[:-1], replace(batches[-1], advantages=bad)]
        elif is_here and poison == "logits":
            hook = norm.register_forward_hook(lambda module, args, output: output * spoil)
        elif is_here and poison == "gradient":
            hook = norm.register_forward_hook(lambda m, a, output: output.register_hook(lambda g: g * spoil) and None)
        trainer.method.is_poisoned = is_here and poison == "loss"
        found = trainer.step([batches], step=7)
        trainer.method.is_poisoned = False
        if hook is not None:
            hook.remove()
        return found

    logger.setLevel("ERROR")
    with open(f"{folder}/micro_batches.pkl", "rb") as file:
        batches = pickle.load(file)[ranks][rank]
    results = {}
    expected = {}
    for stage, dtype, poison in CASES:
        if (stage, dtype) not in expected:
            clean = build(stage, dtype, "clean")
            clean.step([batches])
            clean.step([batches])
            expected[stage, dtype] = {name: tensor.detach().clone() for name, tensor in clean.weights()}
        trainer = build(stage, dtype, f"{stage}_{dtype}_{poison}")
        trainer.step([batches])
        tally = poisoned_update(trainer, poison, batches)
        in_a_row = trainer.skipped_in_a_row
        last = trainer.step([batches])
        same = all(torch.equal(tensor, expected[stage, dtype][name]) for name, tensor in trainer.weights())
        results[stage, dtype, poison] = {
            "same": same, "skipped": tally.totals["train/skipped_updates"], "in_a_row": in_a_row,
            "after": trainer.skipped_in_a_row, "norm": last.means()["train/gradient_norm"],
        }  # fmt: skip
    torch.save(results, f"{folder}/results_{ranks}_{rank}.pt")


if __name__ == "__main__":
    main()
