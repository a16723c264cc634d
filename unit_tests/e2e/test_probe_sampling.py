"""Engines and trainer are compared on short continuations of the whole distribution, whatever a job samples from."""

from __future__ import annotations

import pytest

from orchestration.rl.weight_probe import ProbeFailed
from unit_tests.e2e.shared_stack import SharedStack

pytestmark = pytest.mark.e2e
TOKENS = 3


def test_a_truncated_distribution_does_not_fail_the_probe(stack: SharedStack) -> None:
    block = {"rollout": {"top_p": 0.3, "top_k": 2}, "sync": {"probe_tokens": TOKENS, "probe_prompts": 6}}
    with stack.job(block) as job:
        job.probe_weights()
        assert job.tally.means()["sync/probe_gap_max"] < 1e-3
        found = job.rollouts.probe(job.probes, job.probe_sampling, 0)
        assert max(len(t.token_ids) for t in found) == TOKENS and len(found) == 6
        with pytest.raises(ProbeFailed):  # the job's own sampling would
            job.weights.probe_weights(job.version, job.probes, job.sampling)
