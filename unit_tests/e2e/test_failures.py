"""Real processes of a run are killed and frozen: an engine is replaced and nothing is lost, a trainer rank is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from configs.blocks.schedule import Failures
from configs.reading.load import method_for, to_yaml
from orchestration.cluster.cpu_cores import core_plan
from orchestration.cluster.devices import resolve
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.cluster.watchdog import Member, TrainerLost, Waiting, Watch
from orchestration.engines.requests import step_requests
from orchestration.rl.actors import trainer_settings
from orchestration.rl.weight_sync import JOINING, WeightSync
from orchestration.run.directory import RunDirectory
from orchestration.trainer.ranks import TrainerRanks
from orchestration.trainer.recompute import recompute
from orchestration.trainer.rl_batches import prepare_updates
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group
from rollouts.vllm.sampling import Sampling
from unit_tests.e2e.shared_stack import SharedStack, variant
from unit_tests.waiting import is_alive, wait_for

pytestmark = pytest.mark.e2e

SAMPLES = 8
SAMPLING = Sampling(max_new_tokens=8, seeded=True)  # asked again, a response is the same
STALL_SECONDS = 8.0
RANKS = 2


def tokens(groups: list[Group]) -> dict[tuple[str, int], list[int]]:
    return {(g.prompt.prompt_id, t.sample): t.token_ids.tolist() for g in groups for t in g.trajectories}


def pid_of(member: Member) -> int:
    """The process of a watched actor, which has answered before."""
    assert member.heartbeat is not None
    return member.heartbeat.pid


def core_of(pid: int) -> int:
    """vLLM's process under an engine's actor."""
    (core,) = [p.pid for p in psutil.Process(pid).children(recursive=True) if "EngineCore" in p.name()]
    return core


@contextmanager
def quick_to_judge(watch: Watch) -> Iterator[None]:
    before, watch.stall_seconds = watch.stall_seconds, STALL_SECONDS
    yield
    watch.stall_seconds = before


@pytest.mark.parametrize(
    ("victim", "deadly", "said"),
    [
        variant("vLLM", signal.SIGKILL, "vLLM's process died"),
        variant("actor", signal.SIGKILL, "died"),
        variant("actor", signal.SIGSTOP, "has not answered for"),
        ("vLLM", signal.SIGSTOP, "has been in 'generate, "),
    ],
)
def test_a_lost_engine_is_replaced_and_nothing_is_lost(
    stack: SharedStack, victim: str, deadly: signal.Signals, said: str
) -> None:
    """Alone catches a vLLM that stands still and whose actor says so; the others, a death of vLLM's process that its actor does not
    tell (also test_two_engines), and one of the actor that its vLLM survives (an actor that stands still: test_engine_pool)."""
    rollouts, prompts = stack.actors.pool, stack.prompts(stack.small())[:32]
    expected = tokens(rollouts.generate(step_requests(prompts, SAMPLES, SAMPLING, 0, "undisturbed")))
    notes: list[str] = []
    rollouts.restarts_left, rollouts.note = 1, notes.append
    rollouts.tally()
    actor = pid_of(rollouts.engines[0].member)
    core = core_of(actor)
    requests = step_requests(prompts, SAMPLES, SAMPLING, 0, f"{victim}-{deadly.name}")
    rollouts.submit(requests[:16])
    groups: list[Group] = []
    while not groups:
        groups = rollouts.collect(5.0)
    os.kill(core, signal.SIGSTOP)  # in the middle of what was asked, and so that what is asked now does not get ready
    rollouts.submit(requests[16:])
    groups += rollouts.collect(2.0)
    assert len(rollouts.unfinished) >= 16
    os.kill(core if victim == "vLLM" else actor, deadly)
    with quick_to_judge(rollouts.watch):
        while rollouts.unfinished:
            groups += rollouts.collect(5.0)
    assert len(groups) == len(prompts)
    assert tokens(groups) == expected
    assert all(t.reward is not None for g in groups for t in g.trajectories)
    (note,) = notes
    for words in (said, "engine 0", str(actor)):
        assert words in note
    counted = rollouts.tally().means()
    assert counted["rollout/engine_restarts"] == 1
    assert counted["rollout/retried_groups"] >= 16
    assert not is_alive(actor)
    assert not is_alive(core)


@contextmanager
def two_ranks(stack: SharedStack, folder: Path) -> Iterator[tuple[TrainerRanks, list]]:
    """Trainer ranks of their own, and something for them to do."""
    config = stack.small()
    device, method = resolve("cpu"), method_for(config)
    run = RunDirectory.create(folder / "run", to_yaml(config))
    watch = Watch(STALL_SECONDS)
    options = [{"num_cpus": 0} for _ in range(RANKS)]
    trainers = TrainerRanks.create(
        device, run, options, core_plan(EngineJob.of_rl(config), TrainerJob.of_rl(config), device), watch
    )
    watch.wait(trainers.begin(trainer_settings(config, run), method, device, "direct", run.path / "sync"))
    requests = step_requests(stack.prompts(config)[:16], SAMPLES, SAMPLING, 1, folder.name)
    groups = stack.actors.pool.generate(requests)

    def recomputed(trajectories: list, names: Sequence[str]) -> dict:
        budget = config.train.max_tokens_per_micro_batch
        return watch.wait(recompute(trainers, trajectories, names, budget, False))

    updates, _ = prepare_updates(groups, TokenObjective(method, config.objective), config, 0, recomputed)
    assert updates
    yield trainers, updates
    trainers.abandon()


def test_a_frozen_trainer_rank_is_named_in_time(stack: SharedStack, tmp_path: Path) -> None:
    """Alone catches a trainer that gives no heartbeat while it trains: the wrong rank is named then (a killed one:
    test_commands)."""
    struck: list[float] = []
    with two_ranks(stack, tmp_path) as (trainers, updates):
        trainers.watch.wait(trainers.step(updates, 1))
        victim = trainers.members[1]

        def strike() -> None:
            if not struck and victim.heartbeat and "micro-batch" in victim.heartbeat.phase:
                struck.append(time.monotonic())
                os.kill(victim.heartbeat.pid, signal.SIGSTOP)

        with pytest.raises(TrainerLost) as lost:
            training = Waiting(trainers.watch, trainers.step(updates * 20_000, 2))
            while not training.is_over():
                strike()
        seconds = time.monotonic() - struck[0]
        pids = [pid_of(member) for member in trainers.members]
    said = str(lost.value)
    assert lost.value.name == "trainer rank 1"
    assert "train, step 2: trainer rank 1" in said and f"pid {pids[1]}" in said and "trainer rank 0 (pid" in said
    assert "has not answered for" in said and "' for" in said
    assert seconds < STALL_SECONDS + 60
    wait_for(lambda: not any(map(is_alive, pids)), "both ranks have ended")


@pytest.mark.soak
def test_a_rank_that_freezes_after_it_has_offered_a_weight_group_is_named(
    stack: SharedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches the engines being named, which cannot join the group and say so first."""
    config = stack.small().model_copy(update={"failures": Failures(stall_seconds=STALL_SECONDS)})
    config = config.model_copy(
        update={
            "sync": config.sync.model_copy(update={"method": "nccl"}),
            "schedule": config.schedule.model_copy(update={"mode": "overlap"}),
        }
    )
    with two_ranks(stack, tmp_path) as (trainers, _):
        get = trainers.watch.get

        def freeze_after_the_offer(futures: list, doing: str) -> list:
            answers = get(futures, doing)
            if doing == JOINING:
                os.kill(pid_of(trainers.members[0]), signal.SIGSTOP)
            return answers

        monkeypatch.setattr(trainers.watch, "get", freeze_after_the_offer)
        weights = WeightSync(config, trainers, stack.actors.pool, trainers.watch, print)
        with pytest.raises(TrainerLost, match=r"joining the weight group: trainer rank 0 .*has not answered for"):
            weights.push(1)
