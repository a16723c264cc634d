"""The phases of a reinforcement learning job, one method each. The loop calls them in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs.blocks.rl import RLConfig
from data_feeds.prompts.prompts import PromptSets
from data_feeds.prompts.sampler import ShuffledPrompts
from orchestration.engines.requests import step_requests
from orchestration.metrics.rollouts import evaluation_tally, refuse_failed_rewards, rollout_tally
from orchestration.rl.actors import Actors
from orchestration.rl.driver import Driver
from orchestration.rl.rollout_queue import Batch, RolloutQueue
from orchestration.rl.step_metrics import StepMetrics
from orchestration.rl.weight_sync import WeightSync
from orchestration.run.atomic_files import afterwards
from orchestration.run.checksums import check_parts
from orchestration.run.console import Console
from orchestration.run.directory import RunDirectory, read_metrics
from orchestration.run.nonfinite import NonFiniteError, not_finite_message, skipped_warning
from orchestration.run.resume import (
    DriverState,
    owes_evaluation,
    read_replay_buffer,
    trainer_folder,
    write_replay_buffer,
)
from orchestration.trainer.recompute import recompute
from orchestration.trainer.rl_batches import prepare_updates
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Trajectory
from rollouts.vllm.sampling import Sampling


@dataclass
class Progress:
    """The progress of a job."""

    version: int = 0  # of the policy: what the trainer trains
    first_step: int = 0  # step 0 only looks at what training starts from
    trained_steps: int = 0
    accuracies: list[float] = field(default_factory=list)  # held-out, in order


class RLJob:
    """One job: its progress, and handles on all that work for it."""

    def __init__(
        self, config: RLConfig, objective: TokenObjective, prompts: PromptSets, run: RunDirectory, actors: Actors,
        console: Console,
    ) -> None:  # fmt: skip
        assert actors.trainers is not None
        self.config, self.objective, self.run, self.console = config, objective, run, console
        self.trainers, self.pool, self.prompts = actors.trainers, actors.pool, prompts
        sampler = ShuffledPrompts(
            prompts.train, config.run.seed, config.data.retire_pass_rate, config.reward.pass_threshold,
            config.rollout.prompts_per_step,
        )  # fmt: skip
        sampling = Sampling.of_rollout(config.rollout, run_seed=config.run.seed)
        queue = RolloutQueue(config, objective, self.pool, sampler, sampling, console.note)
        weights = WeightSync(config, self.trainers, self.pool, actors.watch, console.warning)
        self.driver = Driver(config, self.trainers, self.pool, queue, weights, actors.watch)
        self.progress = Progress()
        self.metrics = StepMetrics(console)

    # ---- the phases of a step ----

    def begin(self) -> None:
        """Push the weights to the engines if a LoRA job continues an adapter, and check the engines' weights."""
        if self.config.lora is not None and self.config.lora.adapter is not None:
            self.metrics.tally.merge(self.driver.weights.push(self.progress.version))
        self.probe()
        self.driver.begin_overlap()

    def generate(self) -> Batch:
        """Return the next step's groups, whole, scored and filtered: `Group.trained` are the responses in the loss."""
        self.driver.raise_failure()  # what came up since the last step, as while its checkpoint was written
        with self.metrics.phase("generate"):
            scoring_seconds = self.pool.scoring_seconds()
            batch = self.driver.next_batch(self.progress.version)
            scoring_seconds = self.pool.scoring_seconds() - scoring_seconds
        self.metrics.move_scoring(scoring_seconds)
        tally, queue = self.metrics.tally, self.driver.queue
        tally.merge(rollout_tally(batch.finished, self.config.reward.pass_threshold))
        tally.merge(queue.tally(batch, self.progress.version))
        if self.config.data.retire_pass_rate is not None:
            tally.total("rollout/retired_prompts", len(queue.sampler.retired))
        return batch

    def train(self, step: int, batch: Batch) -> bool:
        """Update the policy; return False when no group had any signal, so that nothing changed.

        Raises:
            RewardFailures: too many of the responses could not be scored.
            NonFiniteError: too many updates in a row were skipped; there is a checkpoint.
        """
        refuse_failed_rewards(batch.trajectories, self.config.reward)
        progress, skipped_in_a_row = self.progress, 0
        with self.metrics.phase("train"), self._engines_asleep():
            self.driver.go_round_beside()  # engines go on with the next batch
            updates, prepared = prepare_updates(
                batch.groups, self.objective, self.config, progress.version, self._recomputed
            )
            self.metrics.tally.merge(prepared)
            if updates:
                tally, skipped_in_a_row = self.driver.wait(self.trainers.step(updates, step))
                self.metrics.tally.merge(tally)
                progress.version += 1
            self.driver.queue.trained(progress.version)
            progress.trained_steps = step
        self.driver.raise_failure()
        if skipped_in_a_row:
            self.console.warning(skipped_warning(step, skipped_in_a_row, self.run))
        if skipped_in_a_row >= self.config.train.max_skipped_in_a_row:
            self.checkpoint(step)
            raise NonFiniteError(not_finite_message(step, skipped_in_a_row, self.run))
        return bool(updates)

    @contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Stop engines that share devices with the trainer during the block."""
        if self.pool.sleeps:
            with self.driver.trainer_first():
                self.pool.sleep()
        yield
        if self.pool.sleeps and self.driver.failure is None:
            self.driver.wait(self.trainers.release_memory())
            self.pool.wake()

    def _recomputed(self, trajectories: list[Trajectory], names: Sequence[str]) -> dict[str, list[np.ndarray]]:
        train = self.config.train
        budget = train.max_tokens_per_micro_batch
        return self.driver.wait(recompute(self.trainers, trajectories, names, budget, train.share_prompts))

    def sync(self, batch: Batch) -> None:
        """Bring the engines to the trainer's weights; in overlap mode they load them while training goes on.

        Raises:
            SyncError: every method failed.
            ProbeFailed: the engines hold other weights.
        """
        with self.metrics.phase("sync"):
            self.driver.send_weights(self.progress.version, batch)
        if not self.driver.syncs_in_flight:
            self.probe()

    def probe(self) -> None:
        """Compare engines and trainer on short continuations. Raise ProbeFailed when they differ."""
        with self.metrics.phase("sync"):
            self.driver.probe(self.progress.version, self.prompts.train[: self.config.sync.probe_prompts])

    def evaluate(self, step: int) -> None:
        """Evaluate the policy on held-out prompts, with the engines that also generate for training."""
        config = self.config
        with self.metrics.phase("sync"):
            self.driver.settle()
        self.metrics.read_engines(self.pool.counters())
        with self.metrics.phase("eval"):
            sampling = Sampling.of_eval(config.eval, config.rollout, config.run.seed)
            heldout = self.prompts.heldout[: config.eval.max_prompts]
            requests = step_requests(heldout, config.eval.samples_per_prompt, sampling, step, "heldout")
            groups = self.driver.generate(requests)
            tally = evaluation_tally(groups, config.reward.pass_threshold, sampling.greedy)
            self.run.write_samples(step, [t for group in groups for t in group.trajectories], heldout=True)
        is_beside = config.schedule.mode == "overlap"  # training responses go on being generated
        self.metrics.read_engines(self.pool.counters(), is_counted=is_beside)
        self.metrics.tally.merge(tally)
        self.progress.accuracies.append(tally.means()["eval/accuracy"])

    @contextmanager
    def keeping_samples(self, step: int, batch: Batch) -> Iterator[None]:
        """Write the responses and their rewards to samples/ after the block, even when it ends in an error."""
        with afterwards(lambda: self.run.write_samples(step, batch.trajectories)):
            yield

    def record(self, step: int) -> dict[str, float]:
        """Write the step's line of metrics, return it, and begin the next step."""
        self.metrics.read_engines(self.pool.counters())
        self.metrics.tally.merge(self.driver.take_tally())
        metrics = self.metrics.finish(overlaps=self.config.schedule.mode == "overlap")
        self.run.write_metrics(step, metrics)
        return metrics

    # ---- checkpoints ----

    def checkpoint(self, step: int) -> None:
        """Write the policy in Hugging Face format, and what a resumed run needs; remove older checkpoints."""
        with self.metrics.phase("checkpoint"), self.run.checkpoint(step) as folder:
            check_parts(folder, self.driver.wait(self.trainers.save(folder)))
            if self.config.checkpoint.resume_state:
                state = trainer_folder(folder)
                check_parts(state, self.driver.wait(self.trainers.save_state(state)))
                self.state(step).write(folder)
                write_replay_buffer(folder, self.driver.queue.replay_buffer.state)
        self.run.prune_checkpoints(self.config.checkpoint.keep)

    def state(self, step: int) -> DriverState:
        """Return the driver's state, from which a run can be resumed after this step."""
        self.metrics.tally.merge(self.driver.take_tally())
        queue = self.driver.queue
        return DriverState(
            step=step,
            ranks=self.config.train.ranks,
            sampler=queue.sampler.state_dict(),
            metrics=self.metrics.so_far(),
            version=self.progress.version,
            accuracies=list(self.progress.accuracies),
            unfinished=[prompt.prompt_id for prompt in queue.unfinished()],
        )

    def resume(self, checkpoint: Path) -> None:
        """Continue after the checkpoint's step, with actors that have just started. Submit again the prompts that were
        under way. If the run ended before the step's evaluation, evaluate now.

        Raises:
            ValueError: the checkpoint does not fit the job.
            SyncError, ProbeFailed: the engines could not be brought to its weights.
        """
        state, queue = DriverState.read(checkpoint), self.driver.queue
        with self.console.phase("resuming"):
            self.driver.wait(self.trainers.load_state(trainer_folder(checkpoint)))
            queue.sampler.load_state_dict(state.sampler)
            by_id = {prompt.prompt_id: prompt for prompt in self.prompts.train}
            queue.begin_after(state.step, [by_id[name] for name in state.unfinished])
            queue.replay_buffer.load_state(read_replay_buffer(checkpoint))
            accuracies = list(state.accuracies)
            if "eval/accuracy" not in state.metrics:  # evaluated when the run was resumed before
                later = [row for row in read_metrics(self.run.path) if row["step"] == state.step]
                accuracies += [row["eval/accuracy"] for row in later if "eval/accuracy" in row]
            self.progress = Progress(state.version, state.step + 1, state.step, accuracies)
            self.driver.weights.push(state.version)
            self.probe()
            self.driver.begin_overlap()
            self.driver.take_tally()
            self.metrics.begin_step()
        self.console.note(f"goes on after step {state.step}, from {checkpoint}")
        if owes_evaluation(self.run, state, self.config):
            self.metrics.from_checkpoint = state.metrics
            self.evaluate(state.step)
            self.console.step(state.step, self.record(state.step))
