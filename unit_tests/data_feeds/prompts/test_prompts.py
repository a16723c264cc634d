"""Reading prompts and splitting them: what leaks, what is counted, and what a user is told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from configs.blocks.rl import Data
from data_feeds.chat.template import check_chat_template, load_tokenizer, render_chat
from data_feeds.prompts.prompts import PromptSets, load_prompts, question_text, split_key
from data_prep.tiny_sorter import make_tokenizer
from records.rollout import Prompt

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
# The tiny model's template knows no system role; this one takes everything.
ANY_ROLE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer()
    made.chat_template = ANY_ROLE
    return made


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def data(*sources: dict[str, Any], **settings: Any) -> Data:
    return Data(sources=list(sources), **settings)  # type: ignore[arg-type]


def rows(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {i}", "answer": str(i), "level": i % 3} for i in range(n)]


def keys(prompts: list[Prompt], split_by: str) -> set[str]:
    return {split_key(p, split_by) for p in prompts}


def arithmetic(**settings: Any) -> Data:
    sources = [{"reasoning_gym": t, "params": ONE_DIGIT, "size": 400} for t in ("chain_sum", "products")]
    return data(*sources, split_by="unordered_numbers", **settings)


def test_the_default_jobs_data_do_not_leak(tokenizer: Any) -> None:
    sets = load_prompts(arithmetic(system_prompt="Answer."), tokenizer)
    everything = sets.train + sets.heldout
    pairs = [
        {
            tuple(sorted(int(w) for w in question_text(p.messages).replace(".", " ").split() if w.isdigit()))
            for p in side
        }
        for side in (sets.train, sets.heldout)
    ]
    assert all(len(pair) == 2 for side in pairs for pair in side)
    assert pairs[0].isdisjoint(pairs[1])
    assert len(pairs[1]) == round(0.2 * len(pairs[0] | pairs[1]))
    assert len({p.prompt_id for p in everything}) == len(everything)
    assert len({json.dumps(p.messages) for p in everything}) == len(everything) == 800 - sets.duplicates
    assert all(p.messages[0] == {"role": "system", "content": "Answer."} for p in everything)
    assert {p.source for p in sets.heldout} == {"chain_sum", "products"}
    assert "training" in str(sets)


def test_the_split_depends_on_the_split_seed_only(tokenizer: Any) -> None:
    one, again = (load_prompts(arithmetic(split_seed=3), tokenizer) for _ in range(2))
    assert one == again
    other = load_prompts(arithmetic(split_seed=4), tokenizer)
    assert keys(other.heldout, "unordered_numbers") != keys(one.heldout, "unordered_numbers")


def test_reasoning_gym_rows_carry_what_their_scorer_needs(tokenizer: Any) -> None:
    prompt = load_prompts(arithmetic(), tokenizer).train[0]
    assert prompt.columns["entry"]["answer"] == prompt.answer
    assert prompt.columns["entry"]["question"] == prompt.messages[-1]["content"]
    assert (prompt.columns["reasoning_gym"], prompt.columns["params"]) == ("chain_sum", ONE_DIGIT)


def test_the_same_task_twice_gives_different_rows(tokenizer: Any) -> None:
    source = {"reasoning_gym": "chain_sum", "size": 50}
    sets = load_prompts(data(source, source), tokenizer)
    assert {p.source for p in sets.train} == {"chain_sum", "chain_sum#2"}
    assert sets.duplicates == 0


def test_the_first_held_out_prompts_are_a_sample_of_all_sources(tokenizer: Any) -> None:
    sources = [{"reasoning_gym": t, "size": 200} for t in ("chain_sum", "products")]
    heldout = load_prompts(data(*sources), tokenizer).heldout[:20]
    assert {p.source for p in heldout} == {"chain_sum", "products"}


texts = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["+", "-", "*"]), st.integers(0, 9)).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
    min_size=2, max_size=40,
)  # fmt: skip


@settings(max_examples=25)
@given(texts, st.floats(0.05, 0.95), st.sampled_from(["row", "prompt", "unordered_numbers"]), st.integers(0, 5))
def test_no_key_is_on_both_sides(
    tmp_path_factory: pytest.TempPathFactory, questions: list[str], fraction: float, split_by: Any, seed: int
) -> None:
    path = jsonl(tmp_path_factory.mktemp("split") / "rows.jsonl", [{"prompt": q, "answer": "0"} for q in questions])
    job = data({"file": path}, split_by=split_by, heldout_fraction=fraction, split_seed=seed)
    made = make_tokenizer()
    made.chat_template = ANY_ROLE
    numbers = {tuple(sorted(q.split()[::2])) for q in questions}
    count = len(numbers if split_by == "unordered_numbers" else set(questions))
    held = round(fraction * count)
    if held in (0, count):
        with pytest.raises(ValueError, match=r"data.heldout_fraction: .*set empty"):
            load_prompts(job, made)
        return
    sets = load_prompts(job, made)
    assert keys(sets.train, split_by).isdisjoint(keys(sets.heldout, split_by))
    assert len(keys(sets.heldout, split_by)) == held
    assert sorted(question_text(p.messages) for p in sets.train + sets.heldout) == sorted(set(questions))
    assert sets.duplicates == len(questions) - len(set(questions))


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 99), st.sampled_from(["1.5", "0.25", "2.0"])), min_size=2, max_size=5))
def test_commuted_twins_share_a_key(numbers: list[Any]) -> None:
    def key(order: Any, sign: str) -> str:
        text = f"Compute {sign.join(map(str, order))} ="
        return split_key(Prompt("p", [{"role": "user", "content": text}]), "unordered_numbers")

    orders = list(itertools.islice(itertools.permutations(numbers), 24))
    assert len({key(order, sign) for order in orders for sign in (" + ", "*", " - ", "-", ",", ", ")}) == 1
    assert key([*numbers, 7], " + ") != key(numbers, " + ")


def test_split_keys() -> None:
    def key(text: str, split_by: str) -> str:
        return split_key(Prompt("p", [{"role": "user", "content": text}]), split_by)

    assert key("2 + 7", "unordered_numbers") == key("7.0 * 2 =", "unordered_numbers")
    assert key("1 and 23", "unordered_numbers") != key("12 and 3", "unordered_numbers")
    assert key("name a fruit", "unordered_numbers") != key("name a tree", "unordered_numbers")
    assert key("Name  a\nfruit", "prompt") == key("name a fruit", "prompt")
    assert key("Name a fruit", "row") != key("name a fruit", "row")
    system = Prompt("p", [{"role": "system", "content": "3"}, {"role": "user", "content": "2 + 7"}])
    assert split_key(system, "unordered_numbers") == key("2 + 7", "unordered_numbers")


def test_files_of_both_kinds_read_alike(tmp_path: Path, tokenizer: Any) -> None:
    table = rows(20)
    lines = jsonl(tmp_path / "rows.jsonl", [*table[:7], "", *table[7:]])  # an empty line is no row
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    one = load_prompts(data({"file": lines}), tokenizer)
    two = load_prompts(data({"file": str(tmp_path / "rows.parquet")}), tokenizer)
    assert one == two
    prompt = next(p for p in one.train if p.answer == "10")
    assert prompt.messages == [{"role": "user", "content": "what is 10"}]
    assert (prompt.columns, prompt.source, prompt.prompt_id) == ({"level": 1}, "rows", "rows/10")


def test_other_column_names_messages_and_images(tmp_path: Path, tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so"},
    ]
    table = [
        {"q": [*chat, {"role": "user", "content": str(i), "name": "x" if i else None}], "images": [bytes([i])]}
        for i in range(4)
    ]
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "chats.parquet")
    source = {"file": str(tmp_path / "chats.parquet"), "prompt_column": "q", "answer_column": None}
    sets = load_prompts(data(source, heldout_fraction=0.5), tokenizer)
    by_id = {p.prompt_id: p for p in sets.train + sets.heldout}
    assert by_id["chats/1"].messages == [*chat, {"role": "user", "content": "1", "name": "x"}]
    assert by_id["chats/0"].messages == [*chat, {"role": "user", "content": "0"}]
    assert by_id["chats/1"].images == (b"\x01",) and by_id["chats/1"].answer is None
    assert by_id["chats/1"].columns == {}


def test_same_question_about_another_image_is_no_duplicate(tmp_path: Path, tokenizer: Any) -> None:
    table = [{"prompt": "what is it", "answer": "a", "images": [bytes([i % 3])]} for i in range(4)]
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "seen.parquet")
    source = {"file": str(tmp_path / "seen.parquet")}
    sets = load_prompts(data(source, split_by="row", heldout_fraction=0.5), tokenizer)
    assert len(sets.train + sets.heldout) == 3 and sets.duplicates == 1


def test_long_prompts_are_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    table = [{"prompt": "1 " * n, "answer": "1"} for n in range(1, 11)]
    path = jsonl(tmp_path / "rows.jsonl", table)
    sets = load_prompts(data({"file": path}, max_prompt_tokens=8), tokenizer)  # the template adds 2
    assert sets.too_long == 4 and len(sets.train + sets.heldout) == 6
    with pytest.raises(ValueError, match=r"data.sources: .*max_prompt_tokens \(2\); the shortest has 3 tokens"):
        load_prompts(data({"file": path}, max_prompt_tokens=2), tokenizer)


def test_own_held_out_sources_never_leak(tmp_path: Path, tokenizer: Any) -> None:
    train = jsonl(
        tmp_path / "train.jsonl", [{"prompt": q, "answer": "0"} for q in ("2 + 7", "7 + 2", "1 + 1", "3 + 1")]
    )
    test = jsonl(tmp_path / "test.jsonl", [{"prompt": q, "answer": "0"} for q in ("7 + 2", "4 + 4")])

    def split(split_by: Any) -> PromptSets:
        return load_prompts(data({"file": train}, heldout_sources=[{"file": test}], split_by=split_by), tokenizer)

    assert split("prompt").leaks == 1 and len(split("prompt").train) == 3
    assert split("unordered_numbers").leaks == 2 and len(split("unordered_numbers").train) == 2
    assert {p.prompt_id for p in split("row").heldout} == {"test/0", "test/1"}
    with pytest.raises(ValueError, match=r"data.sources: all 2 training prompts are also in data.heldout_sources"):
        load_prompts(data({"file": test}, heldout_sources=[{"file": test}]), tokenizer)


def test_generated_held_out_rows_differ_from_training_rows(tokenizer: Any) -> None:
    source = {"reasoning_gym": "products", "size": 30}
    sets = load_prompts(data(source, heldout_sources=[source]), tokenizer)
    assert sets.leaks < 3 and len({p.prompt_id for p in sets.train + sets.heldout}) == len(sets.train + sets.heldout)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no row"),
        (["", "  "], "holds no row"),
        ([{"promt": "a", "answer": "b"}], "line 1: there is no column 'prompt'; did you mean promt"),
        ([{"prompt": "a", "solution": "b"}], "no column 'answer'.*there are: prompt, solution.*answer_column.*null"),
        ([*rows(2), {"prompt": "a"}], "line 3: there is no column 'answer'"),
        ([*rows(2), "{'prompt': 1}"], "line 3: not a JSON object.*column 2"),
        (['[{"prompt": "a"}]'], "line 1: every line must be a JSON object"),
        ([*rows(1), {"prompt": None, "answer": "b"}], "line 2: column 'prompt' is empty"),
        ([*rows(1), {"prompt": " ", "answer": "b"}], "line 2: column 'prompt' is empty"),
        ([{"prompt": 7, "answer": "b"}], "line 1: column 'prompt' is a int"),
        ([{"prompt": [{"text": "a"}], "answer": "b"}], "line 1: .*every chat message needs 'role' and 'content'"),
        (
            [{"prompt": [{"role": "user", "content": [None, 5]}], "answer": "b"}],
            "line 1: .*a content's parts are blocks",
        ),
        ([{"prompt": "a", "answer": "b", "images": 5}], "line 1: column 'images' is 5; it must be a list of images"),
        ([{"prompt": [{"role": "assistant", "content": "a"}], "answer": "b"}], "line 1: .*ends with the assistant's"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, tokenizer: Any, lines: list[Any], said: str) -> None:
    path = jsonl(tmp_path / "wrong.jsonl", lines)
    with pytest.raises(ValueError, match=f"(?s){said}") as error:
        load_prompts(data({"file": path}), tokenizer)
    assert "wrong.jsonl" in str(error.value)


def test_wrong_files_are_named(tmp_path: Path, tokenizer: Any) -> None:
    jsonl(tmp_path / "train.jsonl", rows(3))
    (tmp_path / "bad.parquet").write_text("this is no parquet file at all")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é", "answer": ""}'.encode("latin-1"))
    parquet.write_table(pa.table({"question": ["a"], "answer": ["b"]}), tmp_path / "other.parquet")
    parquet.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), tmp_path / "none.parquet"
    )
    for name, said in (
        ("trian.jsonl", "no such file; did you mean .*train.jsonl"),
        ("bad.parquet", "not readable as parquet"),
        ("latin.jsonl", "not UTF-8"),
        ("other.parquet", "no column 'prompt'; there are: question, answer; set data.sources"),
        ("none.parquet", "holds no row"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            load_prompts(data({"file": str(tmp_path / name)}), tokenizer)
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("task", "params", "said"),
    [
        ("chain_sums", {}, r"data.sources.0.reasoning_gym: .*no task 'chain_sums'; did you mean chain_sum"),
        ("chain_sum", {"min_term": 2}, "no parameter 'min_term'; did you mean min_terms"),
        ("chain_sum", {"seed": 2}, r"data.sources.0.params: chain_sum: 'seed' is not set here but by data.split_seed"),
        ("chain_sum", {"min_terms": 0}, "chain_sum: bad params .*min_terms must be positive"),
        ("chain_sum", {"min_terms": "two"}, "chain_sum: bad params"),
    ],
)
def test_wrong_generators_are_named(tokenizer: Any, task: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_prompts(data({"reasoning_gym": task, "params": params, "size": 5}), tokenizer)


def test_weights_that_would_do_nothing_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", rows(4))
    with pytest.raises(ValueError, match=r"data.sources\[\].weight: has no effect here"):
        load_prompts(data({"file": path, "weight": 2.0}), tokenizer)


def test_a_second_system_message_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": chat, "answer": ""}])
    with pytest.raises(ValueError, match=r"rows.jsonl line 1: .*leave data.system_prompt out"):
        load_prompts(data({"file": path}, system_prompt="be brief"), tokenizer)


def test_rendering_is_plain_ids_with_the_generation_prompt() -> None:
    tokenizer = make_tokenizer()
    ids = render_chat(tokenizer, [{"role": "user", "content": "sort 3 1 4 1"}])
    assert type(ids) is list and all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == "<user> sort 3 1 4 1 <assistant>"


def test_templates_missing_or_refusing(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match=r"refuses messages with roles \['system'\].*user and assistant only"):
        render_chat(tokenizer, [{"role": "system", "content": "sort"}])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"model.path: .*plain' has no chat template; use an instruction-tuned model"):
        load_tokenizer(str(tmp_path / "plain"))
    with pytest.raises(ValueError, match=r"'my/model' has no chat template"):
        check_chat_template(tokenizer, "my/model")
    with pytest.raises(ValueError, match=r"model.path: no tokenizer could be loaded from"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_the_parts_of_the_split_are_its_sides_or_both() -> None:
    one, two = Prompt("a/0", []), Prompt("a/1", [])
    sets = PromptSets([one], [two], duplicates=0, too_long=0, leaks=0)
    assert (sets.part("train"), sets.part("heldout"), sets.part("all")) == ([one], [two], [one, two])
