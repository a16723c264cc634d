"""From groups to micro-batches: what is in the baseline, what is trained on, what is left out."""

import numpy as np
import pytest
import torch

from algs.grpo import GRPO
from algs.ppo import PPO
from algs.sft import SFT
from configs.blocks.rl import RLConfig
from configs.blocks.schedule import Schedule
from configs.reading.load import checked
from data_feeds.responses import Responses
from orchestration.metrics.rollouts import RewardFailures, refuse_failed_rewards, rollout_tally
from orchestration.trainer.rl_batches import advantages_of, counted, groups_of, prepare_updates
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group, Prompt, Trajectory


def config(objective=None, **train) -> RLConfig:
    return checked(
        RLConfig.model_validate(
            {
                "model": {"path": "x"},
                "data": {"sources": [{"reasoning_gym": "chain_sum"}]},
                "algorithm": {"name": "grpo"},
                "objective": {"aggregation": "token_mean", **(objective or {})},
                "rollout": {"prompts_per_step": 4, "responses_per_prompt": 4, "max_new_tokens": 8},
                "reward": {"parts": [{"function": "ended"}]},
                "train": train,
            }
        )
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


def nothing_recomputed(trajectories, names):
    raise AssertionError(f"{names} should not be asked for")


def zeros_recomputed(trajectories, names):
    found = {name: [np.zeros(t.action_tokens, np.float32) for t in trajectories] for name in names}
    return {
        **found,
        **({"final_values": [np.zeros(1, np.float32) for _ in trajectories]} if "old_values" in names else {}),
    }


def advantages(groups, method=None, **objective) -> list[float]:
    """The advantage of each trajectory's first token."""
    members, made = counted(groups), config(objective)
    responses = Responses([t for own in members for t in own])
    columns = responses.columns(0)
    seen = groups_of(responses, torch.tensor([len(own) for own in members]), columns, None, made.objective.kl)
    found = advantages_of(seen, columns["behavior_logprobs"], method or GRPO(GRPO.Params()), made)
    return [float(values[0]) for values in responses.split(found)]


def updates_of(groups, made, version, recompute):
    return prepare_updates(groups, TokenObjective(GRPO(GRPO.Params()), made.objective), made, version, recompute)


def trained(update) -> list[int]:
    return sorted(int(i) for rank in update for batch in rank for i in batch.trajectory_index if i >= 0)


def test_a_failed_score_is_in_neither_baseline_nor_loss():
    groups = [group(0, [1.0, 0.0, None, 0.0])]
    assert [[t.reward for t in own] for own in counted(groups)] == [[1.0, 0.0, 0.0]]
    assert advantages(groups) == advantages([group(0, [1.0, 0.0, 0.0])])
    assert groups[0].trajectories[2].advantage is None
    updates, tally = updates_of(groups, config(), 0, nothing_recomputed)
    assert trained(updates[0]) == [0, 1, 2]
    assert sum(b.loss_weights.sum() for b in updates[0][0]) == pytest.approx(1.0)  # the denominator knows three only
    assert tally.means()["train/trajectories"] == 3


def test_a_dropped_response_leaves_the_loss_and_the_denominator_and_the_baseline_only_if_told():
    for in_baseline, expected in ((True, [1.5, -0.5, -0.5]), (False, [0.7071, -0.7071])):
        groups = [group(0, [1.0, 0.0, 0.0, 0.0] if in_baseline else [1.0, 0.0, 0.0])]
        left_out = groups[0].trajectories[-1]
        left_out.dropped_by, left_out.in_baseline = "overlong", in_baseline
        updates, _ = updates_of(groups, config(), 0, nothing_recomputed)
        (batch,) = updates[0][0]
        assert batch.columns["advantages"][::3] == pytest.approx(expected, abs=1e-3)
        assert batch.loss_weights.sum() == pytest.approx(1.0)
        assert trained(updates[0]) == list(range(len(expected)))


def test_groups_without_variance_are_left_out_but_stay_in_the_denominator():
    groups = [group(0, [1.0, 0.0]), group(1, [1.0, 1.0]), group(2, [0.0, 0.0])]
    updates, tally = updates_of(groups, config(), 0, nothing_recomputed)
    assert trained(updates[0]) == [0, 1]
    assert sum(b.loss_weights.sum() for b in updates[0][0]) == pytest.approx(1 / 3)
    kept, _ = updates_of(groups, config(drop_zero_variance_groups=False), 0, nothing_recomputed)
    assert trained(kept[0]) == list(range(6))
    with_kl, _ = updates_of(groups, config({"kl": {"coef": 0.1}}), 0, zeros_recomputed)
    assert trained(with_kl[0]) == list(range(6)), "a KL term acts on every token"
    with_entropy, _ = updates_of(groups, config({"entropy_coef": 0.1}), 0, nothing_recomputed)
    assert trained(with_entropy[0]) == list(range(6)), "an entropy bonus acts on every token"
    assert tally.means()["train/trajectories"] == 2


def test_an_update_without_any_signal_is_left_out_and_counted():
    groups = [group(0, [1.0, 1.0]), group(1, [0.0, 1.0])]
    updates, tally = updates_of(groups, config(updates_per_step=2), 0, zeros_recomputed)
    assert len(updates) == 1
    assert tally.means()["train/empty_updates"] == 1
    nothing, _ = updates_of([group(0, [None, None])], config(), 0, nothing_recomputed)
    assert nothing == []


@pytest.mark.parametrize("advantage", ["lite_ppo", "scale_rl", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_step_is_normalised_as_a_whole_however_many_updates_it_has(advantage):
    """Groups of spreads 0.1, 10, 0.5 and 3: with a mean or spread of each update's own, advantages would differ."""
    pay = [[0.0, 0.1], [0.0, 10.0], [0.5, 1.0], [2.0, 5.0]]
    by_updates = []
    for updates_per_step in (1, 2, 4):
        groups = [group(number, rewards) for number, rewards in enumerate(pay)]
        left_out = group(4, [100.0, 0.0])  # a filter left it out whole: it is in no mean and no spread
        for t in left_out.trajectories:
            t.dropped_by = "a_filter"
        made = config({"advantage": advantage}, updates_per_step=updates_per_step)
        updates, tally = updates_of([*groups, left_out], made, 0, zeros_recomputed)
        assert len(updates) == updates_per_step and tally.means()["train/trajectories"] == 8
        by_updates.append([t.advantage for g in groups for t in g.trajectories])
        assert all(sum(b.loss_weights.sum() for b in ranks[0]) == pytest.approx(1.0) for ranks in updates)
        packed = [a for ranks in updates for batch in ranks[0] for a in batch.columns["advantages"][::3]]
        assert sorted(packed) == pytest.approx(sorted(by_updates[0]))
    assert by_updates[1] == by_updates[0] and by_updates[2] == by_updates[0]


def test_ppo_whitens_over_the_step_and_judges_its_critic_over_it():
    def prepared(updates_per_step):
        groups = [group(number, [0.0, 1.0 + 3 * number]) for number in range(4)]
        made, method = config(updates_per_step=updates_per_step), PPO(PPO.Params())
        objective = TokenObjective(method, made.objective)
        updates, tally = prepare_updates(groups, objective, made, 0, zeros_recomputed)
        returns = np.concatenate([b.columns["returns"] for ranks in updates for b in ranks[0]])
        return [t.advantage for g in groups for t in g.trajectories], sorted(returns), tally.means()

    (one, returns, means), (four, as_returns, as_means) = prepared(1), prepared(4)
    assert four == one and as_returns == returns
    for name in ("critic/explained_variance", "critic/value_mean"):
        assert as_means[name] == pytest.approx(means[name])


def passes(updates_per_step, passes_per_batch, seed=0, version=3):
    asked = []

    def recomputed(trajectories, names):
        asked.append(names)
        return zeros_recomputed(trajectories, names)

    made = config(updates_per_step=updates_per_step, passes_per_batch=passes_per_batch)
    made = made.model_copy(update={"run": made.run.model_copy(update={"seed": seed})})
    updates, tally = updates_of([group(number, [0.0, 1.0]) for number in range(8)], made, version, recomputed)
    return updates, tally.means(), asked


def test_passes_over_a_batch_begin_from_one_pi_old_and_one_advantage():
    updates, means, asked = passes(updates_per_step=1, passes_per_batch=3)
    assert asked == [("old_logprobs",)], "once, with the weights at the start of the step"
    assert len(updates) == 3 and means["train/empty_updates"] == 0
    assert updates[1] == updates[0] and updates[2] == updates[0]
    assert means["train/trajectories"] == 16, "a response that is gone over three times is one response"


def test_later_passes_divide_the_groups_anew_by_the_seed():
    updates, means, _ = passes(updates_per_step=4, passes_per_batch=3)
    parts = [trained(update) for update in updates]
    assert len(parts) == 12 and means["train/trajectories"] == 16
    for number in range(3):
        own = parts[4 * number : 4 * number + 4]
        assert sorted(i for part in own for i in part) == list(range(16)), "each response once in every pass"
        assert all(len(part) == 4 and part[0] + 1 == part[1] and part[2] + 1 == part[3] for part in own), "whole groups"
    assert (
        parts[:4]
        == [trained(update) for update in passes(4, 1)[0]]
        == [list(range(4 * n, 4 * n + 4)) for n in range(4)]
    )
    assert parts[4:8] != parts[:4] != parts[8:] != parts[4:8]
    assert parts == [trained(update) for update in passes(4, 3)[0]]
    for other in (passes(4, 3, seed=1)[0], passes(4, 3, version=4)[0]):
        assert parts != [trained(update) for update in other]


def test_a_kl_penalty_in_the_reward_is_a_sum_over_the_response():
    groups = [group(0, [1.0, 0.0, 0.5])]

    def recomputed(trajectories, names):
        assert set(names) == {"old_logprobs", "ref_logprobs"}
        old = [np.array([-1.0, -2.0, -0.5], np.float32) for _ in trajectories]
        return {"old_logprobs": old, "ref_logprobs": [x - 0.1 * (i + 1) for i, x in enumerate(old)]}

    made = config({"advantage": "group_mean", "kl": {"coef": 0.5, "estimator": "k1", "placement": "reward"}})
    updates, _ = updates_of(groups, made, 0, recomputed)
    rewards = np.array([1.0 - 0.15, 0.0 - 0.30, 0.5 - 0.45])  # R - 0.5 * 3 tokens * 0.1 (i + 1)
    (batch,) = updates[0][0]
    assert batch.columns["advantages"][::3] == pytest.approx(rewards - rewards.mean(), abs=1e-6)


def test_a_kl_penalty_in_the_reward_is_of_the_tokens_that_follow_under_rloo():
    def recomputed(trajectories, names):
        old = [np.array([-1.0, -2.0, -0.5], np.float32) for _ in trajectories]
        return {"old_logprobs": old, "ref_logprobs": [x - 0.1 * (i + 1) for i, x in enumerate(old)]}

    made = config({"advantage": "rloo", "kl": {"coef": 0.5, "placement": "reward"}})
    updates, _ = updates_of([group(0, [1.0, 0.0])], made, 0, recomputed)
    (batch,) = updates[0][0]
    own, other = np.array([0.85, 0.9, 0.95]), np.array([-0.3, -0.2, -0.1])  # rewards from each token on
    assert batch.columns["advantages"] == pytest.approx([*own - other[0], *other - own[0]], abs=1e-6)


def test_rejected_tokens_leave_the_denominator_when_told():
    groups = [group(0, [1.0, 0.0])]

    def recomputed(trajectories, names):
        assert names == ("old_logprobs",)
        return {"old_logprobs": [np.array([-1.0, -1.0, -9.0], np.float32), np.full(3, -1.0, np.float32)]}

    def total(rejected, ask):
        correction = {"function": "token_mask", "params": {"low": 0.5, "high": 2.0}}
        made = config({"corrections": [correction], "rejected_tokens": rejected})
        updates, _ = updates_of(groups, made, 0, ask)
        return updates[0][0][0].loss_weights

    assert total("stay", nothing_recomputed) == pytest.approx([1 / 6] * 6)
    assert total("leave", recomputed) == pytest.approx([1 / 5] * 6)


def test_a_reward_that_is_not_finite_shows_in_the_advantages():
    for reward in (float("nan"), float("inf")):
        found = advantages([group(0, [reward, 0.0, 1.0]), group(1, [1.0, 0.0])])
        assert np.isnan(found[0])
        assert np.isfinite(found[3:]).all()
        updates, _ = updates_of([group(0, [reward] * 2)], config(), 0, nothing_recomputed)
        assert trained(updates[0]) == [0, 1], "a group of nothing but NaN must not pass for one without variance"


def test_an_engines_log_probability_that_is_not_finite_shows_in_the_advantages():
    groups = [group(0, [1.0, 0.0])]
    groups[0].trajectories[1].behavior_logprobs[2] = float("nan")
    updates, _ = updates_of(groups, config({"corrections": ["token_mask"]}), 0, nothing_recomputed)
    (batch,) = updates[0][0]
    assert np.isnan(batch.columns["advantages"]).tolist() == [False] * 5 + [True]


class TooShort(GRPO):
    def advantages(self, groups):
        return torch.zeros(1)


def test_an_advantage_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="gave 1 numbers for 2 responses of 6 action tokens"):
        advantages([group(0, [0.0, 1.0])], TooShort(GRPO.Params()))


def test_what_is_frozen_before_the_first_update_follows_from_the_objective():
    def names(objective, method=None, updates=1):
        return set(
            TokenObjective(method or GRPO(GRPO.Params()), config(objective).objective).recomputed_columns(updates)
        )

    assert names({}) == set()
    assert names({}, updates=2) == {"old_logprobs"}
    assert names({"old_logprobs": "engine"}, updates=2) == set()
    assert names({"kl": {"coef": 0.1}}) == {"ref_logprobs"}
    assert names({"advantage": "rloo", "kl": {"coef": 0.1, "placement": "reward"}}) == {"ref_logprobs", "old_logprobs"}
    assert names({"corrections": ["token_truncate"]}) == set()
    assert names({}, method=SFT(SFT.Params()), updates=2) == set(), "a loss without a ratio needs no pi_old"


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


def test_ages_are_of_the_tokens_in_the_forward_pass_by_one_definition():
    groups = [group(n, [1.0, 0.0] if n < 3 else [1.0, 1.0], tokens=2 + n) for n in range(4)]
    for g, versions in zip(groups, ([4, 4], [3, 4, 5], [2, 2, 2, 5], [1] * 5), strict=True):
        for t in g.trajectories:
            t.versions = np.array(versions, np.int32)
    for t in groups[2].trajectories:
        t.is_action = np.array([False, True, True, True])  # an observation has no age
    schedule = Schedule(mode="overlap", max_staleness=2, replay_buffer_versions=1, replay_buffer_share=0.25)
    made = config(updates_per_step=2).model_copy(update={"schedule": schedule})
    _, tally = updates_of(groups, made, 5, zeros_recomputed)
    means = tally.means()
    ages = [1, 1, 2, 1, 0, 3, 3, 0]  # by hand; the last group is paid alike, and in no forward pass
    assert [means[f"schedule/staleness/{age}"] for age in range(4)] == [ages.count(age) / 8 for age in range(4)]
    assert means["train/staleness_mean"] == pytest.approx(sum(ages) / 8) and means["train/staleness_max"] == 3
    assert means["schedule/spanning_share"] == pytest.approx(2 / 3)


def test_in_sync_mode_every_token_is_of_the_policy_itself():
    _, tally = updates_of([group(0, [1.0, 0.0])], config(), 0, nothing_recomputed)
    means = tally.means()
    assert means["train/staleness_mean"] == means["train/staleness_max"] == 0
    assert not [name for name in means if name.startswith("schedule/")]
