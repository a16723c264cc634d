import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.metrics import page
from orchestration.metrics.definitions import METRICS, PHASES, definition
from orchestration.metrics.tally import Tally, time_metrics

values = st.lists(st.floats(-1e3, 1e3), min_size=0, max_size=12)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(values, min_size=1, max_size=6))
def test_merging_any_partition_equals_the_whole(parts: list[list[float]]) -> None:
    whole = [v for part in parts for v in part]
    tallies = []
    for part in parts:
        tally = Tally()
        tally.add_values("train/entropy_nats", np.array(part))
        tally.total("train/tokens", len(part))
        for value in part:
            tally.maximum("train/logprob_gap_max", value)
        tallies.append(pickle.loads(pickle.dumps(tally)))
    means = Tally.merged(tallies).means()
    assert means["train/tokens"] == len(whole)
    if whole:
        assert means["train/entropy_nats"] == pytest.approx(math.fsum(whole) / len(whole), rel=1e-9, abs=1e-9)
        assert means["train/logprob_gap_max"] == max(whole)
    else:
        assert "train/entropy_nats" not in means and "train/logprob_gap_max" not in means


def test_a_mean_of_means_would_be_another_number() -> None:
    short, long = Tally(), Tally()
    short.add_values("method/ratio", [1.0])
    long.add_values("method/ratio", [0.0, 0.0, 0.0])
    assert short.merge(long).means()["method/ratio"] == 0.25
    assert np.mean([1.0, 0.0]) == 0.5


def test_float32_values_are_summed_in_float64() -> None:
    tally = Tally()
    tally.add_values("method/ratio", np.full(10_000_000, 0.1, dtype=np.float32))
    assert tally.means()["method/ratio"] == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_values_that_are_not_finite_stay_visible() -> None:
    tally = Tally()
    tally.add("train/loss", math.nan)
    tally.maximum("train/logprob_gap_max", math.nan)
    tally.maximum("train/logprob_gap_max", 1.0)
    assert math.isnan(tally.means()["train/loss"])
    assert math.isnan(tally.means()["train/logprob_gap_max"])


def test_undefined_names_are_refused_and_free_prefixes_are_not() -> None:
    with pytest.raises(ValueError, match=r"train/los.*METRICS"):
        Tally().add("train/los", 1.0)
    with pytest.raises(ValueError, match="method/"):
        definition("method/")
    assert definition("method/anything").chart == "Method metrics"
    assert definition("eval/accuracy/chain_sum").chart == "Accuracy by source"
    assert definition("reward/last_number").chart == "Reward parts"
    assert definition("reward/mean") is METRICS["reward/mean"]


def test_a_name_is_reduced_in_one_way_only() -> None:
    tally = Tally()
    tally.add("train/tokens", 1.0)
    with pytest.raises(AssertionError, match="two ways"):
        tally.total("train/tokens", 1.0)


def test_phases_and_the_rest_add_up_to_the_step() -> None:
    times = time_metrics(10.0, {"generate": 4.0, "train": 5.0, "sync": 0.5}, 31.0)
    assert sum(times[f"time/{phase}_seconds"] for phase in (*PHASES, "other")) == pytest.approx(10.0)
    assert times["time/other_share"] == pytest.approx(0.05)
    assert all(name in METRICS for name in times)
    with pytest.raises(ValueError, match="generation"):
        time_metrics(1.0, {"generation": 1.0}, 1.0)


def test_docs_are_not_stale() -> None:
    assert page.DOC_PATH.read_text(encoding="utf-8") == page.render_docs(), (
        "docs/METRICS.md is stale: run python -m orchestration.metrics.page"
    )


def test_every_metric_is_logged_somewhere_and_every_logged_name_is_defined() -> None:
    root = page.DOC_PATH.parent.parent
    files = [p for folder in ("orchestration", "rollouts", "eval", "algs") for p in (root / folder).rglob("*.py")]
    source = "\n".join(p.read_text(encoding="utf-8") for p in files if p.parts[-2:] != ("metrics", "definitions.py"))
    groups = {name.split("/")[0] for name in METRICS}
    logged = set(re.findall(rf'"((?:{"|".join(sorted(groups))})/[a-z_]+)"', source))
    assert logged, "the pattern above no longer finds any name"
    for name in logged:
        definition(name)
    derived = {name for name in METRICS if name.startswith(("time/", "method/"))} | {"train/tokens_per_second"}
    derived |= {name for name in METRICS if name.replace("eval/", "train/") in logged}  # Trainer.evaluate renames
    assert set(METRICS) - logged - derived == set()
    for name in METRICS:
        if name.startswith("method/"):
            assert f'"{name.removeprefix("method/")}"' in source, f"no method returns {name}"
    for phase in PHASES:
        assert f'"{phase}"' in source, f"the loop has no phase {phase}"
