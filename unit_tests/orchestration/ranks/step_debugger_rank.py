"""One trainer rank of test_step_debugger.py; see ranks.py. Trains a tiny model under each case and captures its last step.

As a program, `python step_debugger_rank.py FOLDER`, it has nothing of the run: it does the commands of FOLDER/commands.pkl,
in order, as from a shell, and keeps exit codes, outputs and tables.
"""

import sys
from pathlib import Path

from plugins.kinds import find

CASES = {  # name: method, parameters, ZeRO stage, dtype, critic, objective, ranks
    "grpo": ("grpo", {}, 0, "float32", "separate", {}, 1),
    "grpo_kl": ("grpo", {}, 1, "bfloat16", "separate", {"kl": {"coef": 0.1}}, 1),
    "ppo": ("ppo", {}, 1, "float32", "separate", {}, 1),
    "ppo_shared": ("ppo", {}, 2, "bfloat16", "shared", {}, 1),
    "p3o": ("p3o", {}, 3, "float32", "separate", {}, 1),
    "corrected": (
        "grpo",
        {},
        0,
        "bfloat16",
        "separate",
        {"corrections": [{"function": "token_mask", "params": {"high": 1.1}}]},
        1,
    ),
    "lora": ("grpo", {}, 2, "bfloat16", "separate", {}, 1),
    "nonfinite": ("grpo", {}, 1, "float32", "separate", {}, 1),
    "two_ranks": ("grpo", {}, 1, "float32", "separate", {}, 2),
}
TEMPERATURE = 0.7
STEP = 3


def run(folder_name: str, rank: int, ranks: int) -> None:
    import pickle

    import numpy as np

    from configs.blocks.lora import Lora
    from configs.blocks.objective import Critic, Objective
    from configs.blocks.rl import Model, Train
    from orchestration.cluster.devices import resolve
    from orchestration.trainer.settings import TrainerSettings
    from orchestration.trainer.trainer import Trainer

    folder = Path(folder_name)
    updates = [update[rank] for update in pickle.loads((folder / f"packed_{ranks}.pkl").read_bytes())]
    for name, (method, params, stage, dtype, critic, objective, wanted) in CASES.items():
        if wanted != ranks:
            continue
        train = Train(learning_rate=0.1, schedule="linear", zero_stage=stage, updates_per_step=2, max_grad_norm=0.5)
        settings = TrainerSettings(
            Model(path=f"{folder}/{'base' if name == 'lora' else 'model'}", dtype=dtype, device="cpu"), train, TEMPERATURE, 0, 10,
            objective=Objective.model_validate(objective), critic=Critic(kind=critic, warmup_steps=STEP - 1),
            lora=Lora(rank=2) if name == "lora" else None, capture_folder=f"{folder}/{name}/captured_steps", capture_steps=(STEP,),
        )  # fmt: skip
        cls = find("method", method)
        trainer = Trainer(settings, cls(cls.Params(**params)), resolve("cpu"))
        rng = np.random.default_rng(rank)
        for step in range(1, STEP + 1):
            filled = []
            for batches in updates:
                columns = trainer.recompute(batches, trainer.objective.recomputed_columns(2))
                made = []
                for batch, own in zip(batches, columns, strict=True):
                    policy = trainer.recompute([batch], ["old_logprobs"])[0]["old_logprobs"]
                    noise = rng.normal(0, 0.1, len(policy)).astype(np.float32)
                    if "old_values" in own:
                        own = {**own, "returns": own["old_values"] + noise}
                    made.append(batch.with_columns({**own, "behavior_logprobs": policy + noise}))
                filled.append(made)
            if name == "nonfinite" and step == STEP:
                nonfinite = filled[1][-1].columns["advantages"].copy()
                nonfinite[2] = np.inf
                filled[1][-1] = filled[1][-1].with_columns({"advantages": nonfinite})
            trainer.step(filled, step)


def run_again(folder: Path) -> None:
    import contextlib
    import io
    import pickle

    from orchestration.step_debugger import __main__ as command

    make_table, results = command.token_table, []
    for arguments in pickle.loads((folder / "commands.pkl").read_bytes()):
        seen: dict = {"tables": []}

        def kept(*given, seen=seen):
            seen["tables"].append(make_table(*given))
            return seen["tables"][-1]

        def stop(seen=seen) -> None:
            frame = sys._getframe(1)
            seen["stopped"] = frame.f_code.co_name, frame.f_locals["t"]

        command.token_table, sys.breakpointhook = kept, stop
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command.main(arguments)
        results.append({"code": code, "out": out.getvalue(), "error": err.getvalue(), **seen})
    (folder / "results.pkl").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    run_again(Path(sys.argv[1]))
