"""Engines and trainer are compared on short continuations of the whole distribution, whatever a job samples from."""

from __future__ import annotations

import pytest

from orchestration.rl import driver
from orchestration.rl.weight_probe import ProbeFailed, probe_sampling
from rollouts.vllm.sampling import Sampling
from unit_tests.e2e.shared_stack import SharedStack

pytestmark = pytest.mark.e2e
TOKENS = 3


def test_a_truncated_distribution_does_not_fail_the_probe(stack: SharedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a probe that samples as the job does, and fails where that cuts the distribution."""
    block = {"rollout": {"top_p": 0.3, "top_k": 2}, "sync": {"probe_tokens": TOKENS, "probe_prompts": 6}}
    with stack.job(block) as job:
        job.probe()
        assert job.driver.tally.means()["sync/probe_gap_max"] < 1e-3
        continuations = job.pool.probe(job.prompts.train[:6], probe_sampling(job.config), 0)
        assert max(len(t.token_ids) for t in continuations) == TOKENS and len(continuations) == 6
        monkeypatch.setattr(driver, "probe_sampling", lambda config: Sampling.of_rollout(config.rollout, run_seed=0))
        with pytest.raises(ProbeFailed):  # by the job's own sampling
            job.probe()
