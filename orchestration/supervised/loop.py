"""The loop of supervised and preference learning: one process per rank, the same trainer as reinforcement learning.

Every rank reads the same examples in the same order, packs the whole batch the same way and takes its own part. Only
gradients and sums travel between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.blocks.supervised import SLConfig
from data_feeds.examples.supervised_data import SupervisedData
from data_feeds.packing import MicroBatch
from orchestration.cluster.devices import resolve
from orchestration.cluster.launcher_rank import is_first_rank, join_ranks
from orchestration.metrics.step_clock import StepClock, due
from orchestration.metrics.tally import Tally
from orchestration.run.checksums import check_parts
from orchestration.run.console import Console
from orchestration.run.directory import CAPTURED_STEPS, RunDirectory, read_metrics
from orchestration.run.interruption import finishing_first
from orchestration.run.logs import captured_output
from orchestration.run.nonfinite import NonFiniteError, not_finite_message, skipped_warning
from orchestration.run.resume import DriverState, trainer_folder
from orchestration.start.load_data import supervised_steps
from orchestration.supervised.batches import Packing
from orchestration.supervised.reference_cache import reference_logprobs
from orchestration.trainer.settings import TrainerSettings


def run_sl(config: SLConfig, feed: SupervisedData, run: RunDirectory, write_report: Callable[[Path], Path]) -> None:
    """Train for the configured steps. Results are in the run directory.

    Raises:
        NonFiniteError: too many updates in a row held an Inf or NaN. The newest checkpoint holds the weights from
            before them.
    """
    rank, ranks = join_ranks()
    steps = supervised_steps(config, feed)
    with ExitStack() as stack:
        screen = stack.enter_context(captured_output(run.log_path(f"rank_{rank}")))
        console = stack.enter_context(Console(config.run.name, steps, screen)) if is_first_rank() else None
        if console is not None:
            console.note(str(feed))
        job = SLJob(config, feed, run, console, rank, ranks)
        stack.callback(job.close)
        job.asked = stack.enter_context(finishing_first(config.checkpoint.grace_seconds))
        for step in range(job.begin(), steps + 1):
            if step > 0:
                job.train(step)
            if step == 0 or due(step, config.eval.every, steps):
                job.evaluate()
            job.gather()
            if step > 0 and (job.is_to_end or due(step, config.checkpoint.period(steps), steps)):
                job.checkpoint(step)
            job.record(step)
            if is_first_rank():
                write_report(run.path)
            if job.is_to_end and step < steps:
                raise KeyboardInterrupt
        if console is not None:
            console.summary("done", job.closing())
    torch.distributed.barrier()


class SLJob:
    """One rank's part of a supervised job."""

    def __init__(
        self, config: SLConfig, feed: SupervisedData, run: RunDirectory, console: Console | None, rank: int, ranks: int
    ) -> None:
        from orchestration.trainer.trainer import Trainer  # late: DeepSpeed

        self.config, self.run, self.console, self.rank, self.ranks = config, run, console, rank, ranks
        self.feed, self.method = feed, config.algorithm.make_method()
        self.clock, self.tally = StepClock(), Tally()
        self.packing = Packing(config, self.method, ranks)
        self.feed_state = self.feed.sampler.state_dict()  # as it was after the last trained batch was drawn
        self.metrics: dict[str, float] = {}  # the step's, over all ranks
        self.asked: Callable[[], bool] = lambda: False  # whether this rank was asked to end
        self.is_to_end = False  # whether any was, as of the last `gather`
        self.losses: list[float] = []  # held-out losses, in order
        self.next_batch: Future[tuple[list[MicroBatch], dict[str, float], dict[str, Any]]] | None = None
        with self._phase("starting the trainer", "train"):
            holds_reference = config.objective.reference == "model"
            settings = trainer_settings(config, supervised_steps(config, feed), run)
            self.trainer = Trainer(settings, self.method, resolve(config.model.device), with_reference=holds_reference)
        if "ref_logprobs" in self.method.needs() and config.objective.reference == "precomputed":
            with self._phase("reference log-probabilities", "train"):
                examples = [*self.feed.all_training(), *self.feed.heldout]
                self.packing.reference = reference_logprobs(examples, self.trainer, self.packing, config, console)
        self.ahead = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")

    def begin(self) -> int:
        """Load the checkpoint that the run is resumed from, if any, and return the first step to do. A collective."""
        first = 0
        if self.run.resumed_from is not None:
            with self._phase("loading the checkpoint", "checkpoint"):
                state = DriverState.read(self.run.resumed_from)
                self.feed.sampler.load_state_dict(state.sampler)
                self.trainer.load_state(trainer_folder(self.run.resumed_from))
            self.losses = [row["eval/loss"] for row in read_metrics(self.run.path) if "eval/loss" in row]
            first = state.step + 1
            if self.console is not None:
                self.console.note(
                    f"resuming from {self.run.resumed_from}: step {first} of {self.console.steps} is next"
                )
        self.next_batch = self._prefetch()
        return first

    def _prefetch(self) -> Future[tuple[list[MicroBatch], dict[str, float], dict[str, Any]]]:
        """Draw and pack the next batch while the current one trains; also return the sampler's metrics and state."""

        def draw() -> tuple[list[MicroBatch], dict[str, float], dict[str, Any]]:
            sampler = self.feed.sampler
            batches = self.packing.of(sampler.next(self.config.train.batch_size))[self.rank]
            return batches, sampler.metrics(), sampler.state_dict()

        return self.ahead.submit(draw)

    def train(self, step: int) -> None:
        """Make one update.

        Raises:
            NonFiniteError: too many updates in a row, this one included, held an Inf or NaN.
        """
        with self._phase("waiting for data", "data"):
            assert self.next_batch is not None, "`begin` comes before `train`"
            batches, sampler_metrics, self.feed_state = self.next_batch.result()
            self.next_batch = self._prefetch()
        with self._phase("train", "train"):
            tally = self.trainer.step([self._with_reference(batches)], step)
        self.tally.merge(tally)
        self.metrics.update({f"data/{name}": value for name, value in sampler_metrics.items()})
        if self.trainer.counters.skipped_in_a_row and self.console is not None:
            self.console.warning(skipped_warning(step, self.trainer.counters.skipped_in_a_row, self.run))
        if self.trainer.counters.skipped_in_a_row >= self.config.train.max_skipped_in_a_row:
            self.gather()
            self.checkpoint(step)
            raise NonFiniteError(not_finite_message(step, self.trainer.counters.skipped_in_a_row, self.run))

    def _with_reference(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches, with log-probabilities of the reference model when the method needs them."""
        if "ref_logprobs" not in self.method.needs() or self.packing.reference is not None:
            return batches
        columns = self.trainer.recompute(batches, ["ref_logprobs"])
        return [batch.with_columns(own) for batch, own in zip(batches, columns, strict=True)]

    def evaluate(self) -> None:
        """Measure loss and metrics over the held-out examples, with one denominator for all of them."""
        if not self.feed.heldout:
            return
        with self._phase("evaluate", "eval"):
            batches = self._with_reference(self.packing.of(self.feed.heldout)[self.rank])
            self.tally.merge(self.trainer.evaluate(batches))

    def gather(self) -> None:
        """Merge the ranks' tallies of the step, and agree on whether the run was asked to end. A collective."""
        parts: list[tuple[Tally, bool]] = [(Tally(), False)] * self.ranks
        torch.distributed.all_gather_object(parts, (self.tally, self.asked()))
        self.metrics.update(Tally.merged(tally for tally, _ in parts).means())
        self.is_to_end = any(asked for _, asked in parts)
        self.tally = Tally()

    def checkpoint(self, step: int) -> None:
        """Write the model in Hugging Face format and the state for a resumed run, and prune older checkpoints. A
        collective.
        """
        with self._phase("checkpoint", "checkpoint"), ExitStack() as stack:
            folder = self.run.partial_checkpoint(step)
            if is_first_rank():
                stack.enter_context(self.run.checkpoint(step))
            parts = self.trainer.weights.save(folder)  # the first rank writes; the others take part in gathering
            if self.config.checkpoint.resume_state:
                torch.distributed.barrier()  # until the first rank has made the folder
                parts = self.trainer.save_state(trainer_folder(folder))
            reported: list[dict[str, int]] = [{}] * self.ranks
            torch.distributed.all_gather_object(reported, parts)
            if is_first_rank():
                check_parts(trainer_folder(folder) if self.config.checkpoint.resume_state else folder, reported)
                if self.config.checkpoint.resume_state:
                    DriverState(step, self.ranks, self.feed_state, self.metrics).write(folder)
                stack.close()  # the checkpoint is complete from here on
                self.run.prune_checkpoints(self.config.checkpoint.keep)

    def record(self, step: int) -> None:
        """Write the step's metrics and begin the next step."""
        metrics, self.metrics = {**self.metrics, **self.clock.lap()}, {}
        if "eval/loss" in metrics:
            self.losses.append(metrics["eval/loss"])
        if is_first_rank():
            if metrics.get("time/train_seconds", 0) > 0 and "train/tokens" in metrics:
                metrics["train/tokens_per_second"] = metrics["train/tokens"] / metrics["time/train_seconds"]
            self.run.write_metrics(step, metrics)
            assert self.console is not None
            self.console.step(step, metrics)

    def closing(self) -> dict[str, str | Path]:
        """Return the rows of the console's summary."""
        rows: dict[str, str | Path] = {}
        if self.losses:
            rows["held-out loss"] = f"{self.losses[0]:.4f} before, {self.losses[-1]:.4f} after"
        return {**rows, "report": self.run.report_path, "checkpoint": self.run.checkpoints()[-1]}

    def close(self) -> None:
        self.ahead.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _phase(self, title: str, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            if self.console is not None:
                stack.enter_context(self.console.phase(title))
            stack.enter_context(self.clock.phase(name))
            yield


def trainer_settings(config: SLConfig, total_updates: int, run: RunDirectory) -> TrainerSettings:
    """Return the trainer's settings. In supervised learning the temperature is 1, and a value head shares the trunk."""
    from configs.blocks.objective import Critic, Objective

    return TrainerSettings(
        model=config.model.located(),
        base_name=config.model.path,
        train=config.train,
        temperature=1.0,
        seed=config.run.seed,
        total_updates=total_updates,
        longest=config.data.max_tokens,
        objective=Objective(aggregation=config.objective.aggregation),
        critic=Critic(kind="shared"),
        lora=config.lora.located() if config.lora is not None else None,
        merged_checkpoints=config.checkpoint.merged,
        capture_folder=str(run.path / CAPTURED_STEPS),
        capture_steps=tuple(config.capture.steps),
        capture_keep=config.capture.keep,
    )
