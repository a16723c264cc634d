"""What asynchrony adds to the objective by itself, and which schedules are refused or warned about."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from algs.introspection.method_facts import reads
from algs.records import PolicyTokens
from configs.blocks.rl import RLConfig
from configs.blocks.schedule import Schedule
from configs.reading.load import ConfigError, checked, load, to_yaml
from configs.rules.every_job import warnings_for
from orchestration.trainer.token_objective import TokenObjective
from plugins.kinds import listed

OVERLAP = ["schedule.mode=overlap"]
REUSE = ["schedule.replay_buffer_versions=2", "schedule.replay_buffer_share=0.25"]


def config(*settings: str, method: str = "grpo") -> RLConfig:
    return load(f"configs/{method}.yaml", RLConfig, list(settings))


def corrections(found: RLConfig) -> list[str]:
    return [named.function for named in found.objective.corrections]


def test_old_tokens_are_weighed_by_default() -> None:
    assert corrections(config()) == []
    assert corrections(config("schedule.mode=overlap")) == ["token_truncate"]
    assert corrections(config("schedule.replay_buffer_versions=1", "schedule.replay_buffer_share=0.25")) == [
        "token_truncate"
    ]


@pytest.mark.parametrize("method", ["p3o", "aipo", "decoupled_ppo"])
def test_a_method_that_weighs_by_mu_itself_gets_no_second_weight(method: str) -> None:
    assert corrections(config("schedule.mode=overlap", method=method)) == []


@pytest.mark.parametrize(
    ("settings", "weighed"),
    [
        ([], None),
        (["schedule.mode=overlap"], True),
        (["schedule.replay_buffer_versions=1", "schedule.replay_buffer_share=0.25"], True),
        (["train.updates_per_step=2"], True),
        (["train.passes_per_batch=2"], True),
        (["train.updates_per_step=2", "objective.kl.importance=false"], False),
    ],
)
def test_a_kl_in_the_loss_is_weighed_where_another_policy_sampled(settings: list[str], weighed: bool | None) -> None:
    assert config("objective.kl.coef=0.1", *settings).objective.kl.importance is weighed


def test_no_other_kl_is_weighed() -> None:
    assert config("schedule.mode=overlap").objective.kl.importance is None
    in_reward = config("schedule.mode=overlap", "objective.kl={coef: 0.1, placement: reward}", method="rloo")
    assert in_reward.objective.kl.importance is None


def configured_weights(found: RLConfig, log_rho: torch.Tensor) -> torch.Tensor:
    """The weight on grad log pi of tokens with A = 1 in the first update of a step: pi = pi_old = mu exp(log_rho)."""
    n = len(log_rho)
    pi = torch.full((n,), -1.0, requires_grad=True)
    of_engine = found.objective.old_logprobs == "engine"
    tokens = PolicyTokens(
        logprobs=pi, behavior_logprobs=pi.detach() - log_rho,
        old_logprobs=pi.detach() - log_rho if of_engine else pi.detach(), advantages=torch.ones(n),
        entropy=torch.ones(n), sequence=torch.arange(n), group=torch.arange(n), staleness=torch.ones(n).long(),
    )  # fmt: skip
    loss = TokenObjective(found.algorithm.make_method(), found.objective)(tokens).loss
    return -torch.autograd.grad(loss.sum(), pi)[0]


@pytest.mark.parametrize("method", ["scale_rl", "cispo"])
@pytest.mark.parametrize("settings", [["schedule.mode=overlap", "schedule.max_staleness=8"], REUSE])
def test_a_method_that_caps_its_ratio_caps_the_ratio_to_mu_where_tokens_are_old(
    method: str, settings: list[str]
) -> None:
    """ScaleRL: min(pi / mu, 5), not 2, the cap of the default correction; and no warning against it."""
    found = config(*settings, method=method)
    assert corrections(found) == [] and found.objective.old_logprobs == "engine"
    rho = torch.tensor([0.5, 1.0, 4.0, 8.0])
    assert configured_weights(found, rho.log()).tolist() == pytest.approx([0.5, 1.0, 4.0, 5.0])
    assert warnings_for(found) == []


def test_a_pi_old_that_was_chosen_stays_and_is_corrected_apart() -> None:
    found = config(*OVERLAP, "objective.old_logprobs=trainer", method="scale_rl")
    assert corrections(found) == ["token_truncate"] and found.objective.old_logprobs == "trainer"
    assert config(method="scale_rl").objective.old_logprobs == "trainer"
    (warning,) = said(*OVERLAP, "objective.corrections=[]", method="scale_rl")
    assert "remove the key for objective.old_logprobs: engine" in warning


def test_the_configuration_that_was_read_is_not_changed_but_copied() -> None:
    """What says which keys are set has to know of the correction too."""
    read = config().model_copy(update={"schedule": Schedule(mode="overlap")})
    completed = checked(read)
    assert corrections(read) == [] and corrections(completed) == ["token_truncate"]
    assert "corrections" not in read.objective.model_fields_set
    assert "corrections" in completed.objective.model_fields_set


def test_what_the_user_says_about_corrections_stays() -> None:
    assert corrections(config("schedule.mode=overlap", "objective.corrections=[]")) == []
    assert corrections(config("schedule.mode=overlap", "objective.corrections=[veto]")) == ["veto"]
    assert corrections(config("schedule.mode=overlap", "objective.old_logprobs=engine")) == []


LEARN_FROM_REWARDS = [name for name, entry in listed("method").items() if entry.has_advantages]


@pytest.mark.parametrize("ages", [OVERLAP, REUSE, OVERLAP + REUSE], ids=["overlap", "reuse", "both"])
@pytest.mark.parametrize("pi_old", ["trainer", "engine"])
@pytest.mark.parametrize("method", LEARN_FROM_REWARDS)
def test_every_method_takes_the_age_of_tokens_into_account_or_is_refused(
    method: str, pi_old: str, ages: list[str]
) -> None:
    """By a correction, by reading mu itself, or by a ratio to mu; asked of the loss as it is then configured."""
    settings = [f"algorithm={{name: {method}}}", f"objective.old_logprobs={pi_old}", *ages]
    read = reads(config(settings[0]).algorithm.make_method()) & {"old_logprobs", "behavior_logprobs"}
    if pi_old == "engine" and len(read) != 1:  # there is no ratio to mu, or it would count twice
        with pytest.raises(ConfigError, match=r"objective\.old_logprobs"):
            config(*settings)
        return
    weighs_by_mu = "behavior_logprobs" in read or pi_old == "engine"
    assert corrections(config(*settings)) == ([] if weighs_by_mu else ["token_truncate"])


@pytest.mark.parametrize("method", ["reinforce", "rloo"])
def test_methods_without_a_ratio_are_refused_the_engines_log_probabilities(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective.old_logprobs: the loss of '{method}' .* up to 3 .* use trainer"):
        config(*OVERLAP, *REUSE, "objective.old_logprobs=engine", method=method)
    config("objective.old_logprobs=engine", method=method)


def said(*settings: str, method: str = "grpo") -> list[str]:
    return [text for text in warnings_for(config(*settings, method=method)) if "versions old" in text]


def test_a_list_of_no_corrections_is_warned_about_where_tokens_are_old() -> None:
    (warning,) = said(*REUSE, "objective.corrections=[]")
    assert warning.startswith("objective.corrections: is empty, so tokens up to 2 versions old")
    assert said("objective.corrections=[]") == said(*OVERLAP) == []
    assert said(*OVERLAP, "objective.corrections=[]", method="p3o") == []


def test_a_runs_own_configuration_taken_for_overlap_says_that_nothing_is_corrected(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(config()))
    again = load(tmp_path / "config.yaml", RLConfig, OVERLAP)
    assert corrections(again) == [] and any("objective.corrections: is empty" in w for w in warnings_for(again))


def test_the_written_configuration_reads_back_alike(tmp_path) -> None:
    found = config("schedule.mode=overlap")
    (tmp_path / "config.yaml").write_text(to_yaml(found))
    assert load(tmp_path / "config.yaml", RLConfig) == found


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["schedule.over_issue=2"], "2 batches ahead would be older than schedule.max_staleness 1"),
        (["schedule.replay_buffer_share=0.5"], "go together: both above 0, or neither"),
        (["schedule.replay_buffer_versions=2"], "go together: both above 0, or neither"),
        (
            ["schedule.replay_buffer_versions=1", "schedule.replay_buffer_share=0.01"],
            "is 0 groups; it must be at least 1",
        ),
        (["schedule.replay_buffer_versions=1", "schedule.replay_buffer_share=0.99"], "is 16 groups"),
        (["schedule.mode=overlap", "schedule.pause_while_training=true", "schedule.in_flight=drain"], "stands still"),
        (
            ["schedule.max_staleness=0"],
            "schedule.max_staleness: must be at least 1; staleness 0 is schedule.mode: sync",
        ),
        (["schedule.max_staleness=-1"], "schedule.max_staleness: must be at least 1"),
        (["schedule.mode=async"], "schedule.mode: asynchronous training is schedule.mode: overlap here, not 'async'"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.") as refused:
        config(*settings)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["schedule.over_issue=0", "schedule.max_staleness=4"], "no token is more than 1 version old"),
        (["schedule.over_issue=0.01", "schedule.max_staleness=2"], "no token is more than 1 version old"),
        (["schedule.over_issue=0", "schedule.pause_while_training=true"], "this is sync"),
        (["schedule.over_issue=0"], None),
        (["schedule.over_issue=1", "schedule.max_staleness=4"], None),
        (["schedule.max_staleness=4"], None),
    ],
)
def test_staleness_that_is_never_reached_is_warned_about(settings: list[str], says: str | None) -> None:
    found = [text for text in warnings_for(config(*OVERLAP, *settings)) if "schedule.over_issue" in text]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_keys_without_effect_are_warned_about() -> None:
    warned = warnings_for(config("schedule.in_flight=abort"))
    assert any(text.startswith("schedule.in_flight: has no effect with schedule.mode sync") for text in warned)
    assert "takes the policy that sampled as pi_old" in said(*OVERLAP, "objective.old_logprobs=engine")[0]
    assert not [text for text in warnings_for(config("schedule.mode=overlap")) if "schedule" in text]
