"""Which split of devices, and which schedule? Simulate them before you rent anything.

    python -m benchmarks.simulate_schedule --devices 8                      # a table, from the example costs below
    python -m benchmarks.simulate_schedule --devices 8 --calibrate runs/x   # costs and lengths of your own sync run
    python -m benchmarks.simulate_schedule --check runs/sync runs/overlap   # calibrate on the first, predict the second
    python -m benchmarks.simulate_schedule --plot docs/figures/simulate_schedule.svg

Every split N:M of the devices into N that generate and M that train is simulated in each mode:

    sync      in turn, on devices of their own: the other side is idle
    overlap   at the same time; responses continue when weights come (--in-flight)
    drain     at the same time; running responses are finished before weights come
    shared    in turn on all devices (sync mode on shared devices)
    partial   in turn on all devices; long responses continue in the next step (pause_while_training)

Costs are those of one device. A flag replaces what --calibrate found. See docs/running/SIMULATION.md for the limits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.simulate_schedule.calibration import Calibration, Measured, calibrate, measure, plan_of
from benchmarks.simulate_schedule.model import Costs, Outcome, Plan, Simulation, Work, log_normal
from orchestration.run.atomic_files import write_atomically

# Round numbers of the order of a 7B model on data-centre GPUs: an example, not a measurement.
EXAMPLE = Costs(
    decode_step_seconds=0.015,
    decode_token_seconds=0.0001,
    prefill_token_seconds=0.00003,
    train_fixed_seconds=2.0,
    train_token_seconds=0.0002,
    sync_seconds=2.0,
    pause_seconds=1.0,
    reward_seconds=0.5,
    switch_seconds=8.0,
)
COST_HELP = {
    "decode_step_seconds": "one decoding step, however few responses run",
    "decode_token_seconds": "more for each running response; its inverse is the engine's peak in tokens/s",
    "prefill_token_seconds": "one token of a prompt, or of a response whose cache is made anew",
    "train_fixed_seconds": "every step, on any number of devices",
    "train_token_seconds": "one token of the batch on one device",
    "sync_seconds": "from the end of training until engines have the weights",
    "pause_seconds": "that part of a sync in which engines stand still",
    "reward_seconds": "from a response's last token to its score",
    "switch_seconds": "sleeping and waking engines, per step, where both sides share devices",
}
MODES = ("sync", "overlap", "drain", "shared", "partial")
SHARED = ("shared", "partial")


def plans(mode: str, options: argparse.Namespace) -> list[Plan]:
    """Return the plans of a mode with this many devices: every split, or all devices for both sides in turn."""
    devices = options.devices
    splits = [(devices, devices)] if mode in SHARED else [(n, devices - n) for n in range(1, devices)]
    return [
        Plan(
            generators=generators,
            trainers=trainers,
            max_staleness=0 if mode in ("sync", "shared") else options.staleness,
            in_flight="drain" if mode == "drain" else options.in_flight,
            over_issue=options.over_issue,
            pause_while_training=mode == "partial",
        )
        for generators, trainers in splits
    ]


def simulate(calibration: Calibration, mode: str, plan: Plan, steps: int, seed: int) -> Outcome:
    costs = calibration.costs if mode in SHARED else replace(calibration.costs, switch_seconds=0.0)
    return Simulation(costs, calibration.work, plan, seed).run(steps)


def all_outcomes(calibration: Calibration, options: argparse.Namespace) -> Iterator[tuple[str, Plan, Outcome]]:
    for mode in MODES:
        for plan in plans(mode, options):
            yield mode, plan, simulate(calibration, mode, plan, options.steps, options.seed)


def table(outcomes: list[tuple[str, Plan, Outcome]]) -> str:
    """Return a line for every plan; seconds are per step, `stale` is the mean age of trained tokens in versions."""
    best = max(outcome.tokens_per_second for _, _, outcome in outcomes)
    lines = [f"{'mode':8} {'split':>6} {'tokens/s':>9} {'steps/h':>8} {'trainer waits':>14} {'engines idle':>13} "
             f"{'paused':>7} {'stale':>6}"]  # fmt: skip
    for mode, plan, o in outcomes:
        split = "all" if mode in SHARED else f"{plan.generators}:{plan.trainers}"
        lines.append(
            f"{mode:8} {split:>6} {o.tokens_per_second:>9,.0f} {o.steps_per_hour:>8.1f} {o.trainer_wait_seconds:>13.1f}s "
            f"{o.engine_idle_seconds:>12.1f}s {o.engine_paused_seconds:>6.1f}s {mean_staleness(o):>6.2f}"
            + ("  <- most" if o.tokens_per_second == best else "")
        )
    return "\n".join(lines)


def mean_staleness(outcome: Outcome) -> float:
    return sum(age * share for age, share in outcome.staleness.items())


def comparison(name: str, predicted: Outcome, measured: Measured) -> str:
    """Return a text with predicted figures, measured ones, and their ratio."""
    rows = [
        ("seconds per step", predicted.seconds_per_step, measured.seconds_per_step),
        ("tokens per second", predicted.tokens_per_second, measured.tokens_per_second),
        ("trainer waits, seconds", predicted.trainer_wait_seconds, measured.trainer_wait_seconds),
        ("staleness, mean", mean_staleness(predicted), measured.staleness_mean),
    ]
    lines = [f"{name:24} {'predicted':>10} {'measured':>10} {'ratio':>6}"]
    for title, guess, seen in rows:
        ratio = f"{guess / seen:6.2f}" if seen else "     -"
        lines.append(f"{title:24} {guess:>10.3f} {seen:>10.3f} {ratio}")
    return "\n".join(lines)


def check(calibrated_on: Path, predicted: Path, options: argparse.Namespace) -> str:
    """Return how well the calibration's own run is reproduced, and how well the other one is predicted."""
    calibration = with_flags(calibrate(calibrated_on), options)
    parts = [
        f"costs of {calibrated_on}:",
        *(f"  {f.name} {getattr(calibration.costs, f.name):.6g}" for f in fields(Costs)),
    ]
    for run in (calibrated_on, predicted):
        outcome = Simulation(calibration.costs, calibration.work, plan_of(run), options.seed).run(options.steps)
        parts.append(comparison(run.name, outcome, measure(run)))
    return "\n".join(parts)


