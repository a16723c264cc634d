"""The functions an objective names: found and checked as they are named, with errors at their place, and built."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from algs.introspection.method_facts import made_up_groups, made_up_tokens
from algs.records import Correction
from configs.blocks.objective import KL
from configs.blocks.rl import RLConfig
from configs.reading.load import ConfigError, load, method_for, to_yaml
from plugins.kinds import find, listed
from plugins.parameters import parameters_of

OWN = """
from typing import Annotated
import torch
from pydantic import Field
from algs.method import knob
from algs.records import Correction, Groups, PolicyTokens
def doubled(groups: Groups, gain: Annotated[float, knob("How much.", gt=0)] = 2.0): return gain * groups.rewards
def banded(groups: Groups, low: Annotated[float, Field(ge=0, description="Least.")] = 0.1): return groups.rewards - low
def ranked(groups: Groups, band: Annotated[tuple[float, float], knob("Between.")]): return groups.rewards.clamp(*band)
def unnamed(groups: Groups, gain: float, /): return groups.rewards
def half(t: PolicyTokens, factor: float = 0.5):
    return Correction(torch.full_like(t.old_logprobs, factor), torch.ones_like(t.old_logprobs, dtype=torch.bool))
"""


def job(*overrides: str) -> RLConfig:
    return load("configs/grpo.yaml", RLConfig, overrides)


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        job(*overrides)
    assert "problems" not in str(caught.value), "one mistake, one problem"
    return str(caught.value)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_objective_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_defaults_are_filled_in_and_a_bare_name_will_do(tmp_path: Path) -> None:
    config = job("objective.corrections=[token_mask, {function: veto, params: {threshold: 1e-5}}]")
    assert [named.params for named in config.objective.corrections] == [{"low": 0.5, "high": 5.0}, {"threshold": 1e-5}]
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load(again, RLConfig) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "objective.corrections=[{function: token_truncate, params: {cap: 0}}]",
            "objective.corrections.0.params.cap: must be above 0.0; given 0",
        ),
        (
            "objective.corrections=[token_truncate, {function: veto, params: {treshold: 1}}]",
            "objective.corrections.1.params.treshold: unknown key; did you mean objective.corrections.1.params.threshold?",
        ),
        (
            "objective.corrections=[{function: veto, params: {threshold: high}}]",
            "objective.corrections.0.params.threshold: must be a number; given 'high'",
        ),
        (
            "objective.corrections=[token_trunc]",
            "objective.corrections.0.function: correction 'token_trunc': there is no correction of that name; did you mean "
            "token_truncate?",
        ),
        (
            "objective.advantage=rlo",
            "objective.advantage.function: advantage 'rlo': there is no advantage of that name; did you mean rloo?",
        ),
        ("objective.advantage={function: rloo, params: {x: 1}}", "objective.advantage.params.x: unknown key"),
        ("objective.advantage=token_mask", "and ours are: group_mean, group_zscore"),
        ("objective.advantage={params: {}}", "objective.advantage.function: is missing"),
        ("objective.advantage=my_objective_parts:unnamed", "parameter 'gain' cannot be given by name; remove the '/'"),
        ("objective.advantage=my_objective_parts:ranked", "objective.advantage.params.band: is missing"),
        (
            "objective.advantage={function: my_objective_parts:doubled, params: {gain: 0}}",
            "objective.advantage.params.gain: must be above 0.0; given 0",
        ),
        (
            "objective.advantage={function: my_objective_parts:banded, params: {low: -1}}",
            "objective.advantage.params.low: must be at least 0.0; given -1",
        ),
        ("objective.corrections=token_mask", "objective.corrections: must be a list; given 'token_mask'"),
    ],
)
def test_mistakes_have_their_place(own: None, override: str, expected: str) -> None:
    assert expected in message(override)


def test_help_comes_from_the_knob_or_from_pydantics_own_field(own: None) -> None:
    def described(name: str, parameter: str) -> str | None:
        return parameters_of(find("advantage", f"my_objective_parts:{name}")).model_fields[parameter].description

    assert described("doubled", "gain") == "How much."
    assert described("banded", "low") == "Least."
    assert described("ranked", "band") == "Between."


def test_what_the_trainer_gets(own: None) -> None:
    groups = made_up_groups((3, 2), with_critic=False)
    plain = job()
    method = method_for(plain)
    assert torch.equal(plain.objective.advantage_function(method)(groups), method.advantages(groups))
    config = job("objective.advantage={function: my_objective_parts:doubled, params: {gain: 3}}")
    assert torch.equal(config.objective.advantage_function(method)(groups), 3 * groups.rewards)
    banded = job("objective.advantage={function: my_objective_parts:ranked, params: {band: [0.3, 0.5]}}")
    assert banded.objective.advantage_function(method)(groups).max() == 0.5
    config = job("objective.corrections=[my_objective_parts:half, {function: geometric_mask, params: {high: 1.5}}]")
    half, mask = pickle.loads(pickle.dumps(config.objective.correction_functions()))
    tokens = made_up_tokens()
    assert isinstance(mask(tokens), Correction) and half(tokens).weights.unique().tolist() == [0.5]
    assert plain.objective.aggregation_mode(method) == "token_mean"
    assert job("objective.aggregation=").objective.aggregation_mode(method) == method.aggregation == "sequence_mean"


@pytest.mark.parametrize("name", listed("advantage"))
def test_every_advantage_of_ours_can_stand_in_a_config(name: str) -> None:
    config = job(f"objective.advantage={name}")
    found = config.objective.advantage_function(method_for(config))(made_up_groups((4, 1, 3), with_critic=False))
    assert found.shape == (8,) and found.isfinite().all() and found.any()


@pytest.mark.parametrize("name", listed("correction"))
def test_every_correction_of_ours_can_stand_in_a_config(name: str) -> None:
    (correction,) = job(f"objective.corrections=[{name}]").objective.correction_functions()
    assert correction(made_up_tokens()).weights.isfinite().all()


def test_an_empty_estimator_is_the_one_that_has_the_kls_gradient_where_it_stands() -> None:
    assert KL(coef=0.1).estimator_used == "k3"
    assert KL(coef=0.1, placement="reward").estimator_used == "k1"
    assert KL(coef=0.1, estimator="k2").estimator_used == "k2"
