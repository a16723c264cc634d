"""Write the generated part of docs/methods from the methods and their configs: `python -m eval.method_cards`.

It is a card at the end of each method's page, the index docs/methods/README.md, and the pictures of weights with their
numbers. `--check` writes nothing, and exits with 1 when something is stale.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from algs.introspection.gradient_weights import weights
from algs.introspection.method_facts import reads
from algs.method import PolicyMethod
from configs.reading.files import read_job
from configs.reading.load import method_from_text
from eval import method_weights
from eval.explain import DATA, Parameter, advantage, advantage_function, papers, parameters, parts
from eval.pictures import weight_panels
from plugins.kinds import find, listed

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "methods"
BEGIN = "<!-- card: generated, see eval/method_cards.py -->"
END = "<!-- /card -->"
TABLES = (
    "from rewards",
    "from given responses",
)  # of the index, each between <!-- methods NAME --> and <!-- /methods -->
PICTURES = {  # file -> what is drawn, and of which methods, by PolicyMethod.data
    "weights": (method_weights.AGAINST_RATIO, {"prompts"}),
    "margins": (method_weights.AGAINST_MARGIN, {"pairs", "labels"}),
}


def names(data: Collection[str] = tuple(DATA)) -> list[str]:
    """Return the methods with a page that learn from such data; a file in algs/ without one is its author's own."""
    return [name for name in listed("method") if page_of(name).is_file() and find("method", name).data in data]


def page_of(name: str) -> Path:
    """Return the path of the method's page."""
    return PAGES / f"{name}.md"


def texts() -> dict[Path, str]:
    """Return the text that each file should hold, without the pictures.

    Raises:
        ValueError: a page has no place for its card.
    """
    found = {page_of(name): _with_card(name) for name in names()}
    found[PAGES / "README.md"] = index()
    for file, (table, data) in PICTURES.items():
        found[PAGES / f"{file}.csv"] = method_weights.to_csv(table, method_weights.curves(table, names(data)))
    return found


def pictures(numbers: Mapping[Path, str]) -> dict[Path, str]:
    """Return the text of each picture, drawn from the numbers in its CSV file."""
    return {
        PAGES / f"{file}.svg": weight_panels(table, method_weights.from_csv(table, numbers[PAGES / f"{file}.csv"]))
        for file, (table, _) in PICTURES.items()
    }


def stale() -> list[str]:
    """Return the names of files that are not up to date. Numbers behind pictures may differ by a hundredth."""
    should = texts()
    here = {path: path.read_text(encoding="utf-8") if path.is_file() else "" for path in should}
    tables = {PAGES / f"{file}.csv": table for file, (table, _) in PICTURES.items()}
    found = [path for path in should if path not in tables and here[path] != should[path]]
    found += [path for path, table in tables.items() if not _same(table, here[path], should[path])]
    if not set(tables) & set(found):
        found += [path for path, text in pictures(here).items() if not path.is_file() or path.read_text() != text]
    return [path.name for path in found]


def _same(table: method_weights.Table, here: str, should: str) -> bool:
    drawn, wanted = method_weights.from_csv(table, here or table.head), method_weights.from_csv(table, should)
    return drawn.keys() == wanted.keys() and all(
        len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-3, abs_tol=1e-2) for x, y in zip(a, b, strict=True))
        for name in wanted
        for a, b in zip(drawn[name], wanted[name], strict=True)
    )


def _with_card(name: str) -> str:
    page = page_of(name)
    return _between(page.read_text(encoding="utf-8"), f"{BEGIN}\n", END, card(name), page.name)


def card(name: str) -> str:
    """Return the facts that the code states about a method, as Markdown."""
    method = method_from_text(name)
    cls, doc = type(method), parts(type(method))
    metrics = ", ".join(f"`method/{metric}`" for metric in weights(method).metrics) or "none of its own"
    read = ", ".join(f"`{field}`" for field in sorted(reads(method) - {"advantages"})) or "`logprobs` alone"
    lines = ["## Card", "", f"{doc.title}.", "", "```", doc.formula, "```", ""]
    lines += [f"{text}\n" for text in doc.deviations]
    lines += [
        "| | |",
        "|---|---|",
        f"| advantage | {_advantage(cls)} |" if cls.data == "prompts" else f"| learns from | {DATA[cls.data]} |",
        f"| aggregation | {_aggregation(name, cls)} |",
    ]
    lines += [f"| reads | {read} |", f"| metrics | {metrics} |", f"| relatives | {_linked(doc.relatives)} |", ""]
    return "\n".join(lines + _parameters(parameters(method)))


