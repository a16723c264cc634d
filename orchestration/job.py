"""What a reinforcement-learning job can do, one method a phase. The order is the loop's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from algs.method import PolicyMethod
from configs.schema import RLConfig
from data_feeds.prompts import PromptSets
from data_feeds.sampler import ShuffledPrompts
from orchestration.clock import StepClock
from orchestration.cluster import Actors
from orchestration.console import Console
from orchestration.evaluation import evaluation_tally
from orchestration.frozen import frozen_columns
from orchestration.metrics import Tally
from orchestration.nonfinite import NonFiniteError, not_finite_message, skipped_warning
from orchestration.refill import StepFeed
from orchestration.rollout_metrics import RewardFailures, refuse_failed_rewards, rollout_tally
from orchestration.run_directory import RunDirectory
from orchestration.sync import prove, synchronise
from orchestration.update import prepare_updates
from rollouts.records import Group, Trajectory
from rollouts.sampling import Sampling


class RLJob:
    """One job's state: policy version, prompt order, clock and tally of the step, handles on all who work for it."""

    def __init__(
        self, config: RLConfig, method: PolicyMethod, prompts: PromptSets, run: RunDirectory, actors: Actors,
        console: Console,
    ) -> None:  # fmt: skip
        assert actors.trainers is not None
        self.config, self.method, self.run, self.console = config, method, run, console
        self.trainers, self.rollouts = actors.trainers, actors.rollouts
        self.sampling = Sampling.of_rollout(config.rollout, run_seed=config.run.seed)
        self.sampler = ShuffledPrompts(
            prompts.train, config.run.seed, config.data.retire_pass_rate, config.reward.pass_threshold,
            config.rollout.prompts_per_step,
        )  # fmt: skip
        self.feed = StepFeed(config, self.rollouts, self.sampler, self.sampling, console.note)
        self.heldout = prompts.heldout[: config.eval.max_prompts]
        self.probes = prompts.train[: config.sync.probe_prompts]
        self.version = 0  # policy versions pushed to the engines
        self.accuracies: list[float] = []  # held-out, in order
        self.clock = StepClock()
        self.tally = Tally()

    def generate(self, step: int) -> list[Group]:
        """Ask the step's prompts; groups come back whole, scored and filtered: `Group.trained` is what is in the loss.

        Raises: RewardFailures, after keeping the samples that the reward choked on.
        """
        with self._phase("generate"):
            made, filtered = self.feed.gather(step)
        self.clock.move(made.reward_seconds, "generate", "reward")
        self.tally.merge(rollout_tally(made.groups, self.config.reward.pass_threshold)).merge(filtered)
        if self.config.data.retire_pass_rate is not None:
            self.tally.total("rollout/retired_prompts", len(self.sampler.retired))
        try:
            refuse_failed_rewards(made.trajectories, self.config.reward)
        except RewardFailures:
            self.keep_samples(step, made.groups)
            raise
        return made.groups

    def train(self, step: int, groups: list[Group]) -> bool:
        """Update the policy; False when no group had any signal, so that nothing changed.

        Raises: NonFiniteError when too many updates in a row were skipped, after writing a checkpoint.
        """
        skipped_in_a_row = 0
        with self._phase("train"):
            updates, prepared = prepare_updates(groups, self.method, self.config, self.version, self._frozen)
            self.tally.merge(prepared)
            if updates:
                tally, skipped_in_a_row = self.trainers.step(updates, step)
                self.tally.merge(tally)
        if skipped_in_a_row:
            self.console.warning(skipped_warning(step, skipped_in_a_row, self.run))
        if skipped_in_a_row >= self.config.train.max_skipped_in_a_row:
            self.keep_samples(step, groups)
            self.checkpoint(step)
            raise NonFiniteError(not_finite_message(step, skipped_in_a_row, self.run))
        return bool(updates)

    def _frozen(self, trajectories: list[Trajectory], names: Sequence[str]) -> dict[str, list[np.ndarray]]:
        train = self.config.train
        return frozen_columns(
            self.trainers, trajectories, names, self.version, train.max_tokens_per_micro_batch, train.share_prompts
        )

    def sync(self) -> None:
        """Bring the engines to the trainer's weights. Raises: ProbeFailed."""
        with self._phase("sync"):
            self.version += 1
            synchronise(self.trainers, self.rollouts, self.version)
        self.prove()

    def prove(self) -> None:
        """Compare engines and trainer on short continuations. Raises: ProbeFailed."""
        with self._phase("sync"):
            self.tally.merge(prove(self.trainers, self.rollouts, self.version, self.probes, self.sampling, self.config))

    def evaluate(self, step: int) -> None:
        """Judge the policy on held-out prompts, with the engines that train it."""
        with self._phase("eval"):
            sampling = Sampling.of_eval(self.config.eval, self.config.rollout, self.config.run.seed)
            made = self.rollouts.generate(self.heldout, self.config.eval.samples_per_prompt, sampling, step, "heldout")
            judged = evaluation_tally(made.groups, self.config.reward.pass_threshold, sampling.greedy)
            self.run.write_samples(step, made.trajectories, heldout=True)
        self.tally.merge(judged)
        self.accuracies.append(judged.means()["eval/accuracy"])

    def checkpoint(self, step: int) -> None:
        """Write the policy in Hugging Face format; older checkpoints of this run make room."""
        with self._phase("checkpoint"), self.run.checkpoint(step) as folder:
            self.trainers.save(folder)
        self.run.prune_checkpoints(self.config.checkpoint.keep)

    def keep_samples(self, step: int, groups: list[Group]) -> None:
        """Write what the model wrote and what it was paid."""
        self.run.write_samples(step, [t for group in groups for t in group.trajectories])

    def record(self, step: int) -> dict[str, float]:
        """Write the step's line of metrics and begin the next step."""
        metrics = {**self.tally.means(), **self.clock.lap()}
        for phase, tokens in (("generate", "rollout/tokens"), ("train", "train/tokens")):
            seconds = metrics[f"time/{phase}_seconds"]
            if tokens in metrics and seconds > 0:
                metrics[f"{tokens}_per_second"] = metrics[tokens] / seconds
        self.run.write_metrics(step, metrics)
        self.tally = Tally()
        return metrics

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.console.phase(name), self.clock.phase(name):
            yield
