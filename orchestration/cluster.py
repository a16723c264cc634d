"""Starts Ray, places the actors, brings them up together, and takes everything down again."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from algs.method import PolicyMethod
from configs.schema import EvalConfig, RLConfig
from orchestration.devices import resolve
from orchestration.placement import placed
from orchestration.rollout_group import RolloutGroup
from orchestration.run_directory import RunDirectory
from orchestration.sync import synchronise
from orchestration.trainer_actor import TrainerGroup
from orchestration.trainer_settings import TrainerSettings

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Actors:
    """Everything that is alive during a job; an evaluation on its own has no trainers."""

    trainers: TrainerGroup | None
    rollouts: RolloutGroup


@contextmanager
def started_ray() -> Iterator[None]:
    """Join the cluster that RAY_ADDRESS names (as `ray job submit` sets it), or start one on this machine; a Ray that
    was already initialised in this process is used and left alone."""
    if ray.is_initialized():
        yield
        return
    paths = [str(ROOT), os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(
        address=os.environ.get("RAY_ADDRESS"),
        include_dashboard=False if "RAY_ADDRESS" not in os.environ else None,
        logging_level=logging.WARNING,
        log_to_driver=False,  # actors write to files in the run directory
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}},
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own, which exits with another code and says nothing
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def started_actors(config: RLConfig | EvalConfig, run: RunDirectory, method: PolicyMethod | None) -> Iterator[Actors]:
    """Trainer ranks (when there is a method to train with) and engines, ready to work; closed at the end.

    Start-up is concurrent: engines compile and load while the trainer does.
    """
    device = resolve(config.model.device)
    ranks = config.train.ranks if isinstance(config, RLConfig) else 0
    rollout = config.rollout if isinstance(config, RLConfig) else config
    with started_ray(), placed(device, ranks, rollout.engines, rollout.tensor_parallel_size) as options:
        futures: list[Any] = []
        trainers = None
        if isinstance(config, RLConfig):
            assert method is not None
            threads = config.train.threads_per_rank or max(1, device.cores // ranks)
            trainers = TrainerGroup.create(device, run, options[:ranks], threads)
            settings = trainer_settings(config, run)
            futures += trainers.begin(settings, method, device, config.sync.method, run.path / "sync")
        rollouts, starting = RolloutGroup.create(config, device, run, options[ranks:])
        try:
            ray.get(futures + starting)
            lora = config.lora if isinstance(config, RLConfig) else None
            if trainers is not None and lora is not None and lora.adapter is not None:
                synchronise(trainers, rollouts, version=0)  # engines start from the base
            yield Actors(trainers, rollouts)
        except BaseException:  # an error or Ctrl-C: nobody waits for a step that is under way
            rollouts.abandon()
            if trainers is not None:
                trainers.abandon()
            raise
        rollouts.close()
        if trainers is not None:
            trainers.close()


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
        replay_folder=str((run.path / "replay").resolve()),
        replay_steps=tuple(config.replay.steps),
        replay_keep=config.replay.keep,
    )
