"""python -m eval.explain: the docstring taken apart, parameters set, and the table of weights."""

import math
import re

import pytest
import torch

from algs.introspection import gradient_weights
from algs.introspection.gradient_weights import weights
from algs.method import MethodParams, PolicyMethod, param
from algs.records import Groups, PolicyTokens, TokenLoss
from eval import explain
from eval.explain import advantage, explanation, parameters, parts
from plugins.from_text import built, methods
from plugins.objective_parts import find_method

RL_METHODS = [name for name in methods() if find_method(name).data == "prompts"]
OTHERS = sorted({*methods()} - {*RL_METHODS})


class Doubled(PolicyMethod):
    """Doubled REINFORCE (Nobody 2026, arXiv 2601.00001, equation 2).

        A = R
        loss = -scale
               A log pi

    One paragraph
    over two lines.

    Another.
    Differs from the paper by: everything;
    and more.
    Relatives: REINFORCE (scale 1), RLOO
    (a baseline).
    """

    class Params(MethodParams):
        scale: float = param(2.0, "Multiplies.", gt=0, le=4)
        count: int = param(1, "Counts.", ge=1)
        empty: float | None = param(None, "Nothing.")
        flag: bool = param(False, "A flag.")

    params: Params

    def advantages(self, groups: Groups) -> torch.Tensor:
        return self.centred(groups)

    def centred(self, groups: Groups) -> torch.Tensor:
        return groups.rewards

    def loss(self, t: PolicyTokens) -> TokenLoss:
        return TokenLoss(-self.params.scale * t.advantages * t.logprobs, {"seen": t.advantages})


class Inherited(Doubled):
    """One line.

    loss = 0
    """

    def centred(self, groups: Groups) -> torch.Tensor:
        from algs import advantages

        return advantages.rloo(groups)


def test_docstring_is_taken_apart():
    """Title, formula with its lines, paragraphs as one line each, deviations, relatives."""
    doc = parts(Doubled)
    assert doc.title == "Doubled REINFORCE (Nobody 2026, arXiv 2601.00001, equation 2)"
    assert doc.formula == "A = R\nloss = -scale\n       A log pi"
    assert doc.text == ("One paragraph over two lines.", "Another.")
    assert doc.deviations == ("Differs from the paper by: everything; and more.",)
    assert doc.relatives == "REINFORCE (scale 1), RLOO (a baseline)."
    assert parts(Inherited).formula == "loss = 0" and parts(Inherited).text == ()
    assert parts(type("Bare", (Doubled,), {})).title == "Bare, without a docstring"
    assert explain.papers(Doubled) == ["https://arxiv.org/abs/2601.00001"]


@pytest.mark.parametrize("name", methods())
def test_every_method_says_what_it_is(name):
    """A paper (a year at least), a formula with a loss, what differs from the paper, relatives that exist."""
    doc = parts(find_method(name))
    classes = {find_method(other).__name__ for other in methods()}
    assert re.search(r"\((.+ )?\d{4}\b.*\)$", doc.title) or name == "sft", doc.title
    assert "loss" in doc.formula and "=" in doc.formula
    assert any(text.startswith("Differs from the paper by:") for text in doc.deviations)
    named = re.findall(r"(\w+) \(", doc.relatives)
    assert named and set(named) <= classes, named


def test_own_advantage_is_found_through_own_functions():
    """The first function of algs/advantages.py that is called, itself or by way of the class; else it is its own."""
    assert advantage(Doubled) == "its own (Doubled.advantages)"
    assert advantage(Inherited) == "rloo"
    assert advantage(find_method("ppo")) == "gae"
    assert advantage(find_method("sft")).startswith("none")


