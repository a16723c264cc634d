"""What stands around a method's loss."""

import dataclasses

import pytest
import torch

from algs.introspection.method_facts import made_up_tokens
from algs.parts import kl
from algs.reinforce import REINFORCE
from configs.blocks.objective import Objective
from orchestration.trainer.token_objective import TokenObjective


@pytest.mark.parametrize("importance", [None, False, True])
def test_a_kl_in_the_loss_is_weighed_by_the_policy_that_sampled_when_told(importance):
    """Also where pi_old is another policy than mu."""
    t = dataclasses.replace(made_up_tokens(), advantages=torch.zeros(16))
    penalty = {"coef": 0.1, "importance": importance}
    found = TokenObjective(REINFORCE(REINFORCE.Params()), Objective.model_validate({"kl": penalty}))(t)
    if importance:
        expected = kl.weighted("k3", t.logprobs, t.behavior_logprobs, t.ref_logprobs)
    else:
        expected = kl.estimate("k3", t.logprobs, t.ref_logprobs)
    torch.testing.assert_close(found.loss, 0.1 * expected)
    torch.testing.assert_close(found.metrics["objective/kl_ref_nats"], expected)
