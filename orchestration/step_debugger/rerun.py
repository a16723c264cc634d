"""Run a captured update again, in this process alone, and compute its gradient."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from algs.introspection.method_facts import reads
from algs.method import PolicyMethod
from algs.records import PolicyTokens, TokenLoss
from configs.blocks.objective import Objective
from orchestration.cluster.devices import environment_for_trainer, free_port, resolve
from orchestration.step_debugger.loaded_step import LoadedStep
from orchestration.trainer.resume_state import Counters
from orchestration.trainer.token_objective import TokenObjective

if TYPE_CHECKING:
    from orchestration.metrics.tally import Tally

Gradient = dict[str, Tensor]  # by parameter name, float32


@dataclass(frozen=True)
class Compared:
    """A metric of the live update and of its rerun. A value is None where the metric is absent."""

    name: str
    live: float | None
    rerun: float | None

    @property
    def is_equal(self) -> bool:
        """Return whether both values are equal to the last bit; NaN equals NaN."""
        if self.live is None or self.rerun is None:
            return self.live is self.rerun
        return self.live == self.rerun or (math.isnan(self.live) and math.isnan(self.rerun))

    @property
    def relative_difference(self) -> float:
        """Return |live - rerun| divided by the larger of the two; Inf when only one of them is finite or present."""
        if self.is_equal:
            return 0.0
        live, rerun = self.live, self.rerun
        if live is None or rerun is None or not (math.isfinite(live) and math.isfinite(rerun)):
            return math.inf
        return abs(live - rerun) / max(abs(live), abs(rerun))


@dataclass(frozen=True)
class Rerun:
    """A captured update that ran again."""

    captured: LoadedStep
    device: str
    objective: TokenObjective
    metrics: list[Compared]
    tokens: list[PolicyTokens]  # the input of the loss for each of captured.batches, without gradient

    @property
    def differing(self) -> list[Compared]:
        return [metric for metric in self.metrics if not metric.is_equal]

    @property
    def must_be_equal(self) -> bool:
        """Return whether no difference is allowed: one rank, and a CPU both times. A GPU adds in no fixed order."""
        return len(self.captured.parts) == 1 and self.captured.parts[0].device == self.device == "cpu"


class RecordingObjective(TokenObjective):
    """An objective that records the input of the loss for each micro-batch."""

    def __init__(self, method: PolicyMethod, objective: Objective) -> None:
        super().__init__(method, objective)
        self.inputs: list[PolicyTokens] = []

    def __call__(self, t: PolicyTokens) -> TokenLoss:
        self.inputs.append(detached(t))
        return super().__call__(t)


def detached(t: PolicyTokens) -> PolicyTokens:
    values = None if t.values is None else t.values.detach()
    return dataclasses.replace(t, logprobs=t.logprobs.detach(), entropy=t.entropy.detach(), values=values)


def rerun(captured: LoadedStep, device: str | None = None) -> Rerun:
    """Run the captured update once more, with the same weights, micro-batches, learning rate and threads.

    The parts of all ranks run one after the other. No reference model is loaded, since its log-probabilities are in the
    micro-batches. The optimizer's state is not captured, so the weights after the update mean nothing, but loss,
    gradient and their metrics do not depend on it.
    """
    live = captured.parts[0]
    spec = resolve(device or captured.settings.model.device)
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
        **environment_for_trainer(spec.device, live.threads),
    )  # fmt: skip
    torch.set_num_threads(live.threads)
    from orchestration.trainer.trainer import Trainer  # DeepSpeed reads the environment as it is imported

    trainer = Trainer(captured.settings, captured.method, spec, with_reference=False)
    trainer.weights.load_value_parameters(captured.values())
    trainer.counters = Counters(live.steps_done, live.updates_done)
    objective = trainer.objective
    trainer.objective = recording = RecordingObjective(captured.method, captured.settings.objective)
    tally = trainer.update(captured.batches)
    metrics = compare_metrics(captured.live, tally, ranks=len(captured.parts))
    return Rerun(captured, spec.device, objective, metrics, recording.inputs)


def compare_metrics(live: Tally, again: Tally, ranks: int) -> list[Compared]:
    """Return every metric of both, loss and gradient norm first.

    With several ranks, metrics that count forward passes are left out, because dummies and packing count in them.
    """
    old, new = live.means(), again.means()
    counts = () if ranks == 1 else ("train/micro_batches", "train/tokens")
    names = [name for name in dict.fromkeys([*old, *new]) if name not in counts]
    first = ("train/loss", "train/gradient_norm", "critic/loss", "critic/gradient_norm")
    names.sort(key=lambda name: first.index(name) if name in first else len(first))
    return [Compared(name, old.get(name), new.get(name)) for name in names]


def under_method(method: PolicyMethod, run: Rerun) -> tuple[TokenObjective, list[PolicyTokens], list[str]]:
    """Put another method on the same batch; return its objective, the input of its loss, and notes for the reader.

    Raises:
        ValueError: the method needs numbers that the step did not have.
    """
    name, live = type(method).__name__, run.captured.settings.objective
    for need, what in (("values", "a critic's values"), ("ref_logprobs", "log-probabilities of the reference")):
        if need in method.needs() and any(getattr(t, need) is None for t in run.tokens):
            raise ValueError(
                f"{name} needs {what}, which the captured step does not have: it ran "
                f"{type(run.captured.method).__name__} without them; capture a step of a run that has them"
            )
    notes = ["Advantages and the weights of the aggregation are the live step's, so only the loss differs."]
    if live.corrections and "behavior_logprobs" in reads(method):
        live = live.model_copy(update={"corrections": []})
        notes.append(f"{name} reads mu itself, so the step's off-policy corrections are left out for it.")
    sums: dict[str, Tensor] = {}
    for t in run.tokens:
        for key, values in method.update_sums(t).items():
            sums[key] = sums.get(key, 0.0) + values.double().sum()
    sums = {key: value.float() for key, value in sums.items()}
    return TokenObjective(method, live), [dataclasses.replace(t, update_sums=sums) for t in run.tokens], notes


def gradients(run: Rerun, variants: Sequence[tuple[TokenObjective, Sequence[PolicyTokens]]]) -> list[Gradient]:
    """Return the whole gradient of the policy loss under each objective, from the same forward passes.

    DeepSpeed is not used, and a critic's loss is not included. Gradients of micro-batches add up in float32.
    """
    from orchestration.model.policy_model import load_policy
    from orchestration.model.prepared_batch import to_device

    settings, spec = run.captured.settings, resolve(run.device)
    device = torch.device(spec.device)
    policy = load_policy(settings.model, spec, lora=settings.lora, longest=settings.longest).train()
    policy.to(device=device, dtype=getattr(torch, settings.model.dtype))
    parameters = {name: p for name, p in policy.hf_model.named_parameters() if p.requires_grad}
    sums = [{name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()} for _ in variants]
    for index, batch in enumerate(run.captured.batches):
        prepared = to_device(batch, device)
        logprobs, entropy = policy(prepared, settings.temperature)
        for total, (objective, tokens) in zip(sums, variants, strict=True):
            answer = objective(dataclasses.replace(tokens[index], logprobs=logprobs, entropy=entropy))
            loss = (answer.loss * prepared.loss_weights).sum()
            if loss.requires_grad:
                parts = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
                for name, gradient in zip(parameters, parts, strict=True):
                    if gradient is not None:
                        total[name] += gradient.float()
    return sums


def cosine(a: Gradient, b: Gradient) -> float:
    """Return the cosine of the angle between two whole gradients; NaN when one of them is 0."""
    dot = sum(float((a[name].double() * b[name].double()).sum()) for name in a)
    size = norm(a) * norm(b)
    return dot / size if size else math.nan


def norm(gradient: Gradient) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
