"""Learned tokens: against a second, plain writing of every family's format, and by decoding them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_feeds.chat import turn_spans
from data_feeds.chat.loss_mask import check_template, first_trained, tokenize_chat
from data_feeds.chat.template import render_chat, render_text
from data_prep.tiny_sorter import make_tokenizer
from unit_tests.data_feeds.chat.chat_families import CHATML, FAMILIES, IM, QWEN3, Family, byte_level

Messages = list[dict[str, Any]]
SINGLE = ["What is it?", "It is Paris."]
CHATS: dict[str, list[str]] = {
    "single": SINGLE,
    "several": ["What?", "It is.", "Why so?", "Because.", "well", "Paris"],
    "unicode": ["Grüße 你好", "日本 😀 Grüße", "😀", "你好 👩‍👩‍👧 ok"],
    "blanks": ["  two blanks\n", "  two blanks\n\n", "\n lines", "\n\nlines \n"],
    "empty turn": ["What?", "", "Why?", "So."],
    "empty last": ["What?", "So.", "Why?", ""],
    "user has the last word": ["What?", "It is.", "Why?"],
    "many": [t for i in range(7) for t in (f"Why {i}? ", ("\n so it is ", "", "日本 😀", "well  ")[i % 4])],
    "looks like the template": ["say <|im_end|>\n<|im_start|>assistant\nno", "well <|im_end|> [/INST] it"],
}


def chat(texts: list[str], system: str | None = None) -> Messages:
    made = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return made if system is None else [{"role": "system", "content": system}, *made]


def check(family: Family, messages: Messages) -> None:
    """Every learned token holds learned text only, every token of learned text is learned, each turn decodes to it."""
    tokenizer = family.tokenizer()
    tokens = tokenize_chat(tokenizer, messages)
    pieces = family.pieces(messages)
    text = "".join(piece for piece, _ in pieces)
    assert text == render_text(tokenizer, messages, add_generation_prompt=False), "the second writing is of this format"
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    count = len(tokens.ids)
    assert tokens.ids.tolist() == whole["input_ids"][:count], "the text is tokenised once, whole"
    is_learned = np.concatenate([np.full(len(piece), learned, dtype=bool) for piece, learned in pieces])
    for k, (start, end) in enumerate(whole["offset_mapping"]):
        solid = [is_learned[c] for c in range(start, end) if not text[c].isspace()]
        learned = k < count and tokens.is_trained[k]
        if learned:
            assert all(solid) and is_learned[start]
        else:
            assert not any(solid) and not (end > start and is_learned[start]), (
                "only blanks joined to the opening are lost"
            )
    wanted = [piece for piece, learned in pieces if learned]
    assert tokens.is_trained[-1] and len(set(tokens.turn[tokens.is_trained])) == len(wanted)
    for turn, piece in enumerate(wanted):
        decoded = tokenizer.decode(tokens.ids[tokens.is_trained & (tokens.turn == turn)], skip_special_tokens=False)
        assert piece.endswith(decoded) and piece.strip() == decoded.strip()
        assert decoded == piece or not piece[: -len(decoded)].strip()


@pytest.mark.parametrize("texts", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_only_the_assistants_turns_are_learned(family: Family, texts: list[str]) -> None:
    if family.name == "llama3":
        texts = [t.replace("assistant", "model") for t in texts]
    check_template(family.tokenizer())
    check(family, chat(texts))
    if family.takes_system:
        check(family, chat(texts, system="Be kind, 你好. "))


ragged = st.lists(st.text(st.sampled_from("ab .\n日😀>[\t"), max_size=6), min_size=2, max_size=7)


@settings(max_examples=60)
@given(ragged, st.sampled_from([f for f in FAMILIES if not f.name.startswith("smol")]))
def test_any_chat_is_masked_or_refused_for_a_token_across_the_border(texts: list[str], family: Family) -> None:
    messages = chat([t if i % 2 else t + "?" for i, t in enumerate(texts)])
    try:
        check(family, messages)
    except ValueError as error:
        if "holds text both of the template and of assistant turn" not in str(error):
            raise


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_what_comes_before_the_answer_is_what_the_engine_is_given(family: Family) -> None:
    messages = chat(["What?", "It is.", "Why so?", "Because."])
    tokens = tokenize_chat(family.tokenizer(), messages, first_trained(messages, "last_assistant"))
    before = int(np.flatnonzero(tokens.is_trained)[0])
    assert tokens.ids[:before].tolist() == render_chat(family.tokenizer(), messages[:3])
    assert set(tokens.turn[tokens.is_trained]) == {1} and tokens.is_trained[before:].all()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_long_chat_takes_a_handful_of_renderings(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = chat([t for i in range(40) for t in (f"Why {i}?", f"Because it is {i}.")])
    renderings = []

    def counted(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> str:
        renderings.append(len(messages))
        return render_text(tokenizer, messages, add_generation_prompt)

    monkeypatch.setattr(turn_spans, "render_text", counted)
    text, turns = turn_spans.find_turns(family.tokenizer(), messages)
    assert len(turns) == 40 and len(renderings) <= 12
    monkeypatch.setattr(turn_spans, "MANY_TURNS", 1000)
    assert turn_spans.find_turns(family.tokenizer(), messages) == (text, turns), "turn by turn says the same"


def test_a_turn_that_stands_differently_among_many_is_found_on_its_own() -> None:
    template = CHATML.replace("m.content +", "('' if loop.index0 != 5 else '<think></think>') + m.content +")
    tokenizer = byte_level(template, *IM)
    tokens = tokenize_chat(tokenizer, chat([t for i in range(6) for t in ("Why?", f"so {i}")]))
    decoded = [tokenizer.decode(tokens.ids[tokens.is_trained & (tokens.turn == k)]) for k in range(6)]
    assert decoded == [f"{'<think></think>' if k == 2 else ''}so {k}<|im_end|>" for k in range(6)]


def test_thoughts_that_the_template_drops_are_not_passed_over_in_silence() -> None:
    tokenizer = byte_level(QWEN3, *IM)
    thoughts = "<think>\nwell\n</think>\n\n"
    messages = chat(["What?", thoughts + "It is.", "Why?", thoughts + "So."])
    with pytest.raises(ValueError, match=r"leaves out or changes text of assistant turn 1: '<think>.*last_assistant"):
        tokenize_chat(tokenizer, messages)
    tokens = tokenize_chat(tokenizer, messages, first_trained(messages, "last_assistant"))
    assert tokenizer.decode(tokens.ids[tokens.is_trained]) == thoughts + "So.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "texts", "said"),
    [
        (CHATML.replace("assistant\\n' }}", "assistant\\n<think>' }}"), SINGLE, "opens message 2 with '<think>'"),
        (
            CHATML.replace(
                "{%- if add", "{%- if messages[-1].role == 'assistant' %}{{ '<end>' }}{% endif %}{%- if add"
            ),
            [*SINGLE, "Why?"],
            r"ends message 2 with '<\|im_end\|>\\n<end>' when it is the last one, but with '<\|im_end\|>\\n<\|im_start",
        ),
        (
            CHATML.replace("m.content", "m.content[:5]"),
            SINGLE,
            "leaves out or changes text of assistant turn 1: 'It is",
        ),
    ],
)
def test_templates_that_cannot_be_learned_from_are_refused(template: str, texts: list[str], said: str) -> None:
    tokenizer = byte_level(template, *IM)
    with pytest.raises(ValueError, match=said):
        tokenize_chat(tokenizer, chat(texts))


def test_a_template_without_an_end_token_is_refused() -> None:
    with pytest.raises(ValueError, match="puts no end-of-turn token after an assistant turn"):
        check_template(byte_level(CHATML.replace("<|im_end|>", ""), *IM))


def test_a_token_of_template_and_answer_is_refused() -> None:
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = byte_level(template, *IM)
    assert ":)" in tokenizer.get_vocab(), "the vocabulary joins the two"
    with pytest.raises(ValueError, match=r"one token, ':\)', holds text both of the template and of assistant turn 1"):
        tokenize_chat(tokenizer, chat(["What?", ")"]))


def test_chats_without_an_answer_are_refused() -> None:
    tokenizer = byte_level(CHATML, *IM)
    with pytest.raises(ValueError, match="no assistant turn"):
        first_trained(chat(["What?"]), "all_assistant")
    with pytest.raises(ValueError, match="no assistant turn to learn"):
        tokenize_chat(tokenizer, chat(["What?"]))
    with pytest.raises(ValueError, match=r"refuses messages with roles \['user', 'user', 'assistant'\]"):
        tokenize_chat(FAMILIES[4].tokenizer(), [*chat(["a"]), *chat(["b", "c"])])


def test_a_vocabulary_of_words_is_good_enough() -> None:
    tokenizer = make_tokenizer()
    check_template(tokenizer)
    tokens = tokenize_chat(tokenizer, chat(["sort 3 1", "1 3", "copy 2", "2"]))
    assert tokenizer.decode(tokens.ids[tokens.is_trained]) == "1 3 <end> 2 <end>"
    assert tokens.turn.tolist() == [0] * 8 + [1] * 6


def test_messages_that_call_tools_are_learned_whole() -> None:
    template = CHATML.replace(
        "m.content +", "(m.content or '') + ('<call>' + m.tool_calls[0] if m.tool_calls else '') +"
    )
    tokenizer = byte_level(template, *IM)
    messages = [
        *chat(["What?"]),
        {"role": "assistant", "tool_calls": ["look"]},
        {"role": "tool", "content": "it"},
        *chat(["", "So."])[1:],
    ]
    tokens = tokenize_chat(tokenizer, messages)
    assert tokenizer.decode(tokens.ids[tokens.is_trained]) == "<call>look<|im_end|>So.<|im_end|>"


def test_the_default_of_several_templates_is_used() -> None:
    tokenizer = byte_level(CHATML, *IM)
    wanted = tokenize_chat(tokenizer, chat(SINGLE))
    tokenizer.chat_template = {"default": CHATML, "tool_use": "no"}
    check_template(tokenizer)
    assert np.array_equal(tokenize_chat(tokenizer, chat(SINGLE)).ids, wanted.ids)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        is_fast, name_or_path = False, "my/slow"

    with pytest.raises(ValueError, match=r"'my/slow' gives no character offsets.*tokenizer.json"):
        tokenize_chat(Slow(), chat(SINGLE))
