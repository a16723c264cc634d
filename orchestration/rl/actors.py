"""Starts Ray, places the actors, brings them up together, and takes everything down again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from algs.method import PolicyMethod
from configs.blocks.placement import colocate
from configs.blocks.rl import EvalConfig, RLConfig
from configs.blocks.schedule import Failures
from orchestration.cluster.cpu_cores import core_plan
from orchestration.cluster.devices import resolve
from orchestration.cluster.gpu_bundles import placed
from orchestration.cluster.ray_session import started_ray
from orchestration.cluster.watchdog import START_SECONDS, TrainerLost, Watch
from orchestration.engines.pool import EnginePool
from orchestration.run.directory import CAPTURED_STEPS, RunDirectory
from orchestration.trainer.ranks import TrainerRanks
from orchestration.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Actors:
    """Everything that is alive during a job; an evaluation on its own has no trainers."""

    trainers: TrainerRanks | None
    rollouts: EnginePool
    watch: Watch  # of all of them


@contextmanager
def started_actors(
    config: RLConfig | EvalConfig, run: RunDirectory, method: PolicyMethod | None, note: Callable[[str], None] = print
) -> Iterator[Actors]:
    """Trainer ranks (when there is a method to train with) and engines, ready to work; closed at the end.

    Start-up is concurrent, engines compile and load while the trainer does; on GPUs that both share it is in turn, because
    an engine measures the free memory while it starts. note: told when an engine is replaced.
    """
    device = resolve(config.model.device)
    cores = core_plan(config, device)
    ranks, rollout = (config.train.ranks, config.rollout) if isinstance(config, RLConfig) else (0, config)
    shared = colocate(config) if isinstance(config, RLConfig) else None
    watch = Watch((config.failures if isinstance(config, RLConfig) else Failures()).stall_seconds)
    with started_ray(), placed(device, ranks, rollout.engines, rollout.tensor_parallel_size, shared) as options:
        rollouts = EnginePool.create(config, device, run, options[ranks:], cores, watch, note)
        trainers = None
        try:
            if rollouts.sleeps:
                rollouts.wait_for_all()
                rollouts.sleep()
            if isinstance(config, RLConfig):
                assert method is not None
                trainers = TrainerRanks.create(device, run, options[:ranks], cores, watch)
                settings = trainer_settings(config, run)
                starting = trainers.begin(settings, method, device, config.sync.method, run.path / "sync")
                watch.get(starting, "start trainer", rollouts.wait_a_moment, START_SECONDS)
            if rollouts.sleeps:
                if trainers is not None:
                    trainers.release_memory()
                rollouts.wake()
            rollouts.wait_for_all()
            yield Actors(trainers, rollouts, watch)
        except BaseException:  # an error or Ctrl-C: nobody waits for a step that is under way
            rollouts.abandon()
            if trainers is not None:
                trainers.abandon()
            raise
        rollouts.close()
        if trainers is not None:
            trainers.meanwhile = None
            try:
                trainers.close()
            except TrainerLost as lost:  # the work is done: nothing that was to be kept goes with it
                note(str(lost))


def trainer_settings(config: RLConfig, run: RunDirectory) -> TrainerSettings:
    """What a job tells its trainer ranks."""
    return TrainerSettings(
        model=config.model,
        train=config.train,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        total_updates=config.train.steps * config.train.updates_per_step,
        objective=config.objective,
        critic=config.critic,
        lora=config.lora,
        merged_checkpoints=config.checkpoint.merged,
        capture_folder=str((run.path / CAPTURED_STEPS).resolve()),
        capture_steps=tuple(config.capture.steps),
        capture_keep=config.capture.keep,
    )
