"""docs/methods: cards, index and picture are what the code says, and the pages name only what exists."""

import re

import pytest

from algs.introspection.gradient_weights import weights
from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig
from configs.reading.load import method_from_text
from configs.reading.messages import dotted_keys
from eval import method_cards, method_weights
from eval.explain import parameters
from eval.method_cards import BEGIN, PAGES
from orchestration.metrics.definitions import METRICS, definition

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


def test_a_page_without_a_card_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(method_cards, "PAGES", tmp_path)
    (tmp_path / "aipo.md").write_text("# AIPO\n")
    with pytest.raises(ValueError, match="no place for its generated part"):
        method_cards.texts()


def test_numbers_survive_their_file():
    drawn = [(method_weights.AGAINST_RATIO, ["grpo", "cispo"]), (method_weights.AGAINST_MARGIN, ["dpo", "ipo"])]
    for table, names in drawn:
        curves = method_weights.curves(table, names)
        again = method_weights.from_csv(table, method_weights.to_csv(table, curves))
        assert again == curves and list(curves) == names


def test_numbers_show_what_methods_weigh():
    """CISPO caps at 5 where GRPO has clipped to 0; IPO pulls back beyond its target of 5, DPO never; like is drawn with like."""
    table = method_weights.AGAINST_RATIO
    curves = method_weights.curves(table, ["grpo", "cispo", "scale_rl"])
    assert method_weights.alike(curves) == [["grpo"], ["cispo", "scale_rl"]]
    near_six = table.points.index(6.0256)
    assert curves["cispo"][0][near_six] == 5 and curves["grpo"][0][near_six] == 0
    table = method_weights.AGAINST_MARGIN
    curves = method_weights.curves(table, ["dpo", "ipo"])
    assert curves["ipo"][0][table.points.index(5)] == 0 and curves["ipo"][0][table.points.index(6)] == -2
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
    for parameter in parameters(method_from_text(name)):
        assert f"`algorithm.{parameter.name}`" in by_hand, parameter.name


@pytest.mark.parametrize("name", PAGED)
def test_metrics_on_the_page_exist(name):
    """Each is defined, and a method's own is one that its loss reports."""
    mine = {f"method/{metric}" for metric in weights(method_from_text(name, TALKATIVE.get(name, ()))).metrics}
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
    keys = set(dotted_keys(schema)) | {f"algorithm.{p.name}" for p in parameters(method_from_text(name))}
    blocks = "|".join({**RLConfig.model_fields, **SLConfig.model_fields})
    for key in re.findall(rf"`((?:{blocks})\.[a-z_.]+)\b", page(name)):
        assert key in keys or key in schema.model_fields or any(k.startswith(f"{key}.") for k in keys), key
