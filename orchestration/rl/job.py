"""What a reinforcement-learning job can do, one method a phase. The order is the loop's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from configs.blocks.rl import RLConfig
from data_feeds.prompts.prompts import PromptSets
from data_feeds.prompts.sampler import ShuffledPrompts
from orchestration.cluster.watchdog import EnginesLost
from orchestration.engines.pool import MOMENT_SECONDS
from orchestration.engines.utilisation import EngineUtilisation
from orchestration.metrics.rollouts import evaluation_tally, refuse_failed_rewards, rollout_tally
from orchestration.metrics.step_clock import StepClock
from orchestration.metrics.tally import Tally
from orchestration.rl.actors import Actors
from orchestration.rl.rollout_queue import Batch, RolloutQueue
from orchestration.rl.weight_sync import SyncError, WeightSync
from orchestration.rl.weight_sync_in_flight import InFlightSync
from orchestration.run.atomic_files import afterwards
from orchestration.run.console import Console
from orchestration.run.directory import RunDirectory
from orchestration.run.nonfinite import NonFiniteError, not_finite_message, skipped_warning
from orchestration.run.resume import DriverState, read_replay_buffer, trainer_folder, write_replay_buffer
from orchestration.trainer.recompute import recomputed_columns
from orchestration.trainer.rl_batches import prepare_updates
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Trajectory
from rollouts.vllm.sampling import Sampling


class RLJob:
    """One job's state: policy version, prompt order, clock and tally of the step, handles on all who work for it."""

    def __init__(
        self, config: RLConfig, objective: TokenObjective, prompts: PromptSets, run: RunDirectory, actors: Actors,
        console: Console,
    ) -> None:  # fmt: skip
        assert actors.trainers is not None
        self.config, self.objective, self.run, self.console = config, objective, run, console
        self.trainers, self.rollouts = actors.trainers, actors.rollouts
        self.weights = WeightSync(config, self.trainers, self.rollouts, console.warning, actors.watch.get)
        self.sampling = Sampling.of_rollout(config.rollout, run_seed=config.run.seed)
        self.sampler = ShuffledPrompts(
            prompts.train, config.run.seed, config.data.retire_pass_rate, config.reward.pass_threshold,
            config.rollout.prompts_per_step,
        )  # fmt: skip
        self.rollout_queue = RolloutQueue(config, objective, self.rollouts, self.sampler, self.sampling, console.note)
        self.heldout = prompts.heldout[: config.eval.max_prompts]
        self.probes = prompts.train[: config.sync.probe_prompts]
        self.probe_sampling = probe_sampling(config, self.sampling)
        self.version = 0  # of the policy: what the trainer trains
        self._ending: EnginesLost | SyncError | None = None  # what ends the run, once the trainer is done with its work
        overlaps = config.schedule.mode == "overlap" and config.sync.method != "nccl" and not self.rollouts.sleeps
        self.in_flight = InFlightSync(config, self.weights, self.trainers, self.rollouts) if overlaps else None
        self.rollouts.on_restart = self.in_flight.bring_up if self.in_flight else self.weights.bring_up
        self.first_step = self.trained_steps = 0  # step 0 only looks at what training starts from
        self.accuracies: list[float] = []  # held-out, in order
        self.clock = StepClock()
        self.utilisation = EngineUtilisation()
        self.tally = Tally()
        self.carried: dict[str, float] = {}  # numbers of the step that a resumed run has from its checkpoint

    def begin(self) -> None:
        """Bring engines to what training starts from, where that is not the model they were started with."""
        if self.config.lora is not None and self.config.lora.adapter is not None:
            self.weights.push(self.version)
        self.probe_weights()
        self.trainers.meanwhile = self._meanwhile

    def generate(self) -> Batch:
        """The next step's groups, whole, scored and filtered: `Group.trained` is what is in the loss."""
        self._end_if_it_must()  # what came up since the last step, as while its checkpoint was written
        with self._phase("generate"):
            scoring_seconds = self.rollouts.scoring_seconds()
            batch = self.rollout_queue.take(self.version, self._turn)
            scoring_seconds = self.rollouts.scoring_seconds() - scoring_seconds
        self.clock.move(min(max(0.0, scoring_seconds), self.clock.phases["generate"]), "generate", "reward")
        self.tally.merge(rollout_tally(batch.finished, self.config.reward.pass_threshold))
        self.tally.merge(self.rollout_queue.tally(batch, self.version))
        if self.config.data.retire_pass_rate is not None:
            self.tally.total("rollout/retired_prompts", len(self.sampler.retired))
        return batch

    def _meanwhile(self) -> None:
        """What the driver does while it waits for trainers: nothing in sync mode, where there is nothing to ask."""
        if self.config.schedule.mode == "overlap" and self._ending is None:
            with self._trainer_first():
                self._turn(0.0)

    @contextmanager
    def _trainer_first(self) -> Iterator[None]:
        """When engines are lost for good inside, or cannot be brought to new weights, the trainer is let finish before it is an
        error, so that the last checkpoint is of a whole step: that of the batch, which nobody else has any more."""
        try:
            yield
        except (EnginesLost, SyncError) as error:
            self._ending = error

    def _end_if_it_must(self) -> None:
        if self._ending is not None:
            raise self._ending

    def _turn(self, wait_seconds: float) -> None:
        """Ask, collect, and see a sync through that goes on beside training."""
        if self.in_flight is None:
            self.rollout_queue.turn(self.weights.version, wait_seconds)
            return
        wait_seconds = wait_seconds if self.in_flight.is_settled else min(wait_seconds, MOMENT_SECONDS)
        with self.weights.refusals():
            self.rollout_queue.turn(self.weights.version, wait_seconds)
        self.tally.merge(self.in_flight.turn())

    def train(self, step: int, batch: Batch) -> bool:
        """Update the policy; False when no group had any signal, so that nothing changed.

        Raises:
            RewardFailures: the reward choked on too many of the responses.
            NonFiniteError: too many updates in a row were skipped; there is a checkpoint.
        """
        refuse_failed_rewards(batch.trajectories, self.config.reward)
        skipped_in_a_row = 0
        with self._phase("train"), self._engines_asleep():
            self._meanwhile()  # engines go on with the next batch
            updates, prepared = prepare_updates(
                batch.groups, self.objective, self.config, self.version, self._recompute
            )
            self.tally.merge(prepared)
            if updates:
                tally, skipped_in_a_row = self.trainers.step(updates, step)
                self.tally.merge(tally)
                self.version += 1
            self.rollout_queue.trained(self.version)
            self.trained_steps = step
        self._end_if_it_must()
        if skipped_in_a_row:
            self.console.warning(skipped_warning(step, skipped_in_a_row, self.run))
        if skipped_in_a_row >= self.config.train.max_skipped_in_a_row:
            self.checkpoint(step)
            raise NonFiniteError(not_finite_message(step, skipped_in_a_row, self.run))
        return bool(updates)

    @contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Where trainer and engines share devices, these stand still inside."""
        if self.rollouts.sleeps:
            with self._trainer_first():
                self.rollouts.sleep()
        yield
        if self.rollouts.sleeps and self._ending is None:
            self.trainers.release_memory()
            self.rollouts.wake()

    def _recompute(self, trajectories: list[Trajectory], names: Sequence[str]) -> dict[str, list[np.ndarray]]:
        train = self.config.train
        return recomputed_columns(
            self.trainers, trajectories, names, train.max_tokens_per_micro_batch, train.share_prompts
        )

    def sync(self, batch: Batch) -> None:
        """Bring the engines to the trainer's weights; in overlap they take them while training goes on. Raises: SyncError,
        ProbeFailed."""
        if self.in_flight is not None:
            with self._phase("sync"):
                self.tally.merge(self.in_flight.settle())
                self.tally.merge(
                    self.in_flight.push(self.version, [t for group in batch.groups for t in group.trained])
                )
            self._end_if_it_must()
            return
        with self._phase("sync"):
            self.tally.merge(self.weights.push(self.version))
        self.probe_weights()

    def probe_weights(self) -> None:
        """Compare engines and trainer on short continuations. Raises: ProbeFailed."""
        with self._phase("sync"):
            self.tally.merge(self.weights.probe_weights(self.version, self.probes, self.probe_sampling))

    def evaluate(self, step: int) -> None:
        """Judge the policy on held-out prompts, with the engines that train it."""
        if self.in_flight is not None:
            with self._phase("sync"):
                self.tally.merge(self.in_flight.settle())
        self.utilisation.take_in(self.rollouts.counters())
        with self._phase("eval"):
            sampling = Sampling.of_eval(self.config.eval, self.config.rollout, self.config.run.seed)
            made = self.rollouts.generate(self.heldout, self.config.eval.samples_per_prompt, sampling, step, "heldout")
            judged = evaluation_tally(made.groups, self.config.reward.pass_threshold, sampling.greedy)
            self.run.write_samples(step, made.trajectories, heldout=True)
        is_beside = self.config.schedule.mode == "overlap"  # training responses go on being generated
        self.utilisation.take_in(self.rollouts.counters(), is_counted=is_beside)
        self.tally.merge(judged)
        self.accuracies.append(judged.means()["eval/accuracy"])

    def checkpoint(self, step: int) -> None:
        """Write the policy in Hugging Face format, and what a resumed run needs; older checkpoints of this run make room."""
        with self._phase("checkpoint"), self.run.checkpoint(step) as folder:
            self.trainers.save(folder)
            if self.config.checkpoint.resume_state:
                self.trainers.save_state(trainer_folder(folder))
                self._state(step).write(folder)
                write_replay_buffer(folder, self.rollout_queue.reuse.state)
        self.run.prune_checkpoints(self.config.checkpoint.keep)

    def _state(self, step: int) -> DriverState:
        return DriverState(
            step=step,
            ranks=self.config.train.ranks,
            sampler=self.sampler.state_dict(),
            metrics={**self.carried, **self.tally.means()},
            version=self.version,
            accuracies=list(self.accuracies),
            unfinished=[prompt.prompt_id for prompt in self.rollout_queue.unfinished()],
        )

    def resume(self, checkpoint: Path) -> None:
        """Go on after the checkpoint's step, with actors that have just started. Prompts that were under way are asked again."""
        state = DriverState.read(checkpoint)
        self.trainers.load_state(trainer_folder(checkpoint))
        self.sampler.load_state_dict(state.sampler)
        by_id = {prompt.prompt_id: prompt for prompt in self.sampler.prompts}
        self.rollout_queue.begin_after(state.step, [by_id[name] for name in state.unfinished])
        self.trained_steps, self.first_step, self.accuracies = state.step, state.step + 1, list(state.accuracies)
        self.rollout_queue.reuse.load_state(read_replay_buffer(checkpoint))
        self.version = state.version
        self.weights.push(self.version)
        self.probe_weights()
        self.trainers.meanwhile = self._meanwhile
        self.tally = Tally()  # of the step that is to come
        self.clock.lap()

    @contextmanager
    def keeping_samples(self, step: int, batch: Batch) -> Iterator[None]:
        """Writes what the model wrote and what it was paid, after the block; also when it ends in an error."""
        with afterwards(lambda: self.run.write_samples(step, batch.trajectories)):
            yield

    def record(self, step: int) -> dict[str, float]:
        """Write the step's line of metrics and begin the next step."""
        self.utilisation.take_in(self.rollouts.counters())
        engines = self.utilisation.lap()
        self.tally.merge(self.rollouts.tally())
        times = self.clock.lap()
        if self.config.schedule.mode == "overlap":
            self.tally.merge(engines.tally(times["time/step_seconds"]))
        metrics = {**self.carried, **self.tally.means(), **times}
        if engines.busy_seconds > 0:
            metrics["rollout/tokens_per_second"] = engines.tokens_generated / engines.busy_seconds
        if "train/tokens" in metrics and times["time/train_seconds"] > 0:
            metrics["train/tokens_per_second"] = metrics["train/tokens"] / times["time/train_seconds"]
        self.run.write_metrics(step, metrics)
        self.tally, self.carried = Tally(), {}
        return metrics

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.console.phase(name), self.clock.phase(name):
            yield


def probe_sampling(config: RLConfig, sampling: Sampling) -> Sampling:
    """How the continuations are drawn that engines and trainer are compared on: short ones, from the whole distribution. Of a
    truncated one an engine tells renormalised log-probabilities, which the trainer does not compute."""
    tokens = min(config.sync.probe_tokens, sampling.max_new_tokens)
    return replace(sampling, max_new_tokens=tokens, top_p=1.0, top_k=0, stop=())
