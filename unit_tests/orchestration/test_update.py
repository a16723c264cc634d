"""From groups to micro-batches: what is in the baseline, what is trained on, what is left out."""

import numpy as np
import pytest
import torch

from algs.grpo import GRPO
from algs.method import MethodParams, PolicyMethod
from algs.records import PolicyTokens, TokenLoss
from algs.sft import SFT
from configs.schema import RLConfig
from orchestration.rollout_actor import RewardFailures, refuse_failed_rewards, rollout_tally
from orchestration.update import ScoredBatch, prepare_updates, silent_at_zero_advantage
from rollouts.records import Group, Prompt, Trajectory


def config(**train) -> RLConfig:
    return RLConfig.model_validate(
        {
            "model": {"path": "x"},
            "data": {"sources": [{"reasoning_gym": "chain_sum"}]},
            "algorithm": {"name": "grpo"},
            "rollout": {"prompts_per_step": 4, "responses_per_prompt": 4, "max_new_tokens": 8},
            "reward": {"parts": [{"function": "ended"}]},
            "train": train,
        }
    )


def group(number: int, rewards: list[float | None], tokens: int = 3) -> Group:
    prompt = Prompt(f"p{number}", [], source="s")
    trajectories = [
        Trajectory(
            prompt, f"g{number}", i, np.arange(1 + number, dtype=np.int32),
            token_ids=np.full(tokens, 7 + i, np.int32), behavior_logprobs=np.full(tokens, -1.0, np.float32),
            versions=np.zeros(tokens, np.int32), is_action=np.ones(tokens, np.bool_), turn=np.zeros(tokens, np.int32),
            finish_reason="stop", reward=reward, reward_error=None if reward is not None else "boom",
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return Group(f"g{number}", prompt, trajectories)


def trained(update) -> list[int]:
    return sorted(int(i) for rank in update for batch in rank for i in batch.trajectory_index if i >= 0)


def test_a_failed_score_is_in_neither_baseline_nor_loss():
    groups = [group(0, [1.0, 0.0, None, 0.0])]
    method = GRPO(GRPO.Params())
    batch = ScoredBatch.of(groups, method)
    assert [t.reward for t in batch.trajectories] == [1.0, 0.0, 0.0]
    without = ScoredBatch.of([group(0, [1.0, 0.0, 0.0])], method)
    assert torch.equal(batch.advantages, without.advantages)
    assert groups[0].trajectories[2].advantage is None
    updates, tally = prepare_updates(groups, method, config(), version=0)
    assert trained(updates[0]) == [0, 1, 2]
    assert sum(b.loss_weights.sum() for b in updates[0][0]) == pytest.approx(1.0)  # the denominator knows three only
    assert tally.means()["train/trajectories"] == 3


def test_groups_without_variance_are_left_out_but_stay_in_the_denominator():
    groups = [group(0, [1.0, 0.0]), group(1, [1.0, 1.0]), group(2, [0.0, 0.0])]
    updates, tally = prepare_updates(groups, GRPO(GRPO.Params()), config(), version=0)
    assert trained(updates[0]) == [0, 1]
    assert sum(b.loss_weights.sum() for b in updates[0][0]) == pytest.approx(1 / 3)
    kept, _ = prepare_updates(groups, GRPO(GRPO.Params()), config(drop_zero_variance_groups=False), version=0)
    assert trained(kept[0]) == list(range(6))
    with_kl, _ = prepare_updates(groups, GRPO(GRPO.Params(kl_coef=0.1)), config(), version=0)
    assert trained(with_kl[0]) == list(range(6)), "a KL term acts on every token"
    assert tally.means()["train/trajectories"] == 2


def test_an_update_without_any_signal_is_left_out_and_counted():
    groups = [group(0, [1.0, 1.0]), group(1, [0.0, 1.0])]
    updates, tally = prepare_updates(groups, GRPO(GRPO.Params()), config(updates_per_step=2), version=0)
    assert len(updates) == 1
    assert tally.means()["train/empty_updates"] == 1
    nothing, _ = prepare_updates([group(0, [None, None])], GRPO(GRPO.Params()), config(), version=0)
    assert nothing == []


def test_advantages_are_whole_group_ones_whatever_the_split():
    groups = [group(i, [float(i == 0), 1.0, 0.5, 0.0]) for i in range(4)]
    whole = ScoredBatch.of(groups, GRPO(GRPO.Params())).advantages
    split = torch.cat([ScoredBatch.of([g], GRPO(GRPO.Params())).advantages for g in groups])
    assert torch.equal(whole, split)


class EntropyBonus(PolicyMethod):
    class Params(MethodParams):
        pass

    def loss(self, t: PolicyTokens) -> TokenLoss:
        return TokenLoss(-t.advantages * t.logprobs - 0.01 * t.entropy)


@pytest.mark.parametrize(
    ("method", "silent"),
    [
        (GRPO(GRPO.Params()), True),
        (GRPO(GRPO.Params(kl_coef=0.1)), False),
        (SFT(SFT.Params()), False),
        (EntropyBonus(EntropyBonus.Params()), False),
    ],
)
def test_whether_zero_advantage_is_silent_is_asked_of_the_loss(method, silent):
    assert silent_at_zero_advantage(method) is silent


class Poisoned(GRPO):
    def advantages(self, groups):
        return torch.full_like(groups.rewards, float("nan"))


def test_a_non_finite_advantage_is_refused():
    with pytest.raises(ValueError, match=r"Poisoned\.advantages"):
        ScoredBatch.of([group(0, [0.0, 1.0])], Poisoned(GRPO.Params()))


def test_rollout_metrics_count_errors_apart_from_rewards():
    means = rollout_tally([group(0, [1.0, None, 0.0]), group(1, [1.0, 1.0])], pass_threshold=0.5).means()
    assert means["reward/mean"] == pytest.approx(0.75)
    assert means["reward/pass_rate"] == pytest.approx(0.75)
    assert means["reward/errors"] == 1
    assert means["reward/error_rate"] == pytest.approx(0.2)
    assert means["rollout/zero_variance_groups"] == 1
    assert means["rollout/tokens"] == 15
    assert means["rollout/entropy_nats"] == pytest.approx(1.0)


def test_too_many_failed_scores_stop_the_run_with_the_first_error():
    failed = group(0, [None, 1.0, 1.0, 1.0]).trajectories
    refuse_failed_rewards(failed, config().reward.model_copy(update={"max_error_rate": 0.25}))
    with pytest.raises(RewardFailures, match=r"(?s)1 of 4 .*boom") as caught:
        refuse_failed_rewards(failed, config().reward.model_copy(update={"max_error_rate": 0.2}))
    assert "reward.max_error_rate" in str(caught.value)
