"""Evaluate a model or checkpoint on its own: greedy accuracy, unbiased pass@k, and every response kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from configs.blocks.evaluation import EvalConfig
from data_feeds.prompts.prompts import PromptSets
from eval.pass_at_k import ks_up_to, mean_with_interval, pass_at_k
from orchestration.cluster.job_shape import EngineJob
from orchestration.engines.requests import step_requests
from orchestration.metrics.rollouts import evaluation_tally, refuse_failed_rewards
from orchestration.metrics.step_clock import StepClock
from orchestration.metrics.tally import Tally
from orchestration.rl.actors import started_actors
from orchestration.run.atomic_files import write_atomically
from orchestration.run.console import Console
from orchestration.run.directory import RunDirectory
from orchestration.run.logs import captured_output
from records.rollout import Group
from rollouts.vllm.sampling import Sampling

RESULT = "evaluation.json"


def run_eval(config: EvalConfig, prompts: PromptSets, run: RunDirectory, write_report: Callable[[Path], Path]) -> None:
    """Sample responses and score them. Results go to evaluation.json, metrics.jsonl, samples/ and the screen.

    Raises:
        RewardFailures: more responses could not be scored than reward.max_error_rate allows.
    """
    chosen = prompts.part(config.eval.split)[: config.eval.max_prompts]
    with ExitStack() as stack:
        screen = stack.enter_context(captured_output(run.log_path("driver")))
        console = stack.enter_context(Console(config.run.name, 1, screen))
        with console.phase("starting engines"):
            actors = stack.enter_context(started_actors(EngineJob.of_eval(config), None, run))
        clock, tally, rows = StepClock(), Tally(), {}
        if config.eval.greedy:
            with console.phase("greedy responses"), clock.phase("eval"):
                sampling = Sampling.of_eval_run(config.eval, config.run.seed, greedy=True)
                groups = actors.pool.generate(step_requests(chosen, 1, sampling, 0, "greedy"))
            keep_samples(run, 0, groups, config)
            tally.merge(evaluation_tally(groups, config.reward.pass_threshold, greedy=True))
            rows["greedy_accuracy"] = mean_with_interval(passes(groups, config.reward.pass_threshold))
        with console.phase("sampled responses"), clock.phase("eval"):
            sampling = Sampling.of_eval_run(config.eval, config.run.seed)
            samples = config.eval.samples_per_prompt
            groups = actors.pool.generate(step_requests(chosen, samples, sampling, 1, "sampled"))
        keep_samples(run, 1, groups, config)
        if not config.eval.greedy:
            tally.merge(evaluation_tally(groups, config.reward.pass_threshold, greedy=False))
        correct = passes(groups, config.reward.pass_threshold)
        for k in ks_up_to(config.eval.samples_per_prompt):
            estimates = [pass_at_k(config.eval.samples_per_prompt, int(c), k) for c in correct]
            rows[f"pass_at_{k}"] = mean_with_interval(estimates)
            tally.add_values(f"eval/pass_at_{k}", estimates)
        run.write_metrics(0, {**tally.means(), **clock.lap()})
        write_result(config, run, rows, len(chosen))
        report = write_report(run.path)
        console.summary(
            f"{config.model.path} on {len(chosen)} prompts (95 % interval over prompts)",
            {
                **{name: f"{mean:.3f}  [{low:.3f}, {high:.3f}]" for name, (mean, low, high) in rows.items()},
                "generations": run.path / "samples",
                "report": report,
            },
        )


def keep_samples(run: RunDirectory, step: int, groups: list[Group], config: EvalConfig) -> None:
    """Write the responses to samples/; raise RewardFailures when too many of them could not be scored."""
    trajectories = [t for group in groups for t in group.trajectories]
    run.write_samples(step, trajectories, heldout=True)
    refuse_failed_rewards(trajectories, config.reward)


def passes(groups: list[Group], threshold: float) -> list[int]:
    """Return how many responses of each prompt passed. A response that could not be scored did not pass."""
    return [sum(t.reward is not None and t.reward >= threshold for t in group.trajectories) for group in groups]


def write_result(
    config: EvalConfig, run: RunDirectory, rows: dict[str, tuple[float, float, float]], prompts: int
) -> None:
    """Write evaluation.json: the model, the number of prompts and samples, and each estimate with its interval."""
    result = {
        "model": config.model.path,
        "prompts": prompts,
        "samples_per_prompt": config.eval.samples_per_prompt,
        **{name: {"mean": mean, "low": low, "high": high} for name, (mean, low, high) in rows.items()},
    }
    write_atomically(run.path / RESULT, json.dumps(result, indent=2) + "\n")
