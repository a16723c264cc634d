"""docs/methods: cards, index and picture are what the code says, and the pages name only what exists."""

import ast
import re
from xml.etree import ElementTree

import pytest

from algs.introspection.gradient_weights import weights
from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig
from configs.reading.messages import dotted_keys
from eval import method_cards, method_plot, method_tests
from eval.explain import parameters
from eval.method_cards import BEGIN, PAGES
from orchestration.metrics.definitions import METRICS, definition
from plugins.from_text import built
from plugins.objective_parts import find_method

PAGED = method_cards.names()
FROM_REWARDS = method_cards.names({"prompts"})
SECTIONS = ("## Objective", "## When to use it", "## What to watch", "## As in the paper, and not", "## Card")
# parameters under which a method reports all it can
TALKATIVE = {"ppo": ["dual_clip=3"]}


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def test_nothing_is_stale():
    assert method_cards.stale() == [], "run: python -m eval.method_cards"


def test_staleness_is_seen(tmp_path, monkeypatch):
    """A word in a card or the index, a number behind the picture, a word in the picture: each is noticed."""
    for path in PAGES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(method_cards, "PAGES", tmp_path)

    def change(file: str, old: str, new: str) -> None:
        text = (tmp_path / file).read_text(encoding="utf-8")
        before, found, after = text.rpartition(old)
        assert found
        (tmp_path / file).write_text(before + new + after, encoding="utf-8")

    change("grpo.md", "ratio", "rato")
    change("README.md", "2402.03300", "2402.03301")
    change("weights.svg", "A = +1", "A = 1")
    assert method_cards.stale() == ["grpo.md", "README.md", "weights.svg"]
    change("weights.csv", "\n1,", "\n1,7")
    change("margins.csv", "\n1,", "\n1,7")
    assert method_cards.stale() == ["grpo.md", "README.md", "weights.csv", "margins.csv"]


def test_a_missing_page_or_card_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(method_cards, "PAGES", tmp_path)
    with pytest.raises(ValueError, match=r"aipo\.md is missing"):
        method_cards.written()
    (tmp_path / "aipo.md").write_text("# AIPO\n")
    with pytest.raises(ValueError, match="no place for its card"):
        method_cards.written()


def test_picture_survives_its_numbers():
    """The same numbers draw the same picture, and the table reads back as it was written."""
    drawn = [(method_plot.AGAINST_RATIO, ["grpo", "cispo"]), (method_plot.AGAINST_MARGIN, ["dpo", "ipo"])]
    for figure, names in drawn:
        curves = method_plot.curves(figure, names)
        again = method_plot.from_csv(figure, method_plot.to_csv(figure, curves))
        assert again == curves and list(curves) == names
        assert method_plot.to_svg(figure, curves) == method_plot.to_svg(figure, again)
        assert ElementTree.fromstring(method_plot.to_svg(figure, curves)).tag.endswith("svg")


def test_picture_shows_what_methods_weigh():
    """CISPO caps at 5 where GRPO has clipped to 0; IPO pulls back beyond its target of 5, DPO never; like is drawn with like."""
    figure = method_plot.AGAINST_RATIO
    curves = method_plot.curves(figure, ["grpo", "cispo", "scale_rl"])
    assert method_plot.alike(curves) == [["grpo"], ["cispo", "scale_rl"]]
    near_six = figure.points.index(6.0256)
    assert curves["cispo"][0][near_six] == 5 and curves["grpo"][0][near_six] == 0
    figure = method_plot.AGAINST_MARGIN
    curves = method_plot.curves(figure, ["dpo", "ipo"])
    assert curves["ipo"][0][figure.points.index(5)] == 0 and curves["ipo"][0][figure.points.index(6)] == -2
    assert min(curves["dpo"][0]) > 0 > max(curves["dpo"][1])


@pytest.mark.parametrize("name", PAGED)
def test_page_is_complete(name):
    """Sections in order, typeset formulas, paper, code, the command that runs it, and each parameter in the table."""
    text = page(name)
    places = [text.find(f"\n{section}\n") for section in SECTIONS]
    assert -1 not in places and places == sorted(places), SECTIONS
    by_hand = text.partition(BEGIN)[0]
    assert by_hand.count("$$") >= 2 and by_hand.count("$$") % 2 == 0
    program = "main_rl" if name in FROM_REWARDS else "main_sl"
    assert f"`python {program}.py --config configs/{name}.yaml`" in by_hand
    assert f"](../../algs/{name}.py)" in by_hand
    for parameter in parameters(built(name)):
        assert f"`algorithm.{parameter.name}`" in by_hand, parameter.name


