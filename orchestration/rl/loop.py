"""The driver loop of reinforcement learning: generate, train, sync, and at times evaluate and write a checkpoint.

There is one loop. In sync mode a step's groups are submitted when the step begins; in overlap mode prompts are always
submitted ahead, as far as schedule.max_staleness allows, and engines generate while the trainer trains (rl/driver.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from configs.blocks.rl import RLConfig
from configs.reading.load import method_for
from data_feeds.prompts.prompts import PromptSets
from orchestration.cluster.job_shape import EngineJob
from orchestration.cluster.watchdog import EnginesLost, TrainerLost
from orchestration.metrics.step_clock import due
from orchestration.rl.actors import Training, started_actors
from orchestration.rl.job import RLJob
from orchestration.rl.weight_sync import SyncError
from orchestration.run.atomic_files import not_hiding
from orchestration.run.checksums import read_marker
from orchestration.run.console import Console
from orchestration.run.directory import RunDirectory
from orchestration.run.interruption import Interrupted, finishing_first
from orchestration.run.logs import captured_output
from orchestration.run.resume import how_to_resume, newest_resumable, restart_run, restore_run
from orchestration.trainer.token_objective import TokenObjective

WriteReport = Callable[[Path], Path]


def run_rl(config: RLConfig, prompts: PromptSets, run: RunDirectory, write_report: WriteReport) -> None:
    """Start all actors and do the job; begin again from the last checkpoint when a trainer rank is lost.

    All results are in the run directory. Raise what `drive` raises, and TrainerLost after failures.job_restarts or when
    the checkpoint holds no state from which to continue.
    """
    objective = TokenObjective(method_for(config), config.objective)
    with ExitStack() as stack:
        screen = stack.enter_context(captured_output(run.log_path("driver")))
        console = stack.enter_context(Console(config.run.name, config.train.steps, screen))
        checkpoint = run.resumed_from
        for restarts in range(config.failures.job_restarts + 1):
            try:
                attempt(config, objective, prompts, run, console, write_report, checkpoint)
                return
            except TrainerLost as lost:
                checkpoint = newest_resumable(run)
                if restarts == config.failures.job_restarts or (
                    checkpoint is None and (run.checkpoints() or run.damaged)
                ):
                    allowed = f"failures.job_restarts = {config.failures.job_restarts}"
                    raise TrainerLost(lost.name, lost.how, f"{lost}. {allowed}. {how_to_resume(run)}") from lost
                if checkpoint is None:
                    restart_run(run)
                else:
                    for said in run.set_aside_damaged():
                        console.warning(said)
                    restore_run(run, checkpoint, config)
                begins = f"from {checkpoint}" if checkpoint else "from its beginning: there is no checkpoint yet"
                console.warning(f"{lost}\nThe job begins again {begins} (restart {restarts + 1}).")


def attempt(
    config: RLConfig, objective: TokenObjective, prompts: PromptSets, run: RunDirectory, console: Console,
    write_report: WriteReport, checkpoint: Path | None,
) -> None:  # fmt: skip
    """Do the job with new actors, from its beginning or from a checkpoint. Raise what `drive` raises."""
    with ExitStack() as stack:
        with console.phase("starting engines and trainer"):
            actors = stack.enter_context(
                started_actors(
                    EngineJob.of_rl(config), Training.of(config, objective.method, run), run, console.warning
                )
            )
        job = RLJob(config, objective, prompts, run, actors, console)
        if checkpoint is not None:
            job.resume(checkpoint)
        drive(job, write_report)


def drive(job: RLJob, write_report: WriteReport) -> None:
    """Train for train.steps steps, with engines that hold the trainer's weights; a resumed job goes on after its last.

    Raises:
        ProbeFailed: an engine does not hold the trainer's weights.
        RewardFailures: more responses could not be scored than reward.max_error_rate allows.
        NonFiniteError: too many updates in a row held an Inf or NaN; there is a checkpoint from before them.
        EnginesLost: engines died more often than failures.engine_restarts allows; there is a checkpoint.
        SyncError: the engines could not be brought to the trainer's weights; there is a checkpoint too.
        TrainerLost: a trainer rank died, or stood still for failures.stall_seconds.
        KeyboardInterrupt: the run was asked to end; there is a checkpoint of the last trained step.
    """
    run, steps = job.run, job.config.train.steps
    with finishing_first(job.config.checkpoint.grace_seconds) as job.driver.asked:
        try:
            for step in range(job.progress.first_step, steps + 1):
                do_step(job, step)
                job.console.step(step, job.record(step))
                write_report(run.path)
        except (EnginesLost, SyncError, Interrupted) as error:
            job.driver.stop()  # another round would meet the lost engine again
            trained = job.progress.trained_steps
            if trained > max((read_marker(kept)["step"] for kept in run.checkpoints()), default=0):
                with not_hiding(error):
                    job.checkpoint(trained)
            if isinstance(error, Interrupted):
                raise KeyboardInterrupt from error
            raise type(error)(f"{error} {how_to_resume(run)}") from error
    before, after = job.progress.accuracies[0], job.progress.accuracies[-1]
    job.console.summary(
        "done",
        {
            "held-out accuracy": f"{before:.3f} before, {after:.3f} after",
            "report": run.report_path,
            "samples": run.path / "samples",
            "checkpoint": run.checkpoints()[-1],
        },
    )


def do_step(job: RLJob, step: int) -> None:
    """Do one step; step 0 only evaluates the model that training starts from."""
    config = job.config
    if step == 0:
        job.begin()
    else:
        batch = job.generate()
        with job.keeping_samples(step, batch):
            if job.train(step, batch):
                job.sync(batch)
    if step == 0 or due(step, config.eval.every, config.train.steps):
        job.evaluate(step)
    if step > 0 and due(step, config.checkpoint.period(config.train.steps), config.train.steps):
        job.checkpoint(step)