def _advantage(method: type[PolicyMethod]) -> str:
    function = advantage_function(method)
    first = " ".join((function.__doc__ or "").split("\n\n")[0].split()).removeprefix("Return ") if function else ""
    first = re.sub(r",? \[[SN]\]( float32)?", "", first)
    return f"`{advantage(method)}`: {_cell(first)}" if first else advantage(method)


def _aggregation(name: str, method: type[PolicyMethod]) -> str:
    path = config_path(name)
    configured = read_job(path)[0].get("objective", {}).get("aggregation") if path.is_file() else None
    differs = configured not in (None, method.aggregation)
    return f"`{method.aggregation}`" + (f" (`configs/{name}.yaml` sets `{configured}`)" if differs else "")


def config_path(name: str) -> Path:
    """Return the path of the method's example configuration."""
    return ROOT / "configs" / f"{name}.yaml"


def _parameters(found: list[Parameter]) -> list[str]:
    if not found:
        return ["No parameters.", ""]
    rows = [f"| `{p.name}` | `{p.value}` | {_cell(p.bounds)} | {_cell(p.help)} |" for p in found]
    return ["| parameter | default | bounds | what it does |", "|---|---|---|---|", *rows, ""]


def _linked(relatives: str) -> str:
    """Return the text with class names turned into links to their pages."""
    pages = {find("method", name).__name__: name for name in names()}
    pattern = re.compile(r"\b(" + "|".join(sorted(pages, key=len, reverse=True)) + r")\b(?= \()")
    return pattern.sub(lambda found: f"[{found[1]}]({pages[found[1]]}.md)", _cell(relatives))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def index() -> str:
    """Return the text of docs/methods/README.md with its tables made anew.

    Raises:
        ValueError: the page has no place for a table.
    """
    page = PAGES / "README.md"
    text = page.read_text(encoding="utf-8")
    given = [data for data in DATA if data != "prompts"]
    for table, data in zip(TABLES, (["prompts"], given), strict=True):
        begin, end = f"<!-- methods {table}: generated by python -m eval.method_cards -->\n", "<!-- /methods -->"
        text = _between(text, begin, end, f"\n{_rows(names(data))}\n", page.name)
    return text


def _between(text: str, begin: str, end: str, made: str, page: str) -> str:
    """Return the text with `made` in place of what stands between two marks."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"docs/methods/{page} has no place for its generated part; write {begin.strip()} and {end}")
    return f"{before}{begin}{made}{end}{after}"


def _rows(methods: list[str]) -> str:
    """Return a table with one line per method; all are of one kind, learning from rewards or not."""
    from_rewards = type(method_from_text(methods[0])).data == "prompts"
    rows = [f"| method | paper | the idea | {'advantage' if from_rewards else 'data'} | aggregation | config |"]
    rows.append("|---|---|---|---|---|---|")
    for name in methods:
        method = type(method_from_text(name))
        links = " ".join(f"[{link.partition('.org/')[2].removeprefix('abs/')}]({link})" for link in papers(method))
        config = f"[{name}.yaml](../../configs/{name}.yaml)" if config_path(name).is_file() else ""
        page = page_of(name).read_text(encoding="utf-8")
        row = [f"[{page.partition(chr(10))[0].removeprefix('# ')}]({name}.md)", links, _cell(idea(page))]
        of_its_kind = f"`{advantage(method)}`" if from_rewards else method.data
        rows.append(f"| {' | '.join([*row, of_its_kind, f'`{method.aggregation}`', config])} |")
    return "\n".join(rows) + "\n"


def idea(page: str) -> str:
    """Return the idea that a page begins with: its first paragraph up to the paper, in brackets, or the full stop."""
    paragraph = " ".join(page.split("\n\n")[1].split())
    return re.split(r" \([^()]*\d{4},|\. |\.$", paragraph)[0] + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 when something in docs/methods is stale")
    try:
        if parser.parse_args().check:
            if found := stale():
                print(f"stale in docs/methods: {', '.join(found)}; run: python -m eval.method_cards", file=sys.stderr)
            return bool(found)
        wanted = texts()
        for path, text in {**wanted, **pictures(wanted)}.items():
            path.write_text(text, encoding="utf-8")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {len(names())} cards, the index and the pictures in docs/methods")
    if without := sorted({*listed("method")} - {*names()}):
        print(f"without a page in docs/methods, so left out: {', '.join(without)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