def expected_weight(name: str, r: float, a: int, ess: float = 0.0) -> float:
    """By hand, from the formulas, under default parameters."""
    low, high = {"dapo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4)}.get(name, (0.8, 1.2))
    if name in ("reinforce", "rloo"):
        return a
    if name in ("cispo", "scale_rl", "aipo"):
        return min(r, 2.0 if name == "aipo" else 5.0) * a
    if name == "p3o":
        return min(r, ess) * a - (1 - ess) * r * math.log(r)
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return 4 * gate * (1 - gate) * r * a
    return 0.0 if (a > 0 and r > high + 1e-9) or (a < 0 and r < low - 1e-9) else r * a


@pytest.mark.parametrize("name", RL_METHODS)
def test_table_is_the_formula(name):
    """The weight on grad log pi at each ratio of the table, for A = +1 and -1."""
    rho = torch.tensor(gradient_weights.RATIOS, dtype=torch.float64)
    ess = float(rho.sum() ** 2 / (len(rho) * rho.square().sum()))
    table = weights(built(name))
    up, down = (table.curves[column].tolist() for column in ("A = +1", "A = -1"))
    for i, r in enumerate(table.points):
        if not (name == "dapo" and r == 1.28) and r not in (0.8, 1.2):  # on the bound itself either slope is right
            assert up[i] == pytest.approx(expected_weight(name, r, 1, ess), rel=1e-5, abs=1e-7)
            assert down[i] == pytest.approx(expected_weight(name, r, -1, ess), rel=1e-5, abs=1e-7)
    assert table.step_metrics == ({"ess": pytest.approx(ess)} if name == "p3o" else {})


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected_pair(name: str, h: float) -> tuple[float, float]:
    """Weights on the chosen (or desirable) and the rejected response by hand, under default parameters."""
    if name == "kto":  # h goes both ways in the table, so that the reference point is 0
        weight = 0.1 * sigmoid(0.1 * h) * sigmoid(-0.1 * h)
        return weight, -weight
    if name == "orpo":
        win, lose = math.exp(-1 + min(h, 0)), math.exp(-1 - max(h, 0))
        wrong = 1 - 1 / (1 + lose / (1 - lose) * (1 - win) / win)
        return 1 + 0.1 * wrong / (1 - win), -0.1 * wrong / (1 - lose)
    weight = {
        "dpo": 0.1 * sigmoid(-0.1 * h), "ipo": -2 * (h - 5), "simpo": 2 * sigmoid(1 - 2 * h), "reward_model": sigmoid(-h)
    }[name]  # fmt: skip
    return weight, -weight


@pytest.mark.parametrize("name", OTHERS)
def test_table_of_a_preference_method_is_the_formula(name):
    """Against the margin: the weight of the chosen and of the rejected response; SFT's is 1 at every probability."""
    table = weights(built(name))
    if name == "sft":
        assert table.curves["weight"].tolist() == [1.0] * len(gradient_weights.PROBABILITIES)
        return
    chosen, rejected = (curve.tolist() for curve in table.curves.values())
    for i, h in enumerate(table.points):
        assert (chosen[i], rejected[i]) == pytest.approx(expected_pair(name, h), rel=1e-4, abs=1e-6)
    assert ("margin" in table.metrics) and table.points == gradient_weights.MARGINS
    assert table.step_metrics == ({"reference_point": pytest.approx(0)} if name == "kto" else {})


@pytest.mark.parametrize("name", methods())
def test_every_method_is_explained(name):
    """The screen holds its parameters, the points of the table, the aggregation; P3O's also the table's own ESS."""
    text = explanation(name, built(name))
    assert all(f"  {p.name} = {p.value}" in text for p in parameters(built(name)))
    kind = gradient_weights.KINDS[find_method(name).data]
    assert len(re.findall(r"^ +-?[\d.]+( +-?[\d.]+){1,2}$", text, re.MULTILINE)) == len(kind.points)
    assert ("advantage  " in text) == (name in RL_METHODS) and ("learns from  " in text) == (name in OTHERS)
    assert find_method(name).aggregation in text
    assert ("ess over the tokens of this table: 0.457" in text) == (name == "p3o")


def test_an_unknown_kind_of_data_is_refused():
    """A method whose `data` is misspelt is told what there is."""
    misspelt = type("Misspelt", (Doubled,), {"data": "pair"})
    with pytest.raises(ValueError, match=r"Misspelt\.data is 'pair'; it must be one of prompts, pairs"):
        weights(misspelt(misspelt.Params()))


def test_parameters_are_set():
    """--set changes the table: the cap is the largest weight, dual clip ends the slope of punished tokens."""
    assert weights(built("cispo", ["ratio_cap=3"])).curves["A = +1"].max().item() == pytest.approx(3)
    assert weights(built("ppo", ["dual_clip=3", "whiten=false"])).curves["A = -1"].min().item() > -3
    assert built("ppo", ["vf_clip=null", "clip_high=1e-1"]).params.vf_clip is None


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("grppo", [], "did you mean grpo"),
        ("nothing_like_it", [], "there are: aipo, cispo"),
        ("grpo", ["clip_hihg=1"], "did you mean clip_high"),
        ("grpo", ["clip_high"], "has no parameter|must be|key=value"),
        ("grpo", ["clip_high=-1"], "must be >= 0"),
        ("grpo", ["clip_high=abc"], "must be float"),
        ("grpo", ["clip_high=true"], "must be float"),
        ("gspo", ["level=word"], "must be sequence or token"),
        ("ppo", ["whiten=1"], "must be bool"),
        ("cispo", ["ratio_floor=9"], "above ratio_cap"),
        ("my_lab.nowhere:Mine", [], "there is no module my_lab"),
    ],
)
def test_mistakes_are_explained(name, given, complaint, capsys):
    """Exit code 1 and one message with the way out, no traceback."""
    assert explain.main([name, *(part for item in given for part in ("--set", item))]) == 1
    assert re.search(complaint, capsys.readouterr().err)


def test_without_a_name_the_methods_are_listed(capsys):
    assert explain.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == methods() == sorted(methods())
    assert {"grpo", "sft", "p3o"} <= set(methods()) and not {"explain", "method", "kl"} & set(methods())
