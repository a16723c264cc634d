"""The driver loop of reinforcement learning: generate, train, sync, and now and then evaluate and keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from configs.load import method_for
from configs.schema import RLConfig
from data_feeds.prompts import PromptSets
from orchestration.clock import due
from orchestration.cluster import started_actors
from orchestration.console import Console
from orchestration.job import RLJob
from orchestration.logs import captured_output
from orchestration.run_directory import RunDirectory, checkpoints


def run_rl(config: RLConfig, prompts: PromptSets, run: RunDirectory, write_report: Callable[[Path], Path]) -> None:
    """Start everyone who works for the job, and do it. What is worth keeping is in the run directory. Raises: as `drive`."""
    method = method_for(config)
    with ExitStack() as stack:
        screen = stack.enter_context(captured_output(run.log_path("driver")))
        console = stack.enter_context(Console(config.run.name, config.train.steps, screen))
        with console.phase("starting engines and trainer"):
            actors = stack.enter_context(started_actors(config, run, method))
        drive(RLJob(config, method, prompts, run, actors, console), write_report)


def drive(job: RLJob, write_report: Callable[[Path], Path]) -> None:
    """Train for train.steps steps, with engines that hold the trainer's weights as version 0.

    Raises:
        ProbeFailed: an engine does not hold the trainer's weights.
        RewardFailures: more responses could not be scored than reward.max_error_rate allows.
        NonFiniteError: too many updates in a row held an Inf or NaN; there is a checkpoint from before them.
    """
    config, run, steps = job.config, job.run, job.config.train.steps
    for step in range(steps + 1):
        if step == 0:
            job.prove()  # engines and trainer start from the same weights
        else:
            groups = job.generate(step)
            if job.train(step, groups):
                job.sync()
            job.keep_samples(step, groups)
        if step == 0 or due(step, config.eval.every, steps):
            job.evaluate(step)
        if step > 0 and due(step, config.checkpoint.every, steps):
            job.checkpoint(step)
        job.console.step(step, job.record(step))
        write_report(run.path)
    before, after = job.accuracies[0], job.accuracies[-1]
    job.console.summary(
        "done",
        {
            "held-out accuracy": f"{before:.3f} before, {after:.3f} after",
            "report": run.report_path,
            "samples": run.path / "samples",
            "checkpoint": checkpoints(run.path)[-1],
        },
    )
