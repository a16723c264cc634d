"""One trainer rank of test_trainer_pulse.py; see ranks.py. Keeps what it says that it is doing in one update."""


def run(folder: str, rank: int, ranks: int) -> None:
    import json
    import pickle

    from algs.p3o import P3O
    from configs.blocks.rl import Model, Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer

    with open(f"{folder}/micro_batches.pkl", "rb") as file:
        batches = pickle.load(file)[rank]
    settings = TrainerSettings(Model(path=f"{folder}/model", dtype="float32", device="cpu"), Train(), 1.0, 0, 1)
    trainer = Trainer(settings, P3O(P3O.Params()), resolve("cpu"))
    said = []
    trainer.activity.enter = said.append  # type: ignore[method-assign]
    trainer.update(batches)
    with open(f"{folder}/said_{rank}.json", "w") as file:
        json.dump(said, file)
