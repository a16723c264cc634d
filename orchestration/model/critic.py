"""The critic is a model of its own: it begins as a copy of the policy's trunk and has a value head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from configs.blocks.rl import Model
from orchestration.cluster.devices import DeviceSpec
from orchestration.model.policy_model import KeptInFloat32, ValueHead, load_policy, packed_hidden
from orchestration.model.prepared_batch import PreparedBatch


class CriticModel(KeptInFloat32):
    """Compute the value of the state before each action token of packed sequences."""

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        self.config = hf_model.config
        self.base_model = hf_model.base_model  # the language-model head stays behind
        self.value_head = ValueHead(hf_model.config.hidden_size)

    def forward(self, batch: PreparedBatch) -> Tensor:
        """Return the values [N] float32, differentiable."""
        return self.value_head(packed_hidden(self, batch), batch.rows)


def load_critic(model: Model, device: DeviceSpec, longest: int = 0) -> CriticModel:
    """Return the critic on the CPU, in float32. longest: as for `load_policy`.

    Raises:
        ValueError: model.path holds no causal language model.
    """
    return CriticModel(load_policy(model, device, longest=longest).hf_model)
