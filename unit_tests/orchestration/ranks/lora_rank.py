"""One trainer rank of test_lora.py; see ranks.py.

Trains adapters of a tiny model for one step under each case, and keeps everything a test wants to look at.
"""

CASES = {  # name: ZeRO stage, compute type, micro-batch budget, KL coefficient, share prompts, gradient checkpointing
    "zero0": (0, "float32", 10**6, 0.0, True, False),
    "zero1": (1, "float32", 16, 0.1, False, False),
    "zero3": (3, "float32", 40, 0.1, True, True),
    "zero3_persistent": (3, "float32", 70, 0.1, True, False),  # small parameters stay whole, as by default
    "bfloat16_zero0": (0, "bfloat16", 70, 0.1, True, False),
    "bfloat16_zero2": (2, "bfloat16", 70, 0.1, True, True),
}
LORA = {"rank": 4, "alpha": 6}


def run(folder: str, rank: int, ranks: int) -> None:
    import pickle
    from pathlib import Path

    import torch

    from algs.grpo import GRPO
    from configs.blocks.lora import Lora
    from configs.blocks.objective import KL, Objective
    from configs.blocks.rl import Model
    from configs.blocks.training import Train
    from orchestration.cluster.devices import resolve
    from orchestration.model.lora import merged_tensors
    from orchestration.trainer.optimizer import whole
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer
    from unit_tests.orchestration.ranks import trainer_rank

    with open(f"{folder}/micro_batches.pkl", "rb") as file:
        micro_batches = pickle.load(file)
    for name, (stage, dtype, _, kl_coef, _, checkpointing) in CASES.items():
        train = Train(
            learning_rate=trainer_rank.LEARNING_RATE, betas=(0.0, 0.0), eps=trainer_rank.EPS,
            max_grad_norm=trainer_rank.MAX_GRAD_NORM, zero_stage=stage,
            deepspeed={} if "persistent" in name else {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
        )  # fmt: skip
        model = Model(path=f"{folder}/model", dtype=dtype, device="cpu", gradient_checkpointing=checkpointing)
        settings = TrainerSettings(
            model, train, temperature=0.7, seed=0, total_updates=1, objective=Objective(kl=KL(coef=kl_coef)),
            lora=Lora(adapter=f"{folder}/adapter", **LORA), merged_checkpoints=True,
        )  # fmt: skip
        trainer = Trainer(settings, GRPO(GRPO.Params()), resolve("cpu"))
        own = micro_batches[name, ranks][rank]
        before = trainer.recompute(own, ["old_logprobs", "ref_logprobs"])
        asked = trainer.objective.recomputed_columns(1)
        filled = [
            b.with_columns({key: values for key, values in c.items() if key in asked})
            for b, c in zip(own, before, strict=True)
        ]
        tally = trainer.step([filled])
        hf_model = trainer.policy.hf_model
        base = {}
        for key, parameter in hf_model.named_parameters():
            with whole([parameter], train):
                if not parameter.requires_grad:
                    base[key.replace(".base_layer", "")] = parameter.detach().clone()
        kept = {
            "adapter": {key: tensor.clone() for key, tensor in trainer.weights.sent()},
            "base": base,
            "merged": {
                key: tensor.clone() for key, tensor in merged_tensors(hf_model, lambda p, train=train: whole(p, train))
            },
            "before": before,
            "after": trainer.recompute(own, ["old_logprobs", "ref_logprobs"]),
            "tally": tally,
            "has_reference_model": trainer.reference is not None,
            "trained": sum(getattr(p, "ds_numel", p.numel()) for g in trainer.ds_engine.optimizer.param_groups for p in g["params"]),
        }  # fmt: skip
        trainer.weights.save(Path(folder) / f"saved_{name}_{ranks}")
        trainer.step([filled])  # training goes on after a pass without adapters
        kept["later"] = trainer.recompute(own, ["old_logprobs", "ref_logprobs"])
        torch.save(kept, f"{folder}/{name}_{ranks}_{rank}.pt")
