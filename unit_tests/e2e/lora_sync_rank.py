"""One trainer rank of test_lora_sync.py; see unit_tests/orchestration/ranks/ranks.py.

Trains fresh adapters under ZeRO-3 for one step, publishes them, and saves them in PEFT's format.
"""


def run(folder: str, rank: int, ranks: int) -> None:
    import json
    import pickle
    from pathlib import Path

    from algs.grpo import GRPO
    from configs.blocks.lora import Lora
    from configs.blocks.rl import Model
    from configs.blocks.training import Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer
    from orchestration.weight_transfer.file_publisher import WeightPublisher

    train = Train(
        learning_rate=0.3, zero_stage=3, deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    )
    settings = TrainerSettings(
        Model(path=f"{folder}/model", dtype="float32", device="cpu"), train, temperature=1.0, seed=0, total_updates=2,
        lora=Lora(rank=4, alpha=6, rank_stabilised=True),
    )  # fmt: skip
    trainer = Trainer(settings, GRPO(GRPO.Params()), resolve("cpu"))
    batches = pickle.loads(Path(folder, "micro_batches.pkl").read_bytes())[rank]
    trainer.step([batches])
    trainer.step([batches])  # in the first, B is zero and A has no gradient
    trainer.weights.save(Path(folder, "saved"))
    if rank > 0:
        for _ in trainer.weights.sent():
            pass
        return
    update = WeightPublisher("disk", Path(folder, "weights")).publish(
        1000, trainer.weights.sent(), trainer.weights.adapter_notice()
    )
    Path(folder, "update.json").write_text(json.dumps(update))
