"""What a job gives to its trainer ranks."""

from pathlib import Path
from types import SimpleNamespace

from configs.blocks.rl import RLConfig
from configs.reading.load import load
from orchestration.rl.actors import trainer_settings


def test_the_longest_sequence_is_the_engines() -> None:
    """Rotary embeddings that depend on it must be the same on both sides."""
    tokens = ["data.max_prompt_tokens=40", "rollout.max_new_tokens=24"]
    for more, longest in (([], 64), (["eval.max_new_tokens=50"], 90), (["rollout.engine={max_model_len: 99}"], 99)):
        config = load("configs/grpo_tiny.yaml", RLConfig, [*tokens, *more])
        assert trainer_settings(config, SimpleNamespace(path=Path("x"))).longest == longest
