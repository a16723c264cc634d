"""A method on one screen: formula, paper, parameters, what it reads and reports, and how it weighs grad log pi.

    python -m eval.explain                                        the methods there are
    python -m eval.explain cispo --set ratio_cap=2                one of ours; weights against the ratio
    python -m eval.explain dpo --set beta=0.5                     weights against the margin of a pair
    python -m eval.explain my_lab.my_loss:Mine                    your own, from the folder that holds my_lab

Everything is taken from the class docstring, from `Params`, or from the method itself, asked on made-up tokens. A
method whose answer depends on how an update is cut into micro-batches is told so, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from algs.introspection import gradient_weights
from algs.introspection.method_facts import reads
from algs.introspection.split_check import split_problem
from algs.method import PolicyMethod
from algs.parts.gae import gae
from algs.records import Groups
from configs.reading.load import method_from_text
from plugins.kinds import find, listed

DATA = {  # PolicyMethod.data in words
    "prompts": "prompts, which the policy answers, and rewards of its answers",
    "demonstrations": "given responses",
    "pairs": "pairs of a chosen and a rejected response",
    "labels": "responses that are each labelled desirable or not",
}
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
MARKS = {"Differs from": "deviations", "Relatives:": "relatives"}


@dataclasses.dataclass(frozen=True)
class Parts:
    """A class docstring taken apart. Paragraphs are one line each; the formula keeps its lines."""

    title: str  # full name and paper
    formula: str
    text: tuple[str, ...]
    deviations: tuple[str, ...]  # "Differs from the paper by: ...", and from others where it says so
    relatives: str


@dataclasses.dataclass(frozen=True)
class Parameter:
    name: str
    value: str  # in effect, as YAML has it
    bounds: str
    help: str


def parts(method: type[PolicyMethod]) -> Parts:
    """Return the docstring's parts: title line, indented formula, paragraphs, "Differs from ...", "Relatives: ..."."""
    title, *lines = inspect.cleandoc(method.__doc__ or f"{method.__name__}, without a docstring").splitlines()
    if not any(line.startswith("    ") for line in lines):
        lines = _formula_indented(lines)
    formula: list[str] = []
    paragraphs: dict[str, list[str]] = {"text": [], "deviations": [], "relatives": []}
    begins_new, kind = True, "text"
    for line in lines:
        mark = next((found for start, found in MARKS.items() if line.startswith(start)), None)
        if line.startswith("    ") and kind == "text":
            formula.append(line[4:])
            begins_new = True
        elif not line.strip():
            begins_new, kind = True, "text"
        elif mark is not None or begins_new:
            kind = mark or "text"
            paragraphs[kind].append(line.strip())
            begins_new = False
        else:
            paragraphs[kind][-1] += " " + line.strip()
    relatives = " ".join(text.removeprefix("Relatives:").strip() for text in paragraphs["relatives"])
    text, deviations = tuple(paragraphs["text"]), tuple(paragraphs["deviations"])
    return Parts(title.strip().rstrip("."), "\n".join(formula), text, deviations, relatives)


def _formula_indented(lines: list[str]) -> list[str]:
    """Put back the formula's indentation, which is lost with the docstring's when nothing stands below the formula."""
    start = next((i for i, line in enumerate(lines) if line.strip()), len(lines))
    end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    if start < end and re.match(r"\w[\w ]* = ", lines[start]):
        lines[start:end] = [f"    {line}" for line in lines[start:end]]
    return lines


def papers(method: type[PolicyMethod]) -> list[str]:
    """Return links to the papers that the docstring's title names."""
    title = parts(method).title
    found = [f"https://arxiv.org/abs/{number}" for number in re.findall(r"\b\d{4}\.\d{5}\b", title)]
    return found + [f"https://doi.org/{doi}" for doi in re.findall(r"\b10\.\d{4,}/[^\s,)]+", title)]


def parameters(method: PolicyMethod) -> list[Parameter]:
    """Return the method's parameters with the values they have here."""
    hints = get_type_hints(type(method).Params)
    rows = []
    for field in dataclasses.fields(method.params):
        bounds = [f"{sign} {field.metadata[key]:g}" for key, sign in SIGNS.items() if key in field.metadata]
        if get_origin(hints[field.name]) is Literal:
            bounds.append(" or ".join(map(_as_yaml, get_args(hints[field.name]))))
        value = _as_yaml(getattr(method.params, field.name))
        rows.append(Parameter(field.name, value, ", ".join(bounds), field.metadata.get("help", "")))
    return rows


def _as_yaml(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def advantage_function(method: type[PolicyMethod]) -> Callable[[Groups], Tensor] | None:
    """Return the function of algs/advantages.py, or GAE, that a method's advantage calls, itself or through its own
    functions; None when it calls none of them."""
    offered = {name: find("advantage", name) for name in listed("advantage")} | {"gae": gae}
    waiting, seen = ["advantages"], set()
    while waiting:
        name = waiting.pop(0)
        if name in offered:
            return offered[name]
        function = getattr(method, name, None)
        if inspect.isfunction(function) and name not in seen and function.__module__ == method.__module__:
            waiting += function.__code__.co_names
        seen.add(name)
    return None


def advantage(method: type[PolicyMethod]) -> str:
    """Return the name of the method's advantage, as objective.advantage would name it."""
    if method.advantages is PolicyMethod.advantages:
        return "none: it does not learn from rewards"
    function = advantage_function(method)
    return function.__name__ if function else f"its own ({method.__name__}.advantages)"


def explanation(name: str, method: PolicyMethod) -> str:
    """Return the whole screen, as text."""
    cls, doc, table = type(method), parts(type(method)), gradient_weights.weights(method)
    lines = [doc.title, *papers(cls), "", *(f"    {line}" for line in doc.formula.splitlines()), ""]
    for text in (*doc.text, *doc.deviations, *([f"Relatives: {doc.relatives}"] if doc.relatives else [])):
        lines += [*textwrap.wrap(text, 100, break_on_hyphens=False), ""]
    read = reads(method)
    learns = f"learns from     {DATA[cls.data]}"
    if cls.data == "prompts":
        learns = f"advantage       {advantage(cls)} (objective.advantage replaces it)"
    lines += [
        f"algorithm.name  {name}",
        learns,
        f"aggregation     {cls.aggregation} (objective.aggregation replaces it)",
        f"reads           {', '.join(sorted(read)) or 'the log-probabilities alone'}",
        f"metrics         {', '.join(f'method/{metric}' for metric in table.metrics) or 'none of its own'}",
        "",
        "Parameters" if dataclasses.fields(method.params) else "No parameters.",
    ]
    lines += [f"  {p.name} = {p.value}{f'  ({p.bounds})' if p.bounds else ''}: {p.help}" for p in parameters(method)]
    return "\n".join([*lines, "", *gradient_weights.lines(table)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", nargs="?", help="a file in algs/, or your own module:Class; none lists the methods")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter; repeatable")
    given = parser.parse_args(arguments)
    if given.method is None:
        width = max(map(len, listed("method")))
        for name in listed("method"):
            print(f"{name:<{width}}  {parts(find('method', name)).title}")
        return 0
    try:
        method = method_from_text(given.method, given.set)
        print(explanation(given.method, method))
        if problem := split_problem(given.method, method):
            raise ValueError(f"\n{problem}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
