"""What holds for every recipe: complete or absent, made once, never over something else, bad rows counted or fatal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from data_prep.__main__ import listing, main, names
from data_prep.reading import BATCH_ROWS
from data_prep.writing import ROW_GROUP_ROWS
from unit_tests.data_prep import hub_copies

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return hub_copies.gsm8k(tmp_path / "hub")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Runs a command that must fail; returns what it said, in one line, beside bad rows."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("bad row: ")]
        assert len(lines) == 1
        return lines[0].removeprefix("error: ")

    return run


def test_the_list_names_every_recipe_with_a_line() -> None:
    assert {"gsm8k", "deepscaler", "dolci", "hh_rlhf", "mm_math", "math_eval", "reasoning_gym"} <= set(names())
    lines = listing().splitlines()
    for name in names():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line.split()) > 4 and len(line) <= 120
    assert "data_prep.smollm2" in listing() and "data_prep.tiny_sorter_model" in listing()


@pytest.mark.parametrize("name", names())
def test_every_recipe_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--out FOLDER" in said and "--strict" in said
    assert name in ("reasoning_gym", "own_pairs") or (
        "--from-hub" in said and "--source FOLDER" in said and "--revision" in said
    )


def test_an_unknown_name_gets_the_nearest(refused) -> None:
    assert refused("gsm8", "--out", "x").startswith("there is no recipe 'gsm8'; did you mean gsm8k? there are: ")


def test_a_second_run_does_nothing_and_another_one_is_refused(source: Path, tmp_path: Path, refused, capsys) -> None:
    out = tmp_path / "new" / "data"
    command = ["gsm8k", "--source", str(source), "--out", str(out)]
    assert main(command) == 0
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.iterdir()}
    assert main(command) == 0
    assert "already there" in capsys.readouterr().out
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.iterdir()} == before
    other = tmp_path / "other"
    assert "was made by another command (python -m data_prep gsm8k --source" in refused(
        "gsm8k", "--source", hub_copies.gsm8k(other), "--out", out
    )
    hub_copies.write_parquet(other / "main/train-00000-of-00001.parquet", hub_copies.GSM8K_TEST[:2])
    assert main(["gsm8k", "--source", str(other), "--out", str(out), "--force"]) == 0
    assert parquet.ParquetFile(out / "train.parquet").metadata.num_rows == 2
    assert not (out / "bad_rows.jsonl").exists()
    assert [p.name for p in out.parent.iterdir()] == ["data"]


def test_what_data_prep_did_not_make_is_never_replaced(source: Path, tmp_path: Path, refused) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    said = refused("gsm8k", "--source", source, "--out", out, "--force")
    assert said == f"--out: {out} exists and was not made by data_prep (it has no card.json); choose another"
    assert (out / "thesis.txt").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["gsm8k", "--source", str(source), "--out", str(empty)]) == 0


def test_strict_stops_at_the_first_bad_row_and_leaves_nothing(source: Path, tmp_path: Path, refused) -> None:
    out = tmp_path / "out"
    said = refused("gsm8k", "--source", source, "--out", out, "--strict")
    assert said.startswith("main/train-00000-of-00001.parquet row 4: 'question' is empty; without --strict")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub"]


def test_a_failed_force_keeps_what_was_there(source: Path, tmp_path: Path, refused) -> None:
    out = tmp_path / "out"
    assert main(["gsm8k", "--source", str(source), "--out", str(out)]) == 0
    refused("gsm8k", "--source", source, "--out", out, "--strict", "--force")
    assert parquet.ParquetFile(out / "train.parquet").metadata.num_rows == 4


def test_a_killed_run_leaves_no_folder_and_the_next_one_works(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import os, sys\nfrom data_prep import preparing\n"
        "preparing.json.dumps = lambda *a, **k: os._exit(9)\n"  # dies as it is about to write the card
        "from data_prep.__main__ import main\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "gsm8k", "--source", str(source), "--out", str(out)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 9
    assert not out.exists() and (tmp_path / ".out.partial").is_dir()
    assert main(command[3:]) == 0
    assert (out / "card.json").exists() and not (tmp_path / ".out.partial").exists()


def test_the_source_is_checked_before_anything_is_written(source: Path, tmp_path: Path, refused) -> None:
    out = tmp_path / "out"
    assert refused("gsm8k", "--source", tmp_path / "nowhere", "--out", out).endswith(
        f"no folder {tmp_path / 'nowhere'}"
    )
    assert "has no file socratic/train-*.parquet; there are: main/test-00000-of-00001.parquet, main/train-" in refused(
        "gsm8k", "--source", source, "--out", out, "--config", "socratic"
    )
    hub_copies.write_parquet(source / "main/test-00000-of-00001.parquet", [{"query": "q", "answer": "#### 1"}])
    assert refused("gsm8k", "--source", source, "--out", out) == (
        "main/test-00000-of-00001.parquet: there is no column question; there are: query, answer"
    )
    (source / "main/test-00000-of-00001.parquet").write_bytes(b"not parquet")
    assert "main/test-00000-of-00001.parquet: it is not readable as parquet" in refused(
        "gsm8k", "--source", source, "--out", out
    )
    assert not out.exists()


def test_an_output_without_rows_is_refused(source: Path, tmp_path: Path, refused) -> None:
    hub_copies.write_parquet(source / "main/test-00000-of-00001.parquet", [{"question": "q", "answer": "1"}])
    assert refused("gsm8k", "--source", source, "--out", tmp_path / "out").startswith(
        "test.parquet would be empty: 11 rows"
    )


def test_the_card_says_what_was_done(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["gsm8k", "--source", str(source), "--out", str(out)]
    assert main(command) == 0
    card = json.loads((out / "card.json").read_text())
    assert card["command"] == f"python -m data_prep gsm8k --source {source} --out {out}"
    train, test = card["sources"]
    name = "main/train-00000-of-00001.parquet"
    assert (train["repository"], train["revision"], train["commit"]) == ("openai/gsm8k", "main", None)
    assert train["files"] == [{"file": name, "bytes": (source / name).stat().st_size}]
    assert test["files"][0]["file"] == "main/test-00000-of-00001.parquet"
    assert card["dropped"] == {
        "'question' is empty": 2,
        "no 'question'": 1,
        "the answer has no ####": 1,
        "no number after ####": 1,
        "no 'answer'": 1,
    }
    assert "datasets" in card["versions"]


def test_many_bad_rows_are_listed_in_the_file_only(tmp_path: Path, capsys) -> None:
    rows = [{"problem": "", "answer": "1"}] * 100 + [{"problem": "p", "answer": "1"}]
    hub_copies.write_lines(tmp_path / "hub/deepscaler.json", rows)
    assert main(["deepscaler", "--source", str(tmp_path / "hub"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert said.count("bad row: ") == 20 and "further bad rows are only listed in bad_rows.jsonl" in said
    listed = (tmp_path / "out/bad_rows.jsonl").read_text().splitlines()
    assert len(listed) == 100
    assert json.loads(listed[-1]) == {
        "file": "deepscaler.json",
        "row": 100,
        "reason": "'problem' is empty",
        "detail": "",
    }


def test_rows_are_written_in_order_and_in_row_groups_of_some_megabytes(tmp_path: Path) -> None:
    rows = [{"problem": f"p{i}", "answer": str(i), "extra": None if i < 3 * BATCH_ROWS else i} for i in range(20_000)]
    rows[5]["problem"] = "long " * 4_000_000
    hub_copies.write_lines(tmp_path / "hub/deepscaler.json", rows)
    assert main(["deepscaler", "--source", str(tmp_path / "hub"), "--out", str(tmp_path / "out")]) == 0
    written = parquet.ParquetFile(tmp_path / "out/train.parquet")
    sizes = [written.metadata.row_group(i).num_rows for i in range(written.num_row_groups)]
    assert sizes == [BATCH_ROWS, ROW_GROUP_ROWS, 20_000 - BATCH_ROWS - ROW_GROUP_ROWS]
    expected = [{"prompt": r["problem"], "answer": r["answer"], "extra": r["extra"]} for r in rows]
    assert written.read().to_pylist() == expected


def test_other_columns_of_mixed_types_become_text(tmp_path: Path) -> None:
    extras = [1, "two", {"x": [1]}, None, {}, 2**80]
    rows = [{"problem": f"p{i}", "answer": "1", "extra": extra, "none": {}} for i, extra in enumerate(extras)]
    hub_copies.write_lines(tmp_path / "hub/deepscaler.json", rows)
    assert main(["deepscaler", "--source", str(tmp_path / "hub"), "--out", str(tmp_path / "out")]) == 0
    read = parquet.read_table(tmp_path / "out/train.parquet")
    assert read["extra"].to_pylist() == ["1", "two", '{"x": [1]}', None, "{}", str(2**80)]
    assert set(read["none"].to_pylist()) == {"{}"}


def test_models_keep_their_own_commands() -> None:
    for name in ("smollm2", "tiny_sorter_model"):
        said = subprocess.run(
            [sys.executable, "-m", f"data_prep.{name}", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert "--out" in said.stdout


def peak_mebibytes(source: Path, out: Path) -> float:
    """Peak memory of a process of its own that prepares `source`."""
    code = (
        "import resource, sys\nfrom data_prep.__main__ import main\nassert main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    command = [sys.executable, "-c", code, "deepscaler", "--source", str(source), "--out", str(out)]
    return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1])


@pytest.mark.parametrize("shape", ["lines", "array"])
def test_memory_does_not_grow_with_the_source(shape: str, tmp_path: Path) -> None:
    """64 MiB of rows instead of 4 may not take 32 MiB more."""
    peaks = []
    for mebibytes in (4, 64):
        folder = tmp_path / str(mebibytes)
        folder.mkdir()
        start, between, end = ("[", ",", "]") if shape == "array" else ("", "\n", "\n")
        with (folder / "deepscaler.json").open("w") as file:
            file.write(start)
            for i in range(mebibytes << 8):  # 4 KiB each
                row = json.dumps({"problem": f"p{i}", "answer": "1", "solution": f"{i} " * (4000 // (len(str(i)) + 1))})
                file.write(row if i == 0 else between + row)
            file.write(end)
        peaks.append(peak_mebibytes(folder, tmp_path / f"out{mebibytes}"))
    assert peaks[1] - peaks[0] < 32
