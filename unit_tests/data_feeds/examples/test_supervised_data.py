"""From nasty files to examples: what is learned, what is left out and said, and that nothing held out leaks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from configs.blocks.rl import Data
from configs.blocks.supervised_data import SLData
from data_feeds.examples.rows import Kind
from data_feeds.examples.supervised_data import SupervisedData, load_supervised_data
from data_feeds.packing import pack
from data_feeds.prompts.prompts import load_prompts
from data_feeds.responses import Responses
from records.rollout import Trajectory
from unit_tests.data_feeds.chat.chat_families import CHATML, IM, byte_level

TOKENIZER = byte_level(CHATML, *IM)


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def feed(
    source: dict[str, Any] | list[dict[str, Any]],
    kind: Kind = "demonstrations",
    max_heldout: int | None = None,
    **keys: Any,
) -> SupervisedData:
    sources = source if isinstance(source, list) else [source]
    keys.setdefault("heldout_fraction", 0.0)
    return load_supervised_data(SLData(sources=sources, **keys), kind, TOKENIZER, 0, max_heldout)  # type: ignore[arg-type]


def learned(trajectory: Trajectory) -> str:
    return str(TOKENIZER.decode(trajectory.token_ids[trajectory.is_action]))


def rows(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {i}", "answer": f"it is {i}", "level": i % 3} for i in range(n)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_prompt_and_answer(tmp_path: Path) -> None:
    made = feed({"file": jsonl(tmp_path / "a.jsonl", rows(3))}, system_prompt="be kind")
    first = next(made.all_training())[0]
    assert learned(first) == "it is 0<|im_end|>" and first.response == "it is 0" and first.is_action.all()
    assert TOKENIZER.decode(first.prompt_ids) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwhat is 0<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first.group_id, first.sample, first.chosen, first.finish_reason) == ("a/0", 0, None, "stop")
    assert first.prompt.columns == {"level": 0} and first.prompt.source == "a"
    assert not first.behavior_logprobs.any() and not first.versions.any() and first.token_ids.dtype == np.int32


def test_an_answer_is_learned_but_not_the_turns_of_its_prompt(tmp_path: Path) -> None:
    prompt = [user("a"), said("b"), user("c")]
    made = feed({"file": jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "d"}])})
    (only,) = next(made.all_training())
    assert learned(only) == "d<|im_end|>" and set(only.turn) == {1}


def test_whole_chats(tmp_path: Path) -> None:
    chat = [user("a"), said("b b"), user("c"), said("d"), user("e")]
    source = {"file": jsonl(tmp_path / "a.jsonl", [{"messages": chat}]), "messages_column": "messages"}
    (only,) = next(feed(source).all_training())
    assert learned(only) == "b b<|im_end|>d<|im_end|>"
    assert only.turn[only.is_action].tolist() == sorted(only.turn[only.is_action].tolist())
    assert not only.is_action.all() and only.is_action[-1] and only.prompt.messages == [user("a")]
    (last,) = next(feed(source, train_on="last_assistant").all_training())
    assert learned(last) == "d<|im_end|>" and last.is_action.all()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "why", "chosen": "good", "rejected": "bad, bad"},
        {"prompt": [user("why")], "chosen": [said("good")], "rejected": [said("bad, bad")]},
        {"chosen": [user("why"), said("good")], "rejected": [user("why"), said("bad, bad")]},
        {"prompt": "why", "chosen": [user("why"), said("good")], "rejected": [user("why"), said("bad, bad")]},
    ],
)
def test_pairs_in_every_form(tmp_path: Path, row: dict[str, Any]) -> None:
    (pair,) = feed({"file": jsonl(tmp_path / "a.jsonl", [row])}, "pairs").all_training()
    assert [learned(t) for t in pair] == ["good<|im_end|>", "bad, bad<|im_end|>"]
    assert [(t.sample, t.chosen, t.group_id) for t in pair] == [(0, True, "a/0"), (1, False, "a/0")]
    assert np.array_equal(pair[0].prompt_ids, pair[1].prompt_ids)
    assert TOKENIZER.decode(pair[0].prompt_ids) == "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"


def test_turns_that_both_chats_of_a_pair_share_are_not_learned(tmp_path: Path) -> None:
    shared = [user("a"), said("b"), user("c")]
    row = {"chosen": [*shared, said("d"), user("e"), said("f")], "rejected": [*shared, said("g")]}
    (pair,) = feed({"file": jsonl(tmp_path / "a.jsonl", [row])}, "pairs").all_training()
    assert [learned(t) for t in pair] == ["d<|im_end|>f<|im_end|>", "g<|im_end|>"]


def test_a_pair_whose_answers_begin_differently_still_shares_one_prompt(tmp_path: Path) -> None:
    row = {"prompt": "why", "chosen": "\nlines", "rejected": "no"}  # the line break joins the template's
    (pair,) = feed({"file": jsonl(tmp_path / "a.jsonl", [row])}, "pairs").all_training()
    assert np.array_equal(pair[0].prompt_ids, pair[1].prompt_ids)
    assert [learned(t) for t in pair] == ["lines<|im_end|>", "no<|im_end|>"]
    ((batch,),) = pack(Responses(pair), np.zeros(2, int), np.ones(2), {}, 100, 1, share_prompts=True)
    assert TOKENIZER.decode(batch.targets) in ("lines<|im_end|>no<|im_end|>", "no<|im_end|>lines<|im_end|>")


def test_labelled_responses(tmp_path: Path) -> None:
    table = [
        {"prompt": "a", "response": "b", "label": True},
        {"prompt": "a", "response": [said("c")], "label": 0},
        {"response": [user("a"), said("x"), user("d"), said("e")], "label": False},
    ]
    made = [e for (e,) in feed({"file": jsonl(tmp_path / "a.jsonl", table)}, "labels").all_training()]
    assert [(learned(t), t.chosen) for t in made] == [
        ("b<|im_end|>", True),
        ("c<|im_end|>", False),
        ("e<|im_end|>", False),
    ]


BAD: list[tuple[Kind, Any, str]] = [
    ("demonstrations", {"promt": "a", "answer": "b"}, "there is no column 'prompt'.*did you mean promt"),
    ("demonstrations", {"messages": []}, "set prompt_column, or messages_column: messages"),
    ("demonstrations", {"prompt": 5, "answer": "b"}, "column 'prompt' is a int"),
    ("demonstrations", {"prompt": "a", "answer": {"x": 1}}, "column 'answer' is a dict"),
    ("demonstrations", {"prompt": "a", "answer": None}, "column 'answer' is empty"),
    ("demonstrations", {"prompt": "a", "answer": "  "}, "column 'answer' is empty: there is nothing to learn"),
    ("demonstrations", {"prompt": "a", "answer": [user("b")]}, "must begin with the assistant's"),
    ("demonstrations", {"prompt": [{"role": 7, "content": "a"}], "answer": "b"}, "a role is text"),
    ("demonstrations", {"prompt": [{"role": "user", "content": 3}], "answer": "b"}, "content is text"),
    ("demonstrations", "{'prompt': 1}", "not a JSON object on one line"),
    ("demonstrations", "[1]", "every line must be a JSON object"),
    ("demonstrations", '{"prompt": "a", "answer": "\\ud800"}', "half a character"),
    ("pairs", {"prompt": "a", "chosen": "b"}, "there is no column 'rejected'"),
    ("pairs", {"chosen": "b", "rejected": "c"}, "no column 'prompt'.*no whole chat"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same: there is nothing to prefer"),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": None}, "column 'rejected' is empty"),
    (
        "pairs",
        {"chosen": [user("a"), said("b")], "rejected": [user("x"), said("b")]},
        "that differ must be the assistant's",
    ),
    ("pairs", {"chosen": [user("a"), said("b")], "rejected": "c"}, "one is a whole chat and the other is not"),
    ("pairs", {"chosen": [user("a"), said("b")], "rejected": [user("a")]}, "that differ must be the assistant's"),
    ("labels", {"prompt": "a", "response": "b", "label": "yes"}, "column 'label' is 'yes'; a label is true or false"),
    ("labels", {"prompt": "a", "response": "b", "label": None}, "column 'label' is None"),
    ("labels", {"response": [user("a")], "label": True}, "must end with the assistant's"),
]
GOOD: dict[Kind, dict[str, Any]] = {
    "demonstrations": {"prompt": "q", "answer": "r"},
    "pairs": {"prompt": "q", "chosen": "r", "rejected": "s"},
    "labels": {"prompt": "q", "response": "r", "label": True},
}


@pytest.mark.parametrize(("kind", "row", "why"), BAD)
def test_bad_rows_are_named_and_left_out_or_fatal(tmp_path: Path, kind: Kind, row: Any, why: str) -> None:
    table = [*[{**GOOD[kind], "n": i} for i in range(16)], row, GOOD[kind]]
    source = {"file": jsonl(tmp_path / "a.jsonl", table)}
    made = feed(source, kind)
    assert len(list(made.all_training())) == 17
    (reason,) = made.sources[0].left_out.reasons
    assert reason.startswith(f"{tmp_path}/a.jsonl line 17: ") and made.sources[0].left_out.bad == 1
    assert "1 bad" in str(made) and "line 17" in str(made)
    with pytest.raises(ValueError, match=f"(?s)data.sources.0: 1 bad rows.*line 17: .*{why}"):
        feed(source, kind, bad_rows="error")


def test_columns_are_checked_before_any_row(tmp_path: Path) -> None:
    def refused(table: dict[str, list[Any]], kind: Kind, said_: str, **keys: Any) -> None:
        parquet.write_table(pa.table(table), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=said_):
            feed({"file": str(tmp_path / "a.parquet"), **keys}, kind)

    refused({"question": ["a"], "answer": ["b"]}, "demonstrations", r"no column 'prompt'.*data.sources.0.prompt_column")
    refused({"messages": ["a"], "n": [1]}, "demonstrations", r"or messages_column: messages")
    refused(
        {"prompt": [1, 2], "answer": ["b", "c"]}, "demonstrations", r"column 'prompt' holds int64; it must hold text"
    )
    refused({"prompt": ["a"], "response": ["b"], "label": ["yes"]}, "labels", r"'label' holds string.*true or false")
    refused({"prompt": ["a"], "answer": ["b"]}, "demonstrations", r"answer_column: demonstr", answer_column=None)
    refused(
        {"prompt": [""], "answer": ["b"]}, "demonstrations", r"no row can be used; the first: .*row 1: column 'prompt'"
    )
    with pytest.raises(ValueError, match="holds no row"):
        feed({"file": jsonl(tmp_path / "empty.jsonl", [])})


def test_rows_alike_from_every_kind_of_source(tmp_path: Path) -> None:
    table = rows(2500)
    jsonl(tmp_path / "rows.jsonl", [*table[:7], "", *table[7:]])
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet", row_group_size=600)
    saved = datasets.Dataset.from_list(table)
    saved.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": saved.select([0]), "test": saved}).save_to_disk(tmp_path / "splits" / "rows")
    (tmp_path / "files" / "rows").mkdir(parents=True)
    jsonl(tmp_path / "files" / "rows" / "train.jsonl", table)
    cache = str(tmp_path / "cache")
    sources: list[dict[str, Any]] = [
        {"file": str(tmp_path / "rows.jsonl")},
        {"file": str(tmp_path / "rows.jsonl.gz")},
        {"file": str(tmp_path / "rows.parquet")},
        {"dataset": str(tmp_path / "rows")},
        {"dataset": str(tmp_path / "splits" / "rows"), "split": "test"},
        {"dataset": str(tmp_path / "files" / "rows")},
    ]
    feeds = [feed(source, cache_dir=cache, heldout_fraction=0.1, max_heldout=20) for source in sources]
    drawn = [[(t.group_id, t.token_ids.tolist()) for (t,) in f.sampler.next(40)] for f in feeds]
    assert all(d == drawn[0] for d in drawn[1:])
    assert len({t[0].group_id for t in feeds[0].heldout}) == 20
    assert [t[0].group_id for t in feeds[2].heldout] == [t[0].group_id for t in feeds[0].heldout]
    prompts = [load_prompts(Data(sources=[source]), TOKENIZER) for source in sources]  # type: ignore[list-item]
    assert all(p == prompts[0] for p in prompts[1:]), "reinforcement learning reads them too"
    (copy,) = (tmp_path / "cache").iterdir()
    before = copy.stat().st_mtime_ns
    feed(sources[2], cache_dir=cache)
    assert [p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()] == [before], "made once"
    parquet.write_table(pa.Table.from_pylist(rows(3)), tmp_path / "rows.parquet")
    assert feed(sources[2], cache_dir=cache).training_rows == 3, "a changed file is read anew"


def test_chats_alike_from_every_kind_of_source(tmp_path: Path) -> None:
    table = [
        {"chat": [user(f"a {i}"), {**said("b"), "name": "x"} if i % 2 else said("c"), user("d"), said(f"{i}")]}
        for i in range(7)
    ]
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(table).save_to_disk(tmp_path / "rows")
    made = [
        list(feed({**place, "messages_column": "chat"}, cache_dir=str(tmp_path / "cache")).all_training())
        for place in (
            {"file": jsonl(tmp_path / "rows.jsonl", table)},
            {"file": str(tmp_path / "rows.parquet")},
            {"dataset": str(tmp_path / "rows")},
        )
    ]
    texts = [[learned(t) for (t,) in examples] for examples in made]
    assert texts[0] == [f"{'b' if i % 2 else 'c'}<|im_end|>{i}<|im_end|>" for i in range(7)]
    assert texts[0] == texts[1] == texts[2]


def test_data_sets_of_the_wrong_type_are_refused_before_any_row(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "a", "response": 1, "label": True}]).save_to_disk(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"rows: column 'response' holds Value\('int64'\); it must hold text"):
        feed({"dataset": str(tmp_path / "rows")}, "labels")


def test_data_sets_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows(2))}).save_to_disk(tmp_path / "some")
    with pytest.raises(ValueError, match=r"data set .*some: .*no split 'test'; there are: train"):
        feed({"dataset": str(tmp_path / "some"), "split": "test"})
    with pytest.raises(ValueError, match=r"data set nobody/nothing: it cannot be loaded: .*as a hub name, check it"):
        feed({"dataset": "nobody/nothing"})
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"bad.jsonl.gz: it is not readable as gzip"):
        feed({"file": str(tmp_path / "bad.jsonl.gz")})


def test_long_examples_are_skipped_cut_or_refused(tmp_path: Path) -> None:
    table = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b " * 30}, {"prompt": "a " * 40, "answer": "b"}]
    source = {"file": jsonl(tmp_path / "a.jsonl", table)}
    skipped = feed(source, max_tokens=20)
    assert [t.response for (t,) in skipped.all_training()] == ["b"] and skipped.sources[0].left_out.too_long == 2
    cut = feed(source, max_tokens=20, too_long="truncate")
    short, long = (t for (t,) in cut.all_training())
    assert len(long.prompt_ids) + len(long.token_ids) == 20 and long.truncated and not short.truncated
    assert "<|im_end|>" not in learned(long)
    assert (cut.sources[0].left_out.truncated, cut.sources[0].left_out.too_long) == (1, 1)
    list(cut.all_training())
    assert (cut.sources[0].left_out.truncated, cut.sources[0].left_out.too_long) == (1, 1), "counted once"
    with pytest.raises(
        ValueError, match=r"(?s)0 bad rows and 2 too long.*line 2: .* tokens, more than data.max_tokens"
    ):
        feed(source, max_tokens=20, too_long="error")
    with pytest.raises(ValueError, match="no row of 'a' can be learned from"):
        feed(source, max_tokens=2)


def test_a_pair_that_truncation_makes_equal_is_left_out(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b " * 30 + "x", "rejected": "b " * 30 + "y"}
    table = [row, {"prompt": "a", "chosen": "c", "rejected": "b " * 30}]
    made = feed({"file": jsonl(tmp_path / "a.jsonl", table)}, "pairs", max_tokens=20, too_long="truncate")
    (pair,) = made.all_training()
    assert [t.truncated for t in pair] == [False, True]
    assert "chosen and rejected have the same tokens within data.max_tokens (20)" in made.sources[0].left_out.reasons[0]


def test_duplicates_are_dropped_when_asked(tmp_path: Path) -> None:
    one = {"file": jsonl(tmp_path / "a.jsonl", [*rows(4), *rows(3), {"prompt": "what is 0", "answer": "other"}])}
    two = {"file": jsonl(tmp_path / "b.jsonl", rows(5))}
    assert feed([one, two]).training_rows == 13
    made = feed([one, two], drop_duplicates=True)
    assert [len(s) for s in made.sources] == [5, 1] and [s.left_out.duplicates for s in made.sources] == [3, 4]
    assert [t.group_id for (t,) in made.all_training()] == ["a/0", "a/1", "a/2", "a/3", "a/7", "b/4"]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=40), st.floats(0.1, 0.9), st.integers(0, 3))
def test_no_question_is_on_both_sides(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], fraction: float, seed: int
) -> None:
    table = [{"prompt": f"what is {n}", "answer": f"{i}"} for i, n in enumerate(numbers)]
    source = {"file": jsonl(tmp_path_factory.mktemp("split") / "a.jsonl", table)}
    count = round(fraction * len(set(numbers)))
    if count in (0, len(set(numbers))):
        with pytest.raises(ValueError, match=r"data.heldout_fraction: .*set empty"):
            feed(source, heldout_fraction=fraction, split_seed=seed)
        return
    made = feed(source, heldout_fraction=fraction, split_seed=seed)
    asked = [t.prompt.messages[0]["content"] for (t,) in made.all_training()]
    held = [t.prompt.messages[0]["content"] for (t,) in made.heldout]
    assert not set(asked) & set(held) and len(set(held)) == count
    assert sorted(asked + held) == sorted(row["prompt"] for row in table)


def test_training_rows_that_are_also_held_out_are_removed(tmp_path: Path) -> None:
    train = {"file": jsonl(tmp_path / "a.jsonl", rows(10))}
    held = {
        "file": jsonl(tmp_path / "b.jsonl", [{"prompt": "What  is 3", "answer": "x"}, {"prompt": "new", "answer": "x"}])
    }
    made = feed(train, heldout_sources=[held])
    assert made.training_rows == 9 and made.sources[0].left_out.leaks == 1 and len(made.heldout) == 2
    with pytest.raises(ValueError, match=r"all training rows are also in data\.heldout_sources"):
        feed(train, heldout_sources=[{"file": jsonl(tmp_path / "c.jsonl", rows(10))}])


@settings(max_examples=25)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.text("ab \n日😀", min_size=1, max_size=40), st.text("ab \n日😀", min_size=1, max_size=40)),
            st.sampled_from(
                ["{", "[]", '{"prompt": 3, "answer": "a"}', '{"prompt": "a"}', "", '{"prompt": "a", "answer": null}']
            ),
        ),
        min_size=1,
        max_size=15,
    ),
    st.integers(8, 40),
    st.sampled_from(["skip", "truncate"]),
)
def test_ragged_files_never_stop_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, table: list[Any], max_tokens: int, too_long: str
) -> None:
    lines = [r if isinstance(r, str) else {"prompt": r[0], "answer": r[1]} for r in table]
    source = {"file": jsonl(tmp_path_factory.mktemp("ragged") / "a.jsonl", lines)}
    try:
        made = feed(source, max_tokens=max_tokens, too_long=too_long)
    except ValueError as error:
        if "no row can be used" in str(error) or "can be learned from" in str(error) or "holds no row" in str(error):
            return
        raise
    usable = list(made.all_training())
    out = made.sources[0].left_out
    assert len(usable) + out.bad + out.too_long == sum(line != "" for line in lines)
    for (t,) in usable:
        assert t.action_tokens and len(t.prompt_ids) + len(t.token_ids) <= max_tokens and t.is_action[-1]
    if usable:
        drawn = [t.group_id for (t,) in made.sampler.next(2 * len(usable))]
        assert sorted(drawn) == sorted(2 * [t.group_id for (t,) in usable])


def test_a_huge_row_is_one_row(tmp_path: Path) -> None:
    table = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "word " * 50_000}]
    made = feed({"file": jsonl(tmp_path / "a.jsonl", table)})
    assert len(list(made.all_training())) == 1 and made.sources[0].left_out.too_long == 1
