"""Secrets do not reach a report, and what is no secret does."""

from __future__ import annotations

import pytest

from orchestration.run.masking import masked, masked_word


def test_values_of_secret_keys_and_users_of_addresses_are_masked() -> None:
    given = {
        "max_new_tokens": 8, "api_key_env": "JUDGE_KEY", "base_url": "https://user:pass@host:80/v1", "mail": "a@b.c",
        "request": {"api_key": "sk-1", "db_password": 1234, "headers": {"Authorization": "Bearer x"}, "n": 1},
        "parts": [{"HF_TOKEN": "hf_1", "secrets": ["a", {"b": "c"}]}],
    }  # fmt: skip
    assert masked(given) == {
        "max_new_tokens": 8, "api_key_env": "JUDGE_KEY", "base_url": "https://***@host:80/v1", "mail": "a@b.c",
        "request": {"api_key": "***", "db_password": "***", "headers": {"Authorization": "***"}, "n": 1},
        "parts": [{"HF_TOKEN": "***", "secrets": ["***", {"b": "***"}]}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("rollout.max_new_tokens=512", "rollout.max_new_tokens=512"),
        ("reward.parts.0.params.request.api_key=sk-1", "reward.parts.0.params.request.api_key=***"),
        ("a={api_key: sk-1, n: 2}", "a={api_key: ***, n: 2}"),
        ('a={"password": "x, y", n: 2}', 'a={"password": ***, n: 2}'),
        ("a={Authorization: Bearer x}", "a={Authorization: ***}"),
        ("a.api_key_env=JUDGE_KEY", "a.api_key_env=JUDGE_KEY"),
        ("a.base_url=https://u:p@host/v1", "a.base_url=https://***@host/v1"),
        ("--config", "--config"),
    ],
)
def test_words_of_a_command_line(word: str, shown: str) -> None:
    assert masked_word(word) == shown
