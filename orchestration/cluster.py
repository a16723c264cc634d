"""Starts Ray, places the actors, brings them up together, and takes everything down again."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from algs.method import PolicyMethod
from configs.placement import colocate
from configs.schedule import Failures
from configs.schema import EvalConfig, RLConfig
from orchestration.cores import core_plan
from orchestration.devices import resolve
from orchestration.guard import guarded
from orchestration.placement import placed
from orchestration.rollout_group import RolloutGroup
from orchestration.run_directory import RunDirectory
from orchestration.trainer_actor import TrainerGroup
from orchestration.trainer_settings import TrainerSettings
from orchestration.watchdog import START_SECONDS, TrainerLost, Watch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Actors:
    """Everything that is alive during a job; an evaluation on its own has no trainers."""

    trainers: TrainerGroup | None
    rollouts: RolloutGroup
    watch: Watch  # of all of them


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
    init_ray(
        address=os.environ.get("RAY_ADDRESS") or "local",  # None would join whatever `ray start` left on this machine
        include_dashboard=False if "RAY_ADDRESS" not in os.environ else None,
        logging_level=logging.WARNING,
        log_to_driver=False,  # actors write to files in the run directory
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}},
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own, which exits with another code and says nothing
    try:
        with guarded():
            yield
    finally:
        ray.shutdown()


def init_ray(**options: Any) -> None:
    """As ray.init, tried twice: Ray gives its own processes 30 s to start, whatever else the machine has to do, and says so in a
    plain Exception. What the first attempt left behind ends with this process."""
    try:
        ray.init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        logging.getLogger(__name__).warning(
            "Ray did not start within its 30 s (a busy machine?); it is started once more"
        )
        ray.shutdown()
        ray.init(**options)


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
        rollouts = RolloutGroup.create(config, device, run, options[ranks:], cores, watch, note)
        trainers = None
        try:
            if rollouts.sleeps:
                rollouts.wait_for_all()
                rollouts.sleep()
            if isinstance(config, RLConfig):
                assert method is not None
                trainers = TrainerGroup.create(device, run, options[:ranks], cores, watch)
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
        replay_folder=str((run.path / "replay").resolve()),
        replay_steps=tuple(config.replay.steps),
        replay_keep=config.replay.keep,
    )
