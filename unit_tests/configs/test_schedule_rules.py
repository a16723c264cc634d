"""What asynchrony adds to the objective by itself, and which schedules are refused or warned about."""

from __future__ import annotations

import pytest

from configs import rules
from configs.load import ConfigError, load, to_yaml
from configs.schema import RLConfig


def config(*settings: str, method: str = "grpo") -> RLConfig:
    return load(f"configs/{method}.yaml", RLConfig, list(settings))


def corrections(found: RLConfig) -> list[str]:
    return [named.function for named in found.objective.corrections]


def test_old_tokens_are_weighed_by_default() -> None:
    assert corrections(config()) == []
    assert corrections(config("schedule.mode=overlap")) == ["token_truncate"]
    assert corrections(config("schedule.reuse_versions=1", "schedule.reuse_share=0.25")) == ["token_truncate"]


@pytest.mark.parametrize("method", ["p3o", "aipo", "decoupled_ppo"])
def test_a_method_that_weighs_by_mu_itself_gets_no_second_weight(method: str) -> None:
    assert corrections(config("schedule.mode=overlap", method=method)) == []


def test_what_the_user_says_about_corrections_stays() -> None:
    assert corrections(config("schedule.mode=overlap", "objective.corrections=[]")) == []
    assert corrections(config("schedule.mode=overlap", "objective.corrections=[veto]")) == ["veto"]
    assert corrections(config("schedule.mode=overlap", "objective.old_logprobs=engine")) == []


def test_the_written_configuration_reads_back_alike(tmp_path) -> None:
    found = config("schedule.mode=overlap")
    (tmp_path / "config.yaml").write_text(to_yaml(found))
    assert load(tmp_path / "config.yaml", RLConfig) == found


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["schedule.over_issue=2"], "2 batches ahead would be older than schedule.max_staleness 1"),
        (["schedule.reuse_share=0.5"], "go together: both above 0, or neither"),
        (["schedule.reuse_versions=2"], "go together: both above 0, or neither"),
        (["schedule.reuse_versions=1", "schedule.reuse_share=0.01"], "is 0 groups; it must be at least 1"),
        (["schedule.reuse_versions=1", "schedule.reuse_share=0.99"], "is 16 groups"),
        (["schedule.mode=overlap", "schedule.pause_while_training=true", "schedule.in_flight=drain"], "stands still"),
        (["schedule.max_staleness=0"], "schedule.max_staleness"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.") as refused:
        config(*settings)
    assert says in str(refused.value)


def test_keys_without_effect_are_warned_about() -> None:
    warned = rules.warnings_for(config("schedule.in_flight=abort"))
    assert any(text.startswith("schedule.in_flight: has no effect with schedule.mode sync") for text in warned)
    warned = rules.warnings_for(config("schedule.mode=overlap", "objective.old_logprobs=engine"))
    assert any("up to 1 versions old" in text for text in warned)
    assert not [text for text in rules.warnings_for(config("schedule.mode=overlap")) if "schedule" in text]
