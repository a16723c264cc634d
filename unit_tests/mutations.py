"""Seeded mutations of what users give: configurations, rows, chat templates and model folders."""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import Model, RLConfig
from configs.blocks.source import Source
from configs.blocks.supervised import SLConfig
from configs.reading import yaml_text
from configs.reading.files import read_job
from configs.reading.load import load
from data_feeds.chat.template import load_prompt_tokenizer, render_chat
from data_feeds.reading.sources import read_source
from orchestration.model.checkpoint_facts import model_facts

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))
ODD: list[Any] = [
    None, True, 0, -1, 10**30, 1e308, float("inf"), float("nan"), -0.0, "", " ", "x", "x" * 5000, "1e9999", "a.b:c", "../..",
    "\0", "\u2028", "é", [], [None], [[]], [5] * 50, {}, {"a": {}}, {"function": 5}, {"name": []}, [{"role": "user"}],
    [{"role": 5, "content": None}], [{"role": "user", "content": [None, 5]}], [{"role": "user", "content": [{"type": []}]}],
]  # fmt: skip
MARKS = "{}[]:,&*!|>'\"%#?-\n\t\0 <aé\u20280"
JINJA = (
    "{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ messages[0]['content'] + 5 }}", "{% for m in messages %}{{ m.content }}",
    "{% endfor %}", "{{ 'a' * 10 ** 14 }}", "{{ 'a'.center(-10 ** 30) }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ raise_exception('no') }}", "{{",
    "{% if messages %}", "{% endif %}", "{{ ''.__class__.__mro__ }}", "{{ range(10 ** 9) }}", "{{ bos_token * 5 }}", "text",
    "{% include 'x' %}", "{% extends messages %}", "{{ messages | map('x') | list }}", "{% set x.y = 5 %}", "{{ messages | tojson }}",
    "{{ nothing() }}", "{{ lipsum(n=99) }}", "{% generation %}", "{{ '%d' % messages }}", "{% raw %}",
)  # fmt: skip


def changed(value: Any, rng: random.Random) -> Any:
    """Return a copy of plain values with one of them, anywhere, replaced, removed, renamed or put in a list."""
    value = copy.deepcopy(value)
    holder, key = None, None
    at = value
    while isinstance(at, dict | list) and at and (holder is None or rng.random() < 0.8):
        holder, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = holder[key]
    if holder is None:
        return rng.choice(ODD)
    how = rng.random()
    if how < 0.6:
        holder[key] = rng.choice(ODD)
    elif how < 0.75:
        del holder[key]
    elif how < 0.9 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = [at, at]
    return value


def scrambled(text: str, rng: random.Random) -> str:
    """Return a text with a few characters put in, and a part taken out."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(MARKS) + text[at + rng.choice([0, 0, 1, 9]) :]
    return text


@contextmanager
def naming(text: str) -> Iterator[None]:
    """Raise AssertionError for a ValueError of the block whose message does not contain `text`."""
    try:
        yield
    except ValueError as error:
        if text not in str(error):
            raise AssertionError(f"the message does not name {text}: {error}") from error
        raise


def try_configuration(rng: random.Random, folder: Path) -> None:
    """Load a shipped configuration that was changed."""
    file = rng.choice(CONFIGS)
    raw: Any = read_job(file)[0]
    schema = EvalConfig if "train" not in raw else RLConfig if "reward" in raw else SLConfig
    for _ in range(rng.choice([1, 1, 2])):
        raw = changed(raw, rng)
    text = yaml_text.dump(raw)
    path = folder / "job.yaml"
    path.write_text(scrambled(text, rng) if rng.random() < 0.3 else text, encoding="utf-8")
    with naming(str(path)):
        load(path, schema)


def try_row(rng: random.Random, folder: Path) -> None:
    """Read a row that was changed, and render its prompt."""
    row: Any = {"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "2", "images": []}
    for _ in range(rng.randint(1, 3)):
        row = changed(row, rng)
    line = json.dumps(row)
    data = (scrambled(line, rng) if rng.random() < 0.3 else line).encode()
    path = folder / "rows.jsonl"
    if rng.random() < 0.2:
        path, data = path.with_suffix(".jsonl.gz"), gzip.compress(data)
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(3) + data[at + 3 :]
    path.write_bytes(data)
    tokenizer = load_prompt_tokenizer(str(folder / "model"))
    with naming(str(path)):
        prompts = [row.messages for row in read_source(Source(file=str(path)), 0, "data.sources.0")]
    for messages in prompts:
        render_chat(tokenizer, messages)


def try_template(rng: random.Random, folder: Path) -> None:
    """Render a conversation with a template made of odd pieces."""
    copied = _copied(folder)
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    settings["chat_template"] = "".join(rng.choice(JINJA) for _ in range(rng.randint(1, 4)))
    (copied / "tokenizer_config.json").write_text(json.dumps(settings))
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    render_chat(load_prompt_tokenizer(str(copied)), [{"role": "user", "content": "1 + 1"}])


def try_model_folder(rng: random.Random, folder: Path) -> None:
    """Look into a model folder of which one file was changed."""
    copied = _copied(folder)
    file = copied / rng.choice(["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
    if file.suffix == ".safetensors":
        data = bytearray(file.read_bytes())
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(min(len(data), 2000))] = rng.randrange(256)
        file.write_bytes(data[: rng.choice([len(data), len(data), 7, len(data) // 2])])
    else:
        text = json.dumps(changed(json.loads(file.read_text()), rng))
        file.write_text(scrambled(text, rng) if rng.random() < 0.2 else text)
    with naming("model.path: "):
        model_facts(Model(path=str(copied)))
        tokenizer = load_prompt_tokenizer(str(copied))
    render_chat(tokenizer, [{"role": "user", "content": "1 + 1"}])


def _copied(folder: Path) -> Path:
    shutil.rmtree(folder / "copy", ignore_errors=True)
    return Path(shutil.copytree(folder / "model", folder / "copy"))
