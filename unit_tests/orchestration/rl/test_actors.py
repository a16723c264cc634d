"""What a job gives to its trainer ranks."""

from configs.blocks.rl import RLConfig
from configs.reading.load import load
from orchestration.rl.actors import trainer_settings
from orchestration.run.directory import RunDirectory


def test_the_learning_rate_ends_with_the_last_update_of_the_last_pass(tmp_path):
    overrides = ["train.steps=20", "train.updates_per_step=2", "train.passes_per_batch=3"]
    job = load("configs/grpo.yaml", RLConfig, overrides)
    assert trainer_settings(job, RunDirectory(tmp_path, "a run")).total_updates == 20 * 2 * 3


def test_the_longest_sequence_is_the_engines(tmp_path):
    """Rotary embeddings that depend on it must be the same on both sides."""
    tokens = ["data.max_prompt_tokens=40", "rollout.max_new_tokens=24"]
    for more, longest in (([], 64), (["eval.max_new_tokens=50"], 90), (["rollout.engine={max_model_len: 99}"], 99)):
        job = load("configs/grpo.yaml", RLConfig, [*tokens, *more])
        assert trainer_settings(job, RunDirectory(tmp_path, "a run")).longest == longest
