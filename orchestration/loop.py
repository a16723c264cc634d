"""The driver loop of reinforcement learning: generate, train, sync, and now and then evaluate and keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from algs.method import PolicyMethod
from configs.load import method_for
from configs.schema import RLConfig
from data_feeds.prompts import PromptSets
from data_feeds.sampler import ShuffledPrompts
from orchestration.clock import StepClock
from orchestration.cluster import Actors, started_actors
from orchestration.console import Console
from orchestration.evaluation import evaluation_tally
from orchestration.logs import captured_output
from orchestration.metrics import Tally
from orchestration.rollout_actor import RewardFailures, refuse_failed_rewards, rollout_tally
from orchestration.run_directory import RunDirectory, checkpoints
from orchestration.sync import prove, synchronise
from orchestration.update import prepare_updates
from rollouts.records import Group
from rollouts.sampling import Sampling


def run_rl(config: RLConfig, prompts: PromptSets, run: RunDirectory, write_report: Callable[[Path], Path]) -> None:
    """Train for config.train.steps steps. What is worth keeping is in the run directory.

    Raises:
        ProbeFailed: an engine does not hold the trainer's weights.
        RewardFailures: more responses could not be scored than reward.max_error_rate allows.
        NonFiniteError: a loss or gradient was Inf or NaN.
    """
    method, steps = method_for(config), config.train.steps
    with ExitStack() as stack:
        screen = stack.enter_context(captured_output(run.log_path("driver")))
        console = stack.enter_context(Console(config.run.name, steps, screen))
        with console.phase("starting engines and trainer"):
            actors = stack.enter_context(started_actors(config, run, method))
        job = RLJob(config, method, prompts, run, actors, console, write_report)
        for step in range(steps + 1):  # step 0 only proves and evaluates the weights it starts from
            job.step(step)
        console.summary(
            "done",
            {
                **job.outcome(),
                "report": run.report_path,
                "samples": run.path / "samples",
                "checkpoint": checkpoints(run.path)[-1],
            },
        )


class RLJob:
    """One job's state: policy version, prompt order, clock, and the handles on everything that works for it."""

    def __init__(
        self, config: RLConfig, method: PolicyMethod, prompts: PromptSets, run: RunDirectory, actors: Actors,
        console: Console, write_report: Callable[[Path], Path],
    ) -> None:  # fmt: skip
        assert actors.trainers is not None
        self.config, self.method, self.run, self.console, self.write_report = config, method, run, console, write_report
        self.trainers, self.rollouts = actors.trainers, actors.rollouts
        self.sampling = Sampling.of_rollout(config.rollout, run_seed=config.run.seed)
        self.sampler = ShuffledPrompts(prompts.train, seed=config.run.seed)
        self.heldout = prompts.heldout[: config.eval.max_prompts]
        self.probes = prompts.train[: config.sync.probe_prompts]
        self.version = 0  # policy versions pushed to the engines
        self.clock = StepClock()
        self.accuracies: list[float] = []  # held-out, in order

    def step(self, step: int) -> None:
        """One turn of the loop, one line of metrics."""
        tally = Tally()
        if step == 0:
            with self._phase("sync"):
                tally.merge(prove(self.trainers, self.rollouts, 0, self.probes, self.sampling, self.config))
        else:
            groups = self._generate(step, tally)
            if self._train(groups, tally):
                self._sync(tally)
            self.run.write_samples(step, [t for group in groups for t in group.trajectories])
        if self._due(step, self.config.eval.every) or step == 0:
            self._evaluate(step, tally)
        if step and self._due(step, self.config.checkpoint.every):
            self._checkpoint(step)
        self._record(step, tally)

    def _generate(self, step: int, tally: Tally) -> list[Group]:
        rollout = self.config.rollout
        with self._phase("generate"):
            prompts = self.sampler.next(rollout.prompts_per_step)
            made = self.rollouts.generate(prompts, rollout.responses_per_prompt, self.sampling, step, "train")
        self.clock.move(made.reward_seconds, "generate", "reward")
        tally.merge(rollout_tally(made.groups, self.config.reward.pass_threshold))
        try:
            refuse_failed_rewards(made.trajectories, self.config.reward)
        except RewardFailures:
            self.run.write_samples(step, made.trajectories)  # what the reward choked on
            raise
        return made.groups

    def _train(self, groups: list[Group], tally: Tally) -> bool:
        """Whether the policy changed: a step in which no group has any variance changes nothing."""
        with self._phase("train"):
            updates, prepared = prepare_updates(groups, self.method, self.config, self.version)
            tally.merge(prepared)
            if updates:
                tally.merge(self.trainers.step(updates))
        return bool(updates)

    def _sync(self, tally: Tally) -> None:
        with self._phase("sync"):
            self.version += 1
            tally.merge(
                synchronise(self.trainers, self.rollouts, self.version, self.probes, self.sampling, self.config)
            )

    def _evaluate(self, step: int, tally: Tally) -> None:
        with self._phase("eval"):
            sampling = Sampling.of_eval(self.config.eval, self.config.rollout, self.config.run.seed)
            made = self.rollouts.generate(self.heldout, self.config.eval.samples_per_prompt, sampling, step, "heldout")
            tally.merge(evaluation_tally(made.groups, self.config.reward.pass_threshold, sampling.greedy))
            self.run.write_samples(step, made.trajectories, heldout=True)

    def _checkpoint(self, step: int) -> None:
        with self._phase("checkpoint"), self.run.checkpoint(step) as folder:
            self.trainers.save(folder)
        self.run.prune_checkpoints(self.config.checkpoint.keep)

    def _record(self, step: int, tally: Tally) -> None:
        metrics = {**tally.means(), **self.clock.lap()}
        for phase, tokens in (("generate", "rollout/tokens"), ("train", "train/tokens")):
            seconds = metrics[f"time/{phase}_seconds"]
            if tokens in metrics and seconds > 0:
                metrics[f"{tokens}_per_second"] = metrics[tokens] / seconds
        if "eval/accuracy" in metrics:
            self.accuracies.append(metrics["eval/accuracy"])
        self.run.write_metrics(step, metrics)
        self.console.step(step, metrics)
        self.write_report(self.run.path)

    def outcome(self) -> dict[str, str]:
        """What to say at the end."""
        return {"held-out accuracy": f"{self.accuracies[0]:.3f} before, {self.accuracies[-1]:.3f} after"}

    def _due(self, step: int, every: int) -> bool:
        return step == self.config.train.steps or (every > 0 and step % every == 0)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.console.phase(name), self.clock.phase(name):
            yield
