"""Say in sentences what a rerun shows, for the terminal and for the page."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from algs.method import PolicyMethod
from orchestration.step_debugger.loaded_step import LoadedStep
from orchestration.step_debugger.rerun import Gradient, Rerun, cosine, gradients, norm
from orchestration.step_debugger.token_table import CLIPPED, REJECTED, TokenTable


@dataclass(frozen=True)
class Finding:
    """One sentence or two about a rerun."""

    text: str
    tone: Literal["good", "bad", "plain"] = "plain"


def title(captured: LoadedStep) -> str:
    """Return one line on the captured update: where it is from, why it was captured, and what it ran on."""
    step, model = captured.parts[0], captured.settings.model
    ranks = f"{step.ranks} rank{'s' if step.ranks > 1 else ''}"
    return (
        f"Step {step.step}, update {step.update}, {label(captured.method)}, captured because it was {captured.reason}: "
        f"{ranks} on {step.device}, {model.dtype}, ZeRO {captured.settings.train.zero_stage}, {step.threads} threads"
    )


def label(method: PolicyMethod) -> str:
    """Return a method's class and the parameters that differ from their defaults, such as CISPO(ratio_cap=2.0)."""
    fields = dataclasses.fields(method.params)
    given = {f.name: getattr(method.params, f.name) for f in fields if getattr(method.params, f.name) != f.default}
    inside = ", ".join(f"{name}={value}" for name, value in given.items())
    return type(method).__name__ + (f"({inside})" if inside else "")


def about_equality(run: Rerun) -> list[Finding]:
    """Return a finding on whether the rerun equals the live update to the last bit, and if not, whether it should."""
    live, differing = run.captured.parts[0], run.differing
    if not differing:
        text = f"All {len(run.metrics)} metrics are bit-equal to the live step's"
        if len(run.captured.parts) > 1:
            text += f", though {len(run.captured.parts)} ranks ran one after the other and sums are in another order"
        return [Finding(f"{text}.", "good")]
    worst = max(differing, key=lambda metric: metric.relative_difference)
    amount = "" if math.isinf(worst.relative_difference) else f" by {worst.relative_difference:.1e}, relatively"
    text = f"{len(differing)} of {len(run.metrics)} metrics differ from the live step's, most {worst.name}{amount}"
    if len(run.captured.parts) > 1:
        return [
            Finding(f"{text}. {len(run.captured.parts)} ranks ran one after the other, so sums are in another order.")
        ]
    if live.device != run.device:
        return [Finding(f"{text}. It ran on {live.device} and now on {run.device}.")]
    if not run.must_be_equal:
        return [Finding(f"{text}. On a GPU some sums are taken in no fixed order.")]
    return [
        Finding(
            f"NOT bit-equal: {text}. The batch or the weights were changed since, or this is another machine or "
            "another version of torch.",
            "bad",
        )
    ]


def about_nonfinite(run: Rerun, table: TokenTable) -> list[Finding]:
    """Return a finding on where the first Inf or NaN arises: its column and token, or its parameter; [] without one."""
    first = table.first_nonfinite()
    if first is not None:
        name, row = first
        where = f"response {table['trajectory'][row]}"
        if name != "reward":
            where = f"token {table['position'][row]} ({table['token'][row]!r}) of {where}"
        text = f"The first number that is not finite: {name} of {where} is {table[name][row]:g}"
        nonfinite = int(table.nonfinite(name).sum())
        text += f". The column {name} is not finite on {nonfinite} of {len(table)} tokens."
        if name == "logprob" and (weights := _nonfinite_weights(run)):
            text += f" The weights were so already before the step: {weights}."
        return [Finding(text, "bad")]
    if all(m.rerun is None or math.isfinite(m.rerun) for m in run.metrics):
        if all(m.live is None or math.isfinite(m.live) for m in run.metrics):
            return []
        return [Finding("The live step was not finite; its rerun is. What made it so is not in the batch.", "bad")]
    (gradient,) = gradients(run, [(run.objective, run.tokens)])
    bad = [name for name, values in gradient.items() if not torch.isfinite(values).all()]
    if bad:
        where = (
            f"the gradients of {len(bad)} of {len(gradient)} parameters are not, the last of these being {bad[-1]}: it "
            "arises in the backward pass"
        )
    else:
        norms = [m.name for m in run.metrics if m.rerun is not None and not math.isfinite(m.rerun)]
        where = f"so is the policy's gradient; {' and '.join(norms)} alone is not: too large to be squared and summed"
    return [Finding(f"Every number of every token is finite; {where}.", "bad")]


def _nonfinite_weights(run: Rerun) -> str:
    from safetensors.torch import load_file

    files = sorted((run.captured.folder / "policy").glob("*.safetensors"))
    bad = [name for f in files for name, values in load_file(f).items() if not torch.isfinite(values).all()]
    return ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")


def about_change(
    run: Rerun, other: PolicyMethod, table: TokenTable, both: list[Gradient], notes: list[str]
) -> list[Finding]:
    """Return findings on what another method makes of the same batch.

    `table` holds the columns of both methods, and `both` their gradients, the live method's first.
    """
    live_name, name = label(run.captured.method), label(other)
    live, now = (norm(gradient) for gradient in both)
    changed = {kind: int((table["change"] == kind).sum()) for kind in np.unique(table["change"]) if kind}
    sides = ", ".join(f"{count} {kind}" for kind, count in changed.items()) or "none"
    left_out = [int(np.isin(table[column], (CLIPPED, REJECTED)).sum()) for column in ("state", "other_state")]
    return [
        Finding(
            f"{name} in place of {live_name}: gradients of the policy loss have cosine {cosine(*both):.6g} over all "
            f"trained parameters; norm {live:.6g} under {live_name}, {now:.6g} under {name}."
        ),
        Finding(
            f"Of {len(table)} tokens that change side: {sides}. Clipped or rejected: {left_out[0]} → {left_out[1]}."
        ),
        *(Finding(note) for note in notes),
    ]
