"""Rules on placement: each refused combination names its key and a way out that then works."""

from __future__ import annotations

import pytest

from configs.blocks.rl import RLConfig
from configs.reading.load import ConfigError, load

OVERLAP, PAUSED = "schedule.mode=overlap", "schedule.pause_while_training=true"


def job(*overrides: str) -> RLConfig:
    return load("configs/grpo.yaml", RLConfig, overrides)


@pytest.mark.parametrize(
    ("overrides", "key", "way_out"),
    [
        ([OVERLAP, "placement.colocate=true"], "placement.colocate", [OVERLAP, "placement.colocate=true", PAUSED]),
        (
            [OVERLAP, PAUSED, "placement.colocate=false"],
            "schedule.pause_while_training",
            [OVERLAP, "placement.colocate=false"],
        ),
        ([OVERLAP, "placement.engine_memory_share=0.4"], "placement.engine_memory_share", [OVERLAP]),
        (
            ["placement.engine_memory_share=0.4", "rollout.engine={gpu_memory_utilization: 0.3}"],
            "placement.engine_memory_share",
            ["placement.engine_memory_share=0.4"],
        ),
        (["placement.bind_cores=true"], "placement.bind_cores", ["placement.bind_cores=true", OVERLAP]),
        (
            ["placement.trainer_cores=1", "train.ranks=2"],
            "placement.trainer_cores",
            ["placement.trainer_cores=2", "train.ranks=2"],
        ),
        (
            ["placement.engine_cores=2", "rollout.engines=3"],
            "placement.engine_cores",
            ["placement.engine_cores=3", "rollout.engines=3"],
        ),
        (
            ["placement.trainer_cores=2", "train.threads_per_rank=3"],
            "train.threads_per_rank",
            ["placement.trainer_cores=2", "train.threads_per_rank=0"],
        ),
        (
            ["rollout.engine={enable_sleep_mode: true}"],
            "rollout.engine.enable_sleep_mode",
            ["placement.colocate=true"],
        ),
    ],
)
def test_refused(overrides: list[str], key: str, way_out: list[str]) -> None:
    with pytest.raises(ConfigError, match=key):
        job(*overrides)
    job(*way_out)


def test_who_takes_turns() -> None:
    assert job().colocate is None
    assert job("placement.colocate=true").colocate is True
    assert job("placement.colocate=false").colocate is False
    assert job(OVERLAP).colocate is False
    assert job(OVERLAP, PAUSED).colocate is None
