"""What the shipped configurations need and a clean checkout lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.blocks.source import Source
from configs.reading.files import read_job
from data_feeds.reading.sources import MADE_BY, SAMPLED_BY, open_rows
from orchestration.model.checkpoint_facts import find_model

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_whatever_a_shipped_file_lacks_is_named_with_the_command_that_makes_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, _ = read_job(file)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"`python -m data_prep\.\w+` makes it"):
        find_model(raw["model"]["path"])
    for source in [*raw["data"]["sources"], *raw["data"].get("heldout_sources", [])]:
        if "file" in source and not source["file"].startswith(raw["model"]["path"]):
            with pytest.raises(ValueError, match="no such file") as caught:
                open_rows(Source(**source), 0, "data.sources.0")
            folder = Path(source["file"]).parent
            assert f"    {SAMPLED_BY}\n    python -m data_prep {MADE_BY[folder.name]} --out {folder}" in str(
                caught.value
            )


def test_the_commands_are_those_at_the_top_of_the_files() -> None:
    dpo, kto = ((CONFIGS / name).read_text() for name in ("dpo.yaml", "kto.yaml"))
    assert f"#   {SAMPLED_BY}\n" in dpo
    assert f"#   python -m data_prep {MADE_BY['own_pairs']} --out data/own_pairs\n" in dpo
    assert f"#   python -m data_prep {MADE_BY['own_labels']} --out data/own_labels\n" in kto
