"""Ray, one engine and two trainer ranks that live for the whole test session and do one real job after another."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest
import ray

from configs.blocks.rl import Reward, RLConfig
from configs.reading.load import load, method_for, run_directory, to_yaml
from configs.reading.yaml_text import dump
from orchestration.cluster.devices import resolve
from orchestration.cluster.job_shape import EngineJob
from orchestration.engines import pool as engine_pool
from orchestration.engines.actor import RolloutActor
from orchestration.rl.actors import Actors, Training, started_actors, trainer_settings
from orchestration.rl.job import RLJob
from orchestration.rl.loop import drive
from orchestration.run.console import Console
from orchestration.run.directory import RunDirectory, read_metrics
from orchestration.start.load_data import load_prompt_sets
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Prompt
from rewards.scoring.service import ScoringService

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS, UPDATES = 2, 3, 2
SMALL = {
    "rollout": {"prompts_per_step": 8, "responses_per_prompt": 4},
    "train": {"ranks": RANKS, "steps": STEPS, "updates_per_step": UPDATES, "max_tokens_per_micro_batch": 20},
    "eval": {"every": 0, "max_prompts": 8},
}


def variant(*values: Any) -> Any:
    """Return a case that repeats what another one tests under circumstances that hardly matter: it is left to `make soak`."""
    return pytest.param(*values, marks=pytest.mark.soak)


@dataclass(frozen=True)
class Done:
    """What a job left behind."""

    config: RLConfig
    path: Path  # the run directory
    weights: list[int]  # checksum of the trainer's weights at the end of each step, 0 to the last
    console: str
    error: Exception | None

    @property
    def rows(self) -> list[dict[str, float]]:
        """The metrics, step 0 first."""
        return read_metrics(self.path)


class Stopped(Exception):
    """A job was told to stop."""


class SharedStack:
    """Does jobs on actors that go on living. Each job has a new trainer on every rank, new scoring processes, and its
    first weights as version 0 in the engine, as in a run of its own."""

    def __init__(self, actors: Actors, folder: Path) -> None:
        self.actors, self.folder = actors, folder
        self.jobs = 0
        self.unfinished = ""  # the job at work, or the one that ended as nobody expected

    def run(
        self, block: dict[str, Any], raises: type[Exception] | None = None, resume: Path | None = None,
        stop_after: int | None = None,
    ) -> Done:  # fmt: skip
        """Do the small job, changed by `block`, to its end, to the error that it must end with, or until it is stopped after a
        step; from its beginning or from a checkpoint."""
        screen, weights = io.StringIO(), []
        with self.job(block, screen) as job:

            def note_weights(_: Path) -> Path:
                job.driver.settle()  # engines may be reading what the next publication takes away
                weights.append(job.driver.watch.wait(job.trainers.publish(10**6))["checksum"])
                if job.progress.trained_steps == stop_after:
                    raise Stopped
                return job.run.report_path

            if resume is not None:
                job.resume(resume)
            raises = Stopped if stop_after else raises
            with pytest.raises(raises) if raises else nullcontext() as caught:
                drive(job, note_weights)
        return Done(job.config, job.run.path, weights, screen.getvalue(), caught.value if caught else None)

    @contextmanager
    def job(self, block: dict[str, Any], screen: TextIO | None = None) -> Iterator[RLJob]:
        """The small job, changed by `block`, at its beginning."""
        assert not self.unfinished, f"{self.unfinished} failed, and its actors may wait for one another for ever"
        self.jobs += 1
        file = self.folder / f"job_{self.jobs:02d}.yaml"
        file.write_text(dump({"extends": "small.yaml", **block}))
        config = load(file, RLConfig, run_dir=str(file.with_suffix("")))
        run = RunDirectory.create(run_directory(config), to_yaml(config))
        self.unfinished = file.stem
        with Console(config.run.name, config.train.steps, screen or io.StringIO()) as console:
            yield self.begun(config, run, console)
        self.unfinished = ""

    def small(self) -> RLConfig:
        """The small job itself."""
        return load(self.folder / "small.yaml", RLConfig)

    def prompts(self, config: RLConfig) -> list[Prompt]:
        """Those it trains on."""
        return load_prompt_sets(config).train

    def begun(self, config: RLConfig, run: RunDirectory, console: Console) -> RLJob:
        """The actors brought to a job's beginning."""
        trainers, pool, watch, method = self.actors.trainers, self.actors.pool, self.actors.watch, method_for(config)
        assert trainers is not None
        prompts, device = load_prompt_sets(config), resolve(config.model.device)
        settings = trainer_settings(config, run)
        watch.wait(trainers.begin(settings, method, device, config.sync.method, run.path / "sync"))
        ray.get([actor.pay_by.remote(config.reward) for actor in pool.actors])
        while pool.unfinished or pool.collect(0.0):  # what a stopped job left under way
            pool.collect(1.0)
        pool.in_flight, pool.sleeps = config.schedule.in_flight, config.schedule.pause_while_training
        pool.load_weights(0, watch.wait(trainers.publish(0)))
        return RLJob(config, TokenObjective(method, config.objective), prompts, run, self.actors, console)


class SharedRolloutActor(RolloutActor):
    """An engine that outlives jobs."""

    drains_after = 0.0  # seconds

    async def drain_late(self, seconds: float) -> None:
        """Have responses take so much longer to end from now on, when they are to."""
        self.drains_after = seconds

    async def drain(self) -> None:
        await asyncio.sleep(self.drains_after)
        await super().drain()

    async def pay_by(self, reward: Reward) -> None:
        """Score by another reward from now on."""
        await self.scoring.close()
        self.scoring = ScoringService(reward)
        await self.scoring.start()


@contextmanager
def started_stack(folder: Path, model: Path) -> Iterator[SharedStack]:
    """Start everyone on the small job: that of configs/grpo_tiny.yaml, made smaller."""
    of_model = {
        "model": {"path": str(model)},
        "data": {
            "sources": [{"file": f"{model}/data/train.jsonl"}],
            "heldout_sources": [{"file": f"{model}/data/heldout.jsonl"}],
        },
    }
    file = folder / "small.yaml"
    file.write_text(dump({"extends": str(ROOT / "configs" / "grpo_tiny.yaml"), **SMALL, **of_model}))
    config = load(file, RLConfig, run_dir=str(folder / "stack"))
    run = RunDirectory.create(run_directory(config), to_yaml(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_pool, "RolloutActor", SharedRolloutActor)
        with started_actors(EngineJob.of_rl(config), Training.of(config, method_for(config), run), run) as actors:
            shared = SharedStack(actors, folder)
            yield shared
            assert not shared.unfinished, "the actors are abandoned: closing them would wait for ever"
