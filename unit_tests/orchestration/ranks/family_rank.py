from plugins.kinds import find

"""One trainer rank of test_family.py; see ranks.py.

The gradient of every method under every aggregation, for each packing in FOLDER/packed.pkl; no weight is ever changed.
"""


def run(folder: str, rank: int, ranks: int) -> None:
    import pickle
    from dataclasses import replace
    from pathlib import Path

    import torch

    from configs.blocks.objective import Critic, Objective
    from configs.blocks.rl import Model, Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.token_objective import TokenObjective
    from orchestration.trainer.trainer import Trainer

    class Looking(Trainer):
        """Shows its gradients and takes no step."""

        def _apply(self):
            self.gradients = {}
            for which, engine in zip(("policy", "critic"), self.ds_engines, strict=False):
                for name, p in engine.module.named_parameters():
                    if p.grad is not None:
                        self.gradients[f"{which}.{name}"] = p.grad.detach().clone()
                engine.set_gradient_accumulation_boundary(False)
                engine.step()
                engine.zero_grad()
            return 0.0, None, False

    def build(method, kind):
        train = Train(zero_stage=0)
        model = Model(path=f"{folder}/model", dtype="float32", device="cpu")
        critic = Critic(kind=kind)
        settings = TrainerSettings(model, train, 0.7, 0, 10, objective=Objective(), critic=critic)
        return Looking(settings, method, resolve("cpu"))

    def wake(trainer):
        """Value heads begin at zero; away from it their gradient reaches the trunk."""
        for engine in trainer.ds_engines:
            for name, p in engine.module.named_parameters():
                if "value_head.weight" in name:
                    p.data.copy_(torch.linspace(-1, 1, p.numel()))
        return trainer

    plan = pickle.loads(Path(folder, "packed.pkl").read_bytes())
    trainers = {
        kind: wake(build(find("method", "ppo")(find("method", "ppo").Params()), kind))
        for kind in ("separate", "shared")
    }
    plain = build(find("method", "grpo")(find("method", "grpo").Params()), "separate")
    found = {}
    for case, layout, name, kind, objective, per_rank in plan[ranks]:
        method = find("method", name)(find("method", name).Params())
        trainer = trainers[kind] if "values" in method.needs() else plain
        trainer.method = method
        trainer.settings = replace(trainer.settings, objective=Objective.model_validate(objective))
        trainer.objective = TokenObjective(method, trainer.settings.objective)
        trainer.step([per_rank[rank]])
        found[case, layout] = trainer.gradients
    torch.save(found, f"{folder}/gradients_{ranks}_{rank}.pt")
