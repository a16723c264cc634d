"""One trainer rank of test_optimizer.py; see ranks.py.

Trains in bfloat16 for two updates under each ZeRO stage, and keeps the float32 weights before and after, and gradients.
"""

STAGES = (0, 1, 2, 3)
TRAIN = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1e6}


def run(folder: str, rank: int, ranks: int) -> None:
    import pickle

    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    from algs.grpo import GRPO
    from configs.blocks.rl import Model, Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer

    class Seen(Trainer):
        """Keeps the gradients that the optimizer sees."""

        def _apply(self):
            read = safe_get_full_grad if self.settings.train.zero_stage else lambda p: p.grad
            gradients.append({n: read(p).float().clone() for n, p in self.policy.hf_model.named_parameters()})
            return super()._apply()

    def masters(trainer):
        named, optimizer = trainer.policy.hf_model.named_parameters(), trainer.ds_engine.optimizer
        if trainer.settings.train.zero_stage:
            return {name: safe_get_full_fp32_param(p).clone() for name, p in named}
        kept = {id(p): m for ps, ms in zip(optimizer.fp16_groups, optimizer.fp32_groups) for p, m in zip(ps, ms)}
        return {name: kept[id(p)].detach().clone() for name, p in named}

    with open(f"{folder}/micro_batches.pkl", "rb") as file:
        batches = pickle.load(file)[ranks][rank]
    for stage in STAGES:
        gradients: list[dict[str, torch.Tensor]] = []
        model = Model(path=f"{folder}/model", dtype="bfloat16", device="cpu")
        settings = TrainerSettings(model, Train(zero_stage=stage, **TRAIN), 0.7, 0, 10)
        trainer = Seen(settings, GRPO(GRPO.Params()), resolve("cpu"))
        before = masters(trainer)
        trainer.step([batches, batches])
        sent = {name: tensor.clone() for name, tensor in trainer.weights.sent()}
        torch.save((before, gradients, masters(trainer), sent), f"{folder}/{stage}_{ranks}_{rank}.pt")
