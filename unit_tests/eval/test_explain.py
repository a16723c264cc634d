"""python -m eval.explain: the docstring taken apart, parameters set, and the table of weights."""

import re

import pytest
import torch

from algs.introspection import gradient_weights
from algs.introspection.gradient_weights import weights
from algs.method import MethodParams, PolicyMethod, param
from algs.records import Groups, PolicyTokens, TokenLoss
from configs.reading.load import method_from_text
from eval import explain
from eval.explain import advantage, explanation, parameters, parts
from plugins.kinds import find, listed

RL_METHODS = [name for name in list(listed("method")) if find("method", name).data == "prompts"]
OTHERS = sorted({*list(listed("method"))} - {*RL_METHODS})


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


@pytest.mark.parametrize("name", list(listed("method")))
def test_every_method_says_what_it_is(name):
    """A paper (a year at least), a formula with a loss, what differs from the paper, relatives that exist."""
    doc = parts(find("method", name))
    classes = {find("method", other).__name__ for other in list(listed("method"))}
    assert re.search(r"\((.+ )?\d{4}\b.*\)$", doc.title) or name == "sft", doc.title
    assert "loss" in doc.formula and "=" in doc.formula
    assert any(text.startswith("Differs from the paper by:") for text in doc.deviations)
    named = re.findall(r"(\w+) \(", doc.relatives)
    assert named and set(named) <= classes, named


def test_own_advantage_is_found_through_own_functions():
    """The first function of algs/advantages.py that is called, itself or by way of the class; else it is its own."""
    assert advantage(Doubled) == "its own (Doubled.advantages)"
    assert advantage(Inherited) == "rloo"
    assert advantage(find("method", "ppo")) == "gae"
    assert advantage(find("method", "sft")).startswith("none")


def test_a_table_holds_the_weights_at_its_points():
    """A column for each sign of the advantage, or response of a pair; sums over the step are those of the table."""
    clipped = weights(method_from_text("grpo"), (0.5, 1.0, 6.0)).curves
    assert [column.tolist() for column in clipped.values()] == [pytest.approx([0.5, 1, 0]), pytest.approx([0, -1, 0])]
    assert list(clipped) == ["A = +1", "A = -1"]
    pair = weights(method_from_text("ipo"), (0.0, 5.0, 6.0)).curves
    assert pair["chosen"].tolist() == pytest.approx([10, 0, -2]) and pair["rejected"].tolist() == pytest.approx(
        [-10, 0, 2]
    )
    assert weights(method_from_text("sft")).curves["weight"].tolist() == [1.0] * len(gradient_weights.PROBABILITIES)
    rho = torch.tensor(gradient_weights.RATIOS, dtype=torch.float64)
    ess = float(rho.sum() ** 2 / (len(rho) * rho.square().sum()))
    assert weights(method_from_text("p3o")).step_metrics == {"ess": pytest.approx(ess)}
    assert weights(method_from_text("kto")).step_metrics == {"reference_point": pytest.approx(0)}


@pytest.mark.parametrize("name", list(listed("method")))
def test_every_method_is_explained(name):
    """The screen holds its parameters, the points of the table, the aggregation, what holds of the table as a whole."""
    text = explanation(name, method_from_text(name))
    assert all(f"  {p.name} = {p.value}" in text for p in parameters(method_from_text(name)))
    kind = gradient_weights.KINDS[find("method", name).data]
    assert len(re.findall(r"^ +-?[\d.]+( +-?[\d.]+){1,2}$", text, re.MULTILINE)) == len(kind.points)
    assert ("advantage  " in text) == (name in RL_METHODS) and ("learns from  " in text) == (name in OTHERS)
    assert find("method", name).aggregation in text
    assert text.count(" over the tokens of this table: ") == len(weights(method_from_text(name)).step_metrics)


def test_an_unknown_kind_of_data_is_refused():
    """A method whose `data` is misspelt is told what there is."""
    misspelt = type("Misspelt", (Doubled,), {"data": "pair"})
    with pytest.raises(ValueError, match=r"Misspelt\.data is 'pair'; it must be one of prompts, pairs"):
        weights(misspelt(misspelt.Params()))


def test_parameters_are_set():
    """--set changes the table: the cap is the largest weight, dual clip ends the slope of punished tokens."""
    assert weights(method_from_text("cispo", ["ratio_cap=3"])).curves["A = +1"].max().item() == pytest.approx(3)
    assert weights(method_from_text("ppo", ["dual_clip=3", "whiten=false"])).curves["A = -1"].min().item() > -3
    assert method_from_text("ppo", ["vf_clip=null", "clip_high=1e-1"]).params.vf_clip is None


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("grppo", [], "did you mean grpo"),
        ("nothing_like_it", [], "ours are: aipo, cispo"),
        ("grpo", ["clip_hihg=1"], "did you mean clip_high"),
        ("grpo", ["clip_high"], "has no parameter|must be|key=value"),
        ("grpo", ["clip_high=-1"], "must be at least 0.0; given -1"),
        ("grpo", ["clip_high=abc"], "must be a number"),
        ("grpo", ["clip_high=true"], "must be a number"),
        ("gspo", ["level=word"], "must be 'sequence' or 'token'"),
        ("ppo", ["whiten=1"], "must be true or false"),
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
    assert [line.split()[0] for line in lines] == list(listed("method")) == sorted(listed("method"))
    assert {"grpo", "sft", "p3o"} <= set(listed("method")) and not {"explain", "method", "kl"} & set(listed("method"))


class TopShare(Doubled):
    """KL-Cov's mistake.

    loss = -A log pi, twice for a fifth of the micro-batch
    """

    def loss(self, t: PolicyTokens) -> TokenLoss:
        top = t.advantages >= t.advantages.quantile(0.8)
        return TokenLoss(-(1 + top.float()) * t.advantages * t.logprobs, {"top": top.float()})


def test_a_method_that_depends_on_the_split_is_refused(capsys):
    """The screen is shown, then what differs and the way out; exit code 1."""
    assert explain.main([f"{__name__}:TopShare"]) == 1
    shown = capsys.readouterr()
    assert "KL-Cov's mistake" in shown.out
    assert re.search("TopShare' depends on how an update is cut into micro-batches: .* another loss", shown.err)
    assert "update_sums()" in shown.err
