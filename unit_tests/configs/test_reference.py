"""docs/CONFIG.md is what the schema and the methods say."""

from __future__ import annotations

from configs import reference
from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.reading.messages import dotted_keys
from plugins.kinds import find, listed
from plugins.parameters import parameters_of


def test_the_page_is_not_stale() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python -m configs.reference"


def test_every_key_has_a_description_and_a_row() -> None:
    page = reference.page()
    for schema in (RLConfig, EvalConfig):
        for path in dotted_keys(schema):
            name = path.rpartition(".")[2]
            if path != "algorithm.params":
                assert f"| `{name}` |" in page or f"### `{path}`" in page, path
    described = [line for line in page.splitlines() if line.startswith("| `")]
    assert described and not [line for line in described if line.endswith("|  |")], "a key without a description"


def test_methods_are_listed_without_importing_them() -> None:
    assert {"grpo", "sft"} <= set(listed("method"))
    for name, entry in listed("method").items():
        assert entry.has_advantages == (find("method", name).data == "prompts"), name
        assert entry.summary, f"{name} has no docstring"


def test_every_advantage_and_correction_is_listed_with_its_parameters() -> None:
    page = reference.page()
    for kind in ("advantage", "correction"):
        for name, function in ((name, find(kind, name)) for name in listed(kind)):
            row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
            for parameter, field in parameters_of(function).model_fields.items():
                assert f"`{parameter}` (" in row and field.description and field.description in row
