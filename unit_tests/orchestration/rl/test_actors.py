"""What a job gives to its trainer ranks."""

from configs.blocks.rl import RLConfig
from configs.reading.load import load
from orchestration.rl.actors import trainer_settings
from orchestration.run.directory import RunDirectory


def test_the_learning_rate_ends_with_the_last_update_of_the_last_pass(tmp_path):
    overrides = ["train.steps=20", "train.updates_per_step=2", "train.passes_per_batch=3"]
    job = load("configs/grpo.yaml", RLConfig, overrides)
    assert trainer_settings(job, RunDirectory(tmp_path, "a run")).total_updates == 20 * 2 * 3
