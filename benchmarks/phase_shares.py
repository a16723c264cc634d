"""Where a run's wall-clock went, and how much of it went nowhere named.

    python -m benchmarks.phase_shares runs/grpo

Counts everything from the end of start-up to the end of the last step, also what lies between steps. Aim: less than 5 %
outside generate, reward, train, sync and evaluation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestration.metrics.definitions import PHASES
from orchestration.run.directory import read_metrics


def shares(run: Path) -> dict[str, float]:
    """Seconds by phase, "other" and "all", after start-up."""
    rows = read_metrics(run)
    if len(rows) < 2:
        raise SystemExit(f"{run} has no step yet")
    start = rows[0]["time/since_start_seconds"]
    seconds = {phase: sum(row[f"time/{phase}_seconds"] for row in rows[1:]) for phase in PHASES}
    seconds["all"] = rows[-1]["time/since_start_seconds"] - start
    seconds["other"] = seconds["all"] - sum(seconds[phase] for phase in PHASES)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    for run in parser.parse_args().runs:
        seconds = shares(run)
        start = read_metrics(run)[0]
        before = start["time/since_start_seconds"] - start["time/step_seconds"]
        print(f"{run}: start-up {before:.0f} s, then {seconds['all']:.0f} s")
        for phase in (*PHASES, "other"):
            print(f"  {phase:<10} {seconds[phase]:7.1f} s  {seconds[phase] / seconds['all']:6.1%}")


if __name__ == "__main__":
    main()