@pytest.mark.parametrize("name", PAGED)
def test_metrics_on_the_page_exist(name):
    """Each is defined, and a method's own is one that its loss reports."""
    mine = {f"method/{metric}" for metric in weights(built(name, TALKATIVE.get(name, ()))).metrics}
    groups = "|".join(sorted({metric.split("/")[0] for metric in METRICS}))
    named = re.findall(rf"`((?:{groups})/[\w<>/]+)`", page(name))
    assert len(set(named)) >= 2
    for metric in named:
        definition(metric)
        metric = metric.replace("eval/method/", "method/")
        assert metric in METRICS or not metric.startswith(("train/", "rollout/", "critic/", "objective/", "eval/")), (
            metric
        )
        if metric.startswith("method/"):
            assert metric in mine, f"{name} does not report {metric}"


@pytest.mark.parametrize("name", PAGED)
def test_keys_on_the_page_exist(name):
    """Every dotted configuration key in the page's text is one of the schema's or of the method's parameters."""
    schema = RLConfig if name in FROM_REWARDS else SLConfig
    keys = set(dotted_keys(schema)) | {f"algorithm.{p.name}" for p in parameters(built(name))}
    blocks = "|".join({**RLConfig.model_fields, **SLConfig.model_fields})
    for key in re.findall(rf"`((?:{blocks})\.[a-z_.]+)\b", page(name)):
        assert key in keys or key in schema.model_fields or any(k.startswith(f"{key}.") for k in keys), key


def test_tests_on_a_card_are_those_of_the_files():
    """A method's own tests, those that name it elsewhere, and those that every method passes, by their docstrings."""
    card = page("rloo").partition(BEGIN)[2]
    own, about, of_all = method_tests.own("rloo"), method_tests.about("rloo"), method_tests.of_all(from_rewards=True)
    assert len(own) >= 3 and {test.path for test in own} == {"unit_tests/algs/test_rloo.py"}
    assert "unit_tests/algs/test_identities.py" in {test.path for test in about}
    assert "unit_tests/algs/test_invariance.py" in {test.path for test in of_all}
    assert all(f"- {test.says}" in card for test in [*own, *about, *of_all])
    of_given = page("dpo").partition(BEGIN)[2]
    for test in of_all:
        assert (f"- {test.says}" in of_given) == (not test.from_rewards)
    assert find_method("dpo").data == "pairs" and any(test.from_rewards for test in of_all)
    of_others = [test for test in method_tests.about("p3o") if "rloo" not in test.words]
    assert of_others and not [test for test in of_others if test.says in card]


SOURCE = """
LIST = ["aipo", "ppo"]

@pytest.mark.parametrize("name", NAMES)
def test_one(name):
    'Says\\n    this.\\n\\n    Not this.'

@pytest.mark.parametrize("grpo", [*LIST, "gspo"])
@given(st.sampled_from(["p3o"]))
def test_two_things(grpo):
    make("rloo")

@pytest.mark.parametrize("name", LIST[:1])
def test_three(name):
    pass

METHODS = [name for name in algorithm.listed()]
LEARNS = [name for name in METHODS if algorithm.listed()[name].has_advantages]
CASES = [(name, mode) for name in METHODS for mode in MODES]

@pytest.mark.parametrize("case", range(len(CASES)))
def test_four(case):
    pass

@pytest.mark.parametrize("name", LEARNS)
def test_five(name):
    pass

def helper():
    make("cispo")
"""


def test_tests_are_read_off_their_syntax():
    """Names in the body, in the parameters and in lists they are made of count; a slice's content is not guessed."""
    one, two, three, four, five = method_tests._tests(ast.parse(SOURCE), "unit_tests/test_x.py")
    assert (one.says, one.every_method) == ("Says this.", True)
    assert (two.says, two.every_method) == ("two things", False)
    assert two.words == {"aipo", "ppo", "gspo", "p3o", "rloo"}
    assert three.words == set() and four.every_method and not three.every_method
    assert [test.from_rewards for test in (one, four, five)] == [False, False, True] and five.every_method