def with_flags(calibration: Calibration, options: argparse.Namespace) -> Calibration:
    """Return the calibration with the costs given on the command line."""
    given = {f.name: getattr(options, f.name) for f in fields(Costs) if getattr(options, f.name) is not None}
    return replace(calibration, costs=replace(calibration.costs, **given))


def draw_figure(
    calibration: Calibration, outcomes: list[tuple[str, Plan, Outcome]], options: argparse.Namespace
) -> str:
    """Return two panels as SVG: throughput against the split, and age of the trained tokens at overlap's best split."""
    from matplotlib.figure import Figure

    from eval.pictures import styled, svg

    colours = dict(zip(MODES, ("#8c959f", "#2f62c0", "#7a4fbf", "#1f2328", "#d1641b"), strict=True))
    with styled():
        figure = Figure((9.5, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for mode in MODES:
            found = [(plan.generators, o.tokens_per_second) for m, plan, o in outcomes if m == mode]
            if mode in SHARED:
                left.axhline(found[0][1], color=colours[mode], linestyle="--", label=f"{mode} (all devices in turn)")
            else:
                left.plot(*zip(*found, strict=True), color=colours[mode], marker="o", markersize=4, label=mode)
        splits = range(1, options.devices)
        left.set_xticks(list(splits), [f"{n}:{options.devices - n}" for n in splits])
        left.set(title="Throughput", xlabel="devices that generate : train", ylabel="trained tokens/s", ylim=(0, None))
        left.legend()
        _, best, _ = max((o for o in outcomes if o[0] == "overlap"), key=lambda o: o[2].tokens_per_second)
        for place, k in enumerate((1, 2, 4)):
            outcome = simulate(calibration, "overlap", replace(best, max_staleness=k), options.steps, options.seed)
            ages = [age + (place - 1) * 0.27 for age in outcome.staleness]
            label = f"max_staleness {k}: {outcome.tokens_per_second:,.0f} tokens/s"
            right.bar(
                ages,
                list(outcome.staleness.values()),
                0.25,
                label=label,
                color=("#9ebcf0", "#2f62c0", "#1b3a75")[place],
            )
        right.set(
            title=f"Age of trained tokens, overlap {best.generators}:{best.trainers}",
            xlabel="policy versions",
            ylabel="share",
            ylim=(0, 1.3),
            yticks=(0, 0.25, 0.5, 0.75, 1),
        )
        right.legend()
        return svg(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is done")
    what.add_argument("--calibrate", type=Path, metavar="RUN", help="read costs, lengths and batch from a sync run")
    what.add_argument("--check", type=Path, nargs=2, metavar=("RUN", "OTHER"), help="calibrate on RUN, predict OTHER")
    what.add_argument("--plot", type=Path, metavar="FILE", help="write the figure as SVG")
    plan = parser.add_argument_group("the plan")
    plan.add_argument("--devices", type=int, default=8, help="to be split (8)")
    plan.add_argument("--staleness", type=int, default=1, help="schedule.max_staleness (1)")
    in_flight = ("recompute", "keep_cache", "abort")
    plan.add_argument("--in-flight", choices=in_flight, default="recompute", help="schedule.in_flight (recompute)")
    plan.add_argument("--over-issue", type=float, metavar="BATCHES", help="schedule.over_issue (max_staleness)")
    plan.add_argument("--steps", type=int, default=20, help="steps counted (20)")
    plan.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    work = parser.add_argument_group("the work, unless calibrated")
    work.add_argument("--groups", type=int, default=64, help="prompts per step (64)")
    work.add_argument("--responses", type=int, default=8, help="per prompt (8)")
    work.add_argument("--prompt-tokens", type=int, default=300, help="(300)")
    work.add_argument("--mean-tokens", type=float, default=1200, help="of a response (1200)")
    work.add_argument(
        "--sigma", type=float, default=0.8, help="of the logarithm of the length: 0 equal, 1 long tail (0.8)"
    )
    work.add_argument("--longest", type=int, default=8192, help="where responses are cut (8192)")
    work.add_argument("--most-running", type=int, default=256, help="responses an engine decodes at once (256)")
    costs = parser.add_argument_group("costs of one device, in seconds")
    for name, text in COST_HELP.items():
        flag = "--" + name.replace("_", "-")
        costs.add_argument(flag, type=float, metavar="S", help=f"{text} (example: {getattr(EXAMPLE, name):g})")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        if options.check:
            print(check(options.check[0], options.check[1], options))
            return
        if options.devices < 2:
            raise ValueError("--devices must be at least 2: one for each side")
        calibration = calibrate(options.calibrate) if options.calibrate else example(options)
        calibration = with_flags(calibration, options)
        outcomes = list(all_outcomes(calibration, options))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(table(outcomes))
    if options.plot:
        write_atomically(options.plot, draw_figure(calibration, outcomes, options))
        print(f"wrote {options.plot}")


def example(options: argparse.Namespace) -> Calibration:
    """Return the example costs and the work described by the flags."""
    draw = log_normal(options.mean_tokens, options.sigma, options.longest, options.responses)
    return Calibration(EXAMPLE, Work(options.groups, options.prompt_tokens, draw, options.most_running), Plan(1, 1))


if __name__ == "__main__":
    main()
