"""Syncs under random freezes and one killed engine, while generation goes on: python -m benchmarks.sync_soak

A real job (configs/grpo_tiny.yaml, overlap mode) syncs once a step. Meanwhile its engine, vLLM's process under it, or a
trainer rank is frozen (SIGSTOP) for a random short time, again and again, also in the middle of syncs; half-way vLLM's
process is killed (SIGKILL). The job must end by itself. Checked afterwards: each sync happened and the probe confirmed
it, batches were whole, no response was too old, no sync fell back to another method, one engine was replaced.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from orchestration.run.directory import read_metrics
from orchestration.run.samples import read_samples, sample_steps

ROOT = Path(__file__).resolve().parent.parent
VICTIMS = ("RolloutActor", "EngineCore", "TrainerActor")  # parts of the processes' titles
PROMPTS, RESPONSES = 8, 4
AWAY_STEPS = (
    4  # for as many the trainer may go on while the only engine is being replaced, from the one in which it was lost on
)


def command(options: argparse.Namespace) -> list[str]:
    """Return the job's command line."""
    settings = {
        "schedule.mode": "overlap",
        "schedule.max_staleness": 1,
        "sync.method": options.method,
        "sync.bucket_mib": 0.25,
        "train.steps": options.syncs,
        "rollout.prompts_per_step": PROMPTS,
        "rollout.responses_per_prompt": RESPONSES,
        "rollout.engines": options.engines,
        "train.drop_zero_variance_groups": False,  # every step updates and syncs, also when all responses are right
        "eval.every": 0,
        "failures.stall_seconds": options.stall_seconds,
    }
    words = [sys.executable, "main_rl.py", "--config", "configs/grpo_tiny.yaml", "--run-dir", str(options.run_dir)]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return words


def processes_of(job: psutil.Process, title: str) -> list[psutil.Process]:
    """Return the processes under the job whose title holds these words."""
    found = []
    for process in job.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()) or title in process.name():
                found.append(process)
    return found


def steps_done(run: Path) -> int:
    return int(max((row["step"] for row in read_metrics(run)), default=0))


def disturb(job: subprocess.Popen[bytes], options: argparse.Namespace) -> dict[str, int]:
    """Freeze and kill until the job ends, or end it when it takes too long; return the numbers of freezes and kills."""
    chance, watched = random.Random(options.seed), psutil.Process(job.pid)
    done = dict.fromkeys(VICTIMS, 0) | {"killed": 0}
    deadline = time.monotonic() + options.limit_seconds
    while job.poll() is None:
        if time.monotonic() > deadline:
            job.send_signal(signal.SIGINT)
            raise SystemExit(f"no end after {options.limit_seconds} s, at step {steps_done(options.run_dir)}: a hang")
        time.sleep(chance.uniform(0.0, options.apart_seconds))
        if steps_done(options.run_dir) < 1:
            continue  # it is starting
        is_time = done["killed"] == 0 and steps_done(options.run_dir) >= options.syncs // 2
        title = "EngineCore" if is_time else chance.choice(VICTIMS)
        victims = processes_of(watched, title)
        if not victims:
            continue  # an engine is being replaced
        victim = chance.choice(victims)
        with suppress(psutil.NoSuchProcess):  # the job may have ended
            if is_time:
                victim.kill()
                done["killed"] += 1
                continue
            victim.suspend()
            time.sleep(chance.uniform(0.0, options.freeze_seconds))
            victim.resume()
            done[title] += 1
    return done


def complaints(options: argparse.Namespace) -> list[str]:
    """Return what went wrong, according to the job's own records."""
    rows = [row for row in read_metrics(options.run_dir) if row["step"] > 0]
    found = []
    if (synced := sum("sync/bytes" in row for row in rows)) != options.syncs:
        found.append(f"{synced} syncs of {options.syncs} happened")
    away = [row["step"] + i for row in rows if row.get("rollout/engine_restarts") for i in range(AWAY_STEPS)]
    beside = [] if options.method == "nccl" else [1]  # its version is proven in the step that follows
    unproven = [row["step"] for row in rows if not row.get("sync/probes") and row["step"] not in (*away, *beside)]
    if unproven:
        found.append(f"no engine proved what it holds in steps {unproven}")
    if fallbacks := sum(row.get("sync/fallbacks", 0) for row in rows):
        found.append(f"{fallbacks:.0f} times a sync fell back")
    if short := [row["step"] for row in rows if row["rollout/responses"] != PROMPTS * RESPONSES]:
        found.append(f"lost or repeated groups in steps {short}")
    if (restarts := sum(row.get("rollout/engine_restarts", 0) for row in rows)) != 1:
        found.append(f"{restarts:.0f} engines were replaced, one was killed")
    for step in sample_steps(options.run_dir):
        newest = next(row["schedule/version"] for row in rows if row["step"] == step)
        for sample in read_samples(options.run_dir, step):
            if any(not newest - 1 <= version <= newest for version, _ in sample["versions"]):
                found.append(f"step {step}: versions {sample['versions']} in the batch of version {newest:g}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--method", choices=["nccl", "direct", "disk"], default="nccl", help="default: %(default)s")
    parser.add_argument("--engines", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--apart-seconds", type=float, default=0.5, help="at most, between two freezes")
    parser.add_argument("--freeze-seconds", type=float, default=1.0, help="at most; well below half of --stall-seconds")
    parser.add_argument("--stall-seconds", type=float, default=60.0, help="failures.stall_seconds of the job")
    parser.add_argument("--limit-seconds", type=float, default=3600.0, help="longer is a hang")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/sync_soak"), help="must not exist yet")
    parser.add_argument("--quick", action="store_true", help="20 syncs")
    options = parser.parse_args(argv)
    if options.quick:
        options.syncs = 20
    if options.run_dir.exists():
        parser.error(f"{options.run_dir} exists; remove it or choose another --run-dir")
    started = time.monotonic()
    said = options.run_dir.with_suffix(".txt")  # not in the run directory, which must not exist yet
    said.parent.mkdir(parents=True, exist_ok=True)
    with said.open("wb") as stream:
        job = subprocess.Popen(command(options), cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
        done = disturb(job, options)
    rows = [row for row in read_metrics(options.run_dir) if row["step"] > 0]
    found = complaints(options) + ([f"the job ended with code {job.returncode}"] if job.returncode else [])
    print(f"{len(rows)} steps in {time.monotonic() - started:.0f} s; frozen and killed: {done}")
    if rows:
        print(f"{sum(row.get('sync/probes', 0) for row in rows):.0f} times an engine proved what it holds")
        print(f"largest gap of the probe: {max(row.get('sync/probe_gap_max', 0.0) for row in rows):.3g} nats")
        print(f"longest pause of generation: {max(row.get('sync/pause_seconds', 0.0) for row in rows):.2f} s")
    if found:
        print(f"what the job said is in {said}")
    print("\n".join(found) or "no hang, no mixed version, no lost group")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
