"""The simulation's command line: constants are found again in a run made of them, and it says what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulate_schedule.__main__ import main
from benchmarks.simulate_schedule.calibration import calibrate, measure
from configs.blocks.rl import RLConfig
from configs.reading.load import checked, to_yaml

DECODE_STEP, DECODE_TOKEN, TRAIN_FIXED, TRAIN_TOKEN, SYNC, OTHER = 0.05, 0.002, 0.4, 0.003, 0.2, 0.01
PROMPT, GROUPS, RESPONSES, ENGINES, RANKS = 6, 4, 3, 2, 2


def write_run(path: Path, mode: str = "sync", steps: int = 12) -> Path:
    """A run directory whose seconds follow from its tokens exactly; overlap takes the longer side."""
    raw = {
        "model": {"path": "x"},
        "data": {"sources": [{"reasoning_gym": "chain_sum"}]},
        "algorithm": {"name": "grpo"},
        "rollout": {"prompts_per_step": GROUPS, "responses_per_prompt": RESPONSES, "engines": ENGINES},
        "reward": {"parts": [{"function": "ended"}]},
        "schedule": {"mode": mode},
        "train": {"ranks": RANKS, "steps": steps},
    }
    rng = np.random.default_rng(0)
    (path / "samples").mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(checked(RLConfig.model_validate(raw))))
    lines = []
    for step in range(steps + 1):
        lengths = rng.integers(5, 40, GROUPS * RESPONSES)
        tokens = int(lengths.sum())
        generate = DECODE_STEP * int(lengths.max()) + DECODE_TOKEN * (tokens + GROUPS * PROMPT) / ENGINES
        train = TRAIN_FIXED + TRAIN_TOKEN * (tokens + GROUPS * PROMPT) / RANKS
        row = {
            "step": step, "rollout/responses": float(len(lengths)), "rollout/prompt_tokens": float(PROMPT),
            "rollout/response_tokens_max": float(lengths.max()), "rollout/tokens": float(tokens),
            "train/tokens": float(tokens + GROUPS * PROMPT) if step else 0.0, "train/staleness_mean": 0.0,
            "time/generate_seconds": generate, "time/train_seconds": train, "time/sync_seconds": SYNC,
            "time/other_seconds": OTHER, "time/eval_seconds": 5.0, "time/checkpoint_seconds": 1.0,
            "time/step_seconds": generate + train + SYNC + OTHER + 6.0,
        }  # fmt: skip
        lines.append(json.dumps(row))
        records = [
            {"group": f"g{i // RESPONSES}", "sample": i % RESPONSES, "tokens": int(length)}
            for i, length in enumerate(lengths)
        ]
        if step:
            text = "".join(json.dumps(record) + "\n" for record in records)
            (path / "samples" / f"step_{step:06d}.jsonl").write_text(text)
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_calibration_finds_the_constants_of_a_run(tmp_path) -> None:
    found = calibrate(write_run(tmp_path / "sync"))
    assert found.costs.decode_step_seconds == pytest.approx(DECODE_STEP)
    assert found.costs.decode_token_seconds == pytest.approx(DECODE_TOKEN)
    assert found.costs.train_fixed_seconds == pytest.approx(TRAIN_FIXED + OTHER)
    assert found.costs.train_token_seconds == pytest.approx(TRAIN_TOKEN)
    assert found.costs.sync_seconds == pytest.approx(SYNC)
    assert (found.work.batch_groups, found.work.prompt_tokens) == (GROUPS, PROMPT)
    assert (found.plan.generators, found.plan.trainers, found.plan.max_staleness) == (ENGINES, RANKS, 0)
    assert all(len(found.work.draw(np.random.default_rng(i))) == RESPONSES for i in range(5))


def test_evaluation_and_checkpoints_are_not_measured(tmp_path) -> None:
    run = write_run(tmp_path / "sync")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][3:]
    assert measure(run).seconds_per_step == pytest.approx(np.mean([row["time/step_seconds"] - 6.0 for row in rows]))


def test_check_prints_predicted_over_measured(tmp_path, capsys) -> None:
    sync, overlap = write_run(tmp_path / "sync", steps=40), write_run(tmp_path / "overlap", "overlap")
    main(["--check", str(sync), str(overlap), "--steps", "60"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    ratios = [float(line[-1]) for line in lines if line[:3] == ["seconds", "per", "step"]]
    assert ratios[0] == pytest.approx(1.0, abs=0.05), "a sync run is predicted from its own constants"
    assert ratios[1] < 0.9, (
        "the second run is simulated with its own schedule: it has the seconds of sync, so overlap beats it"
    )


def test_table_has_every_mode_and_split(capsys) -> None:
    main(["--devices", "3", "--groups", "4", "--responses", "2", "--steps", "3"])
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    split = [[mode, name] for mode in ("sync", "overlap", "drain") for name in ("1:2", "2:1")]
    assert rows == [*split, ["shared", "all"], ["partial", "all"]]


def test_figure_is_the_same_each_time(tmp_path, capsys) -> None:
    for name in ("a.svg", "b.svg"):
        arguments = ["--devices", "2", "--groups", "2", "--responses", "2", "--steps", "3"]
        main([*arguments, "--plot", str(tmp_path / name)])
    assert "wrote" in capsys.readouterr().out
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "max_staleness 4" in text


def test_what_cannot_be_simulated_says_why(tmp_path) -> None:
    overlap, short = write_run(tmp_path / "overlap", "overlap"), write_run(tmp_path / "short", steps=3)
    with pytest.raises(SystemExit, match="calibrate on a run with mode: sync"):
        main(["--calibrate", str(overlap)])
    with pytest.raises(SystemExit, match="at least 3 are needed"):
        main(["--calibrate", str(short)])
    with pytest.raises(SystemExit, match="--devices must be at least 2"):
        main(["--devices", "1"])
    with pytest.raises(SystemExit, match="pause_seconds is above sync_seconds"):
        main(["--devices", "2", "--pause-seconds", "3"])
