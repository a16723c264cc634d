"""Start Ray, place the actors, bring them up together, and end all of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from algs.method import PolicyMethod
from configs.blocks.rl import RLConfig
from orchestration.cluster.cpu_cores import core_plan
from orchestration.cluster.devices import resolve
from orchestration.cluster.gpu_bundles import reserve_devices
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.cluster.ray_session import started_ray
from orchestration.cluster.watchdog import TrainerLost, Waiting, Watch
from orchestration.engines.pool import MOMENT_SECONDS, EnginePool
from orchestration.run.directory import CAPTURED_STEPS, RunDirectory
from orchestration.trainer.ranks import TrainerRanks
from orchestration.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Actors:
    """All actors of a job; an evaluation on its own has no trainers."""

    trainers: TrainerRanks | None
    pool: EnginePool
    watch: Watch  # of all of them


@dataclass(frozen=True)
class Training:
    """The trainer ranks of a job, their settings, and the method they train with."""

    job: TrainerJob
    settings: TrainerSettings
    method: PolicyMethod

    @classmethod
    def of(cls, config: RLConfig, method: PolicyMethod, run: RunDirectory) -> Training:
        """Return the training that a configuration describes, in a run directory."""
        return cls(TrainerJob.of_rl(config), trainer_settings(config, run), method)


@contextmanager
def started_actors(
    engine_job: EngineJob, training: Training | None, run: RunDirectory, note: Callable[[str], None] = print
) -> Iterator[Actors]:
    """Start the trainer ranks (when there is something to train) and the engines; close them at the end of the block.

    Start-up is concurrent: engines compile and load while the trainer does. On GPUs that both share it is in turn,
    because an engine measures the free memory while it starts. note: called when an engine is replaced.
    """
    device = resolve(engine_job.model.device)
    trainer_job = training.job if training is not None else None
    cores = core_plan(engine_job, trainer_job, device)
    ranks, shared = (trainer_job.ranks, trainer_job.colocate) if trainer_job is not None else (0, None)
    watch = Watch(engine_job.failures.stall_seconds)
    devices = reserve_devices(device, ranks, engine_job.engines, engine_job.tensor_parallel_size, shared)
    with started_ray(), devices as options:
        pool = EnginePool.create(engine_job, device, run, options[ranks:], cores, watch, note)
        trainers = None
        try:
            if pool.sleeps:
                pool.wait_for_all()
                pool.sleep()
            if training is not None:
                trainers = TrainerRanks.create(device, run, options[:ranks], cores, watch)
                arguments = (training.settings, training.method, device, training.job.sync_method, run.path / "sync")
                starting = Waiting(watch, trainers.begin(*arguments))
                while not starting.is_over():
                    pool.look(MOMENT_SECONDS)  # engines start at the same time
            if pool.sleeps:
                if trainers is not None:
                    watch.wait(trainers.release_memory())
                pool.wake()
            pool.wait_for_all()
            yield Actors(trainers, pool, watch)
        except BaseException:  # an error or Ctrl-C: nobody waits for a step that is under way
            pool.abandon()
            if trainers is not None:
                trainers.abandon()
            raise
        pool.close()
        if trainers is not None:
            try:
                watch.wait(trainers.close())
            except TrainerLost as lost:  # the work is done: nothing that was to be kept goes with it
                note(str(lost))


def trainer_settings(config: RLConfig, run: RunDirectory) -> TrainerSettings:
    """Return the settings that a job gives to its trainer ranks."""
    return TrainerSettings(
        model=config.model.located(),
        base_name=config.model.path,
        train=config.train,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        total_updates=config.train.steps * config.train.updates_in_step,
        longest=config.rollout.engine.get("max_model_len", EngineJob.of_rl(config).max_model_len),
        objective=config.objective,
        critic=config.critic,
        lora=config.lora.located() if config.lora is not None else None,
        merged_checkpoints=config.checkpoint.merged,
        capture_folder=str(run.path / CAPTURED_STEPS),
        capture_steps=tuple(config.capture.steps),
        capture_keep=config.capture.keep,
    )
