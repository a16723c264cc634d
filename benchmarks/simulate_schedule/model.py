"""A discrete-event model of one job: engines that decode, a trainer that waits for batches, and weights between them.

Time passes only in this file's arithmetic; the real `rollouts.admission.Admission` decides which groups are requested
and which make a batch. docs/running/SIMULATION.md lists what is left out.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rollouts.admission import Admission

InFlight = Literal["recompute", "keep_cache", "drain", "abort"]


@dataclass(frozen=True)
class Costs:
    """The time that things take on one device of their side.

    An engine with n responses running decodes one token of each in decode_step_seconds + n * decode_token_seconds: its
    tokens/s grow with n and level off at 1 / decode_token_seconds.
    """

    decode_step_seconds: float
    decode_token_seconds: float
    prefill_token_seconds: float
    train_fixed_seconds: float  # of every step, on any number of devices: optimizer, and the driver's own work
    train_token_seconds: float  # of every token of the batch, prompts once a group; shared by the devices
    sync_seconds: float  # from the end of training until engines have the weights
    pause_seconds: float  # that part of it in which engines stand still
    reward_seconds: float = 0.0  # from a response's last token to its score
    switch_seconds: float = 0.0  # putting engines to sleep and waking them, per step, where both sides share devices


@dataclass(frozen=True)
class Work:
    """The work of a step. `draw` gives the response lengths of one group, in tokens."""

    batch_groups: int
    prompt_tokens: int
    draw: Callable[[np.random.Generator], list[int]]
    most_running: int = 1_000_000  # responses that an engine decodes at once (max_num_seqs)


@dataclass(frozen=True)
class Plan:
    """A split of devices and a schedule. max_staleness 0 is sync mode."""

    generators: int
    trainers: int
    max_staleness: int = 0
    in_flight: InFlight = "recompute"
    over_issue: float | None = None
    pause_while_training: bool = False


@dataclass(frozen=True)
class Outcome:
    """The figures of a plan, averaged over the steps counted."""

    seconds_per_step: float
    tokens_per_second: float  # response tokens trained on
    trainer_wait_seconds: float  # per step, for groups or for engines to drain
    engine_idle_seconds: float  # per step, with nothing to decode; mean over engines
    engine_paused_seconds: float  # per step, standing still for weights or for the trainer; mean over engines
    staleness: dict[int, float]  # share of trained tokens that are so many versions old
    trained: tuple[str, ...]  # every group, in order of training, uncounted steps included

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.seconds_per_step


def log_normal(mean: float, sigma: float, longest: int, responses: int) -> Callable[[np.random.Generator], list[int]]:
    """Return a function that draws lengths of this mean (before the cut at `longest`) and sigma (of the logarithm)."""
    mu = math.log(mean) - sigma**2 / 2

    def draw(rng: np.random.Generator) -> list[int]:
        return np.exp(rng.normal(mu, sigma, responses)).round().clip(1, longest).astype(int).tolist()

    return draw


@dataclass
class _Group:
    name: str
    lengths: list[int]
    unfinished: int
    tokens: dict[int, float] = field(default_factory=dict)  # by the version that made them


class _Engine:
    """An engine that decodes all its responses in step; `decoded` counts tokens per response since the start."""

    def __init__(self, costs: Costs, prompt_tokens: int, most_running: int) -> None:
        self.costs, self.prompt_tokens, self.most_running = costs, prompt_tokens, most_running
        self.clock = self.decoded = self.prefill_seconds = self.idle_seconds = self.paused_seconds = 0.0
        self.is_paused = self.is_held = False
        self.running: list[tuple[float, int, float, _Group]] = []  # heap: decoded at end, order, decoded at start
        self.queue: deque[tuple[_Group, int]] = deque()
        self.versions: list[int] = [0]
        self.version_starts: list[float] = [0.0]  # `decoded` at which each began
        self._count = 0
        self.next_finish = math.inf

    @property
    def load(self) -> int:
        return len(self.running) + len(self.queue)

    def _step_seconds(self) -> float:
        return self.costs.decode_step_seconds + len(self.running) * self.costs.decode_token_seconds

    def advance(self, until: float) -> None:
        """Let time pass; nothing may finish before `until`."""
        seconds, self.clock = until - self.clock, until
        if self.is_paused:
            self.paused_seconds += seconds
        elif not self.running:
            self.idle_seconds += seconds
        else:
            prefilling = min(self.prefill_seconds, seconds)
            self.prefill_seconds -= prefilling
            self.decoded += (seconds - prefilling) / self._step_seconds()

    def changed(self) -> None:
        """Begin what can begin; compute when the next response ends."""
        while self.queue and len(self.running) < self.most_running and not self.is_held:
            group, length = self.queue.popleft()
            if not group.tokens:  # the group's first: the others find the prompt in the cache
                group.tokens[self.versions[-1]] = 0.0
                self.prefill_seconds += self.prompt_tokens * self.costs.prefill_token_seconds
            heapq.heappush(self.running, (self.decoded + length, self._count, self.decoded, group))
            self._count += 1
        self.next_finish = math.inf
        if self.running and not self.is_paused:
            left = max(0.0, self.running[0][0] - self.decoded)
            self.next_finish = self.clock + self.prefill_seconds + left * self._step_seconds()

    def finish_one(self) -> _Group:
        """End the response that is next; note its tokens by version."""
        self.advance(self.next_finish)
        end, _, start, group = heapq.heappop(self.running)
        self.decoded = end
        place = bisect.bisect_right(self.version_starts, start) - 1
        while place < len(self.versions) and self.version_starts[place] < end:
            until = self.version_starts[place + 1] if place + 1 < len(self.versions) else end
            made = min(until, end) - max(self.version_starts[place], start)
            group.tokens[self.versions[place]] = group.tokens.get(self.versions[place], 0.0) + made
            place += 1
        group.unfinished -= 1
        self.changed()
        return group

    def load_weights(self, version: int, recompute: bool) -> None:
        """Continue responses under `version`. recompute: prefill prompts, once a group, and tokens so far again."""
        self.versions.append(version)
        self.version_starts.append(self.decoded)
        if recompute and self.running:
            tokens = sum(self.decoded - start for _, _, start, _ in self.running)
            prompts = len({group.name for *_, group in self.running}) * self.prompt_tokens
            self.prefill_seconds += (tokens + prompts) * self.costs.prefill_token_seconds


class Simulation:
    """One job from its first step. The same seed gives every plan the same lengths in the same order."""

    def __init__(self, costs: Costs, work: Work, plan: Plan, seed: int = 0) -> None:
        if costs.pause_seconds > costs.sync_seconds:
            raise ValueError("engines cannot pause for longer than a sync takes: pause_seconds is above sync_seconds")
        if plan.pause_while_training and plan.max_staleness == 0:
            raise ValueError(
                "pause_while_training needs max_staleness of at least 1: in sync mode engines are idle anyway"
            )
        self.costs, self.work, self.plan = costs, work, plan
        self.rng = np.random.default_rng(seed)
        self.admission = Admission(work.batch_groups, plan.max_staleness, plan.over_issue)
        self.engines = [_Engine(costs, work.prompt_tokens, work.most_running) for _ in range(plan.generators)]
        self.groups: dict[str, _Group] = {}
        self.scoring: list[tuple[float, str]] = []  # heap: when a group's last score is there
        self.clock, self.version, self.asked = 0.0, 0, 0

    def run(self, steps: int) -> Outcome:
        """Simulate `steps` steps, and more before and after, which are not counted, to fill and empty the pipeline."""
        settle = self.plan.max_staleness + 2
        self.most_asked = (steps + 2 * settle) * self.work.batch_groups
        marks: list[tuple[float, float, float]] = []  # clock, idle and paused seconds at the end of each step
        waited, tokens, staleness, trained = 0.0, 0.0, np.zeros(self.plan.max_staleness + 1), []
        for step in range(steps + 2 * settle):
            wait_seconds, batch = self._take()
            if settle <= step < settle + steps:
                waited += wait_seconds
                for group in batch:
                    for version, made in group.tokens.items():
                        staleness[self.version - version] += made
                        tokens += made
            trained += [group.name for group in batch]
            self._train(batch)
            drain_seconds = self._sync()
            waited += drain_seconds if settle <= step < settle + steps else 0.0
            marks.append((self.clock, self._mean("idle_seconds"), self._mean("paused_seconds")))
        assert self.admission.outstanding == 0
        seconds, idle, paused = (
            (end - begin) / steps for begin, end in zip(marks[settle - 1], marks[settle + steps - 1], strict=True)
        )
        return Outcome(
            seconds_per_step=seconds,
            tokens_per_second=tokens / (seconds * steps),
            trainer_wait_seconds=waited / steps,
            engine_idle_seconds=idle,
            engine_paused_seconds=paused,
            staleness={age: float(made / tokens) for age, made in enumerate(staleness)},
            trained=tuple(trained),
        )

    def _mean(self, name: str) -> float:
        for engine in self.engines:
            engine.advance(self.clock)
        return float(np.mean([getattr(engine, name) for engine in self.engines]))

    def _ask(self) -> None:
        """Request whole groups, each from the engine with the fewest responses."""
        for _ in range(min(self.admission.room(self.version), self.most_asked - self.asked)):
            lengths = self.work.draw(self.rng)
            group = _Group(f"{self.asked}", lengths, len(lengths))
            self.asked += 1
            self.groups[group.name] = group
            self.admission.submitted(group.name, self.version)
            engine = min(self.engines, key=lambda engine: engine.load)
            engine.advance(self.clock)
            engine.queue.extend((group, length) for length in lengths)
            engine.changed()

    def _next_event(self) -> float:
        return min(min(e.next_finish for e in self.engines), self.scoring[0][0] if self.scoring else math.inf)

    def _do_next_event(self) -> None:
        self.clock = self._next_event()
        if self.scoring and self.scoring[0][0] <= self.clock:
            self.admission.finished(heapq.heappop(self.scoring)[1])
            return
        engine = min(self.engines, key=lambda engine: engine.next_finish)
        group = engine.finish_one()
        if group.unfinished == 0:
            heapq.heappush(self.scoring, (self.clock + self.costs.reward_seconds, group.name))

    def _pass(self, seconds: float, paused: bool) -> None:
        """Let time pass; engines continue meanwhile, or stand still."""
        until = self.clock + seconds
        self._each(is_paused=paused)
        while self._next_event() <= until:
            self._do_next_event()
        self.clock = until
        self._each(is_paused=False)

    def _each(self, **flags: bool) -> None:
        for engine in self.engines:
            engine.advance(self.clock)
            for name, value in flags.items():
                setattr(engine, name, value)
            engine.changed()

    def _take(self) -> tuple[float, list[_Group]]:
        """Return the seconds waited for the next batch, and the batch."""
        began = self.clock
        self._ask()
        while (names := self.admission.batch(self.version)) is None:
            assert self._next_event() < math.inf, "a deadlock"
            self._do_next_event()
        return self.clock - began, [self.groups.pop(name) for name in names]

    def _train(self, batch: list[_Group]) -> None:
        self._ask()
        tokens = sum(sum(group.lengths) + self.work.prompt_tokens for group in batch)
        seconds = self.costs.train_fixed_seconds + tokens * self.costs.train_token_seconds / self.plan.trainers
        self._pass(seconds + self.costs.switch_seconds, paused=self.plan.pause_while_training)

    def _sync(self) -> float:
        """Bring the weights over; return the seconds waited until running responses had ended."""
        began = self.clock
        if self.plan.in_flight == "drain":
            self._each(is_held=True)
            while any(engine.running for engine in self.engines):
                self._do_next_event()
        waited, stands_still = self.clock - began, self.plan.pause_while_training
        self._pass(self.costs.sync_seconds - self.costs.pause_seconds, paused=stands_still)
        self._pass(self.costs.pause_seconds, paused=True)
        self.version += 1
        for engine in self.engines:
            engine.load_weights(self.version, recompute=self.plan.in_flight in ("recompute", "abort"))
        self._each(is_held=False)
        self.admission.trained(self.version)
        return waited
