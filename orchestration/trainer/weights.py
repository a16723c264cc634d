"""Gather the weights of the trainer ranks: for engines, checkpoints and captured steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from configs.blocks.lora import Lora
from data_feeds.chat.template import load_tokenizer
from orchestration.model.adapter_files import ADAPTER_FOLDER, save_adapter
from orchestration.model.checkpoint_names import as_in_checkpoint, saved_buffers
from orchestration.model.lora import adapter_description, adapter_tensors, merged_tensors
from orchestration.model.policy_model import PolicyModel
from orchestration.model.reward_model_files import save_reward_model
from orchestration.run.checksums import sizes
from orchestration.trainer.optimizer import full_parameters, whole
from orchestration.trainer.settings import TrainerSettings


class TrainedWeights:
    """Whole parameters, gathered from all ranks. All methods but `adapter_notice` are collectives for all ranks."""

    def __init__(
        self, policy: PolicyModel, values: torch.nn.Module | None, settings: TrainerSettings, is_reward_model: bool
    ) -> None:
        """Take the models. values: the critic or a value head. is_reward_model: trunk and value head are saved."""
        self.policy, self.values, self.settings = policy, values, settings
        self.is_reward_model = is_reward_model
        self.rank = torch.distributed.get_rank()

    def sent(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors for engines, in the compute dtype: the whole model as in its checkpoint; with
        `lora.sync: adapter` only the adapter's, by PEFT's names."""
        lora = self.settings.lora
        if lora is not None and lora.sync == "adapter":
            yield from self._tensors(only_adapter=True)
        else:
            yield from as_in_checkpoint(self.policy.hf_model, self._tensors(only_adapter=False))

    def adapter_notice(self) -> dict[str, Any] | None:
        """Return what engines must know to use the adapter from `sent`; None when it gives a whole model."""
        lora = self.settings.lora
        return adapter_description(self.policy.hf_model, lora) if lora is not None and lora.sync == "adapter" else None

    def save(self, folder: Path) -> dict[str, int]:
        """Write the policy and its tokenizer in Hugging Face format (rank 0 writes, and returns each file's size by its
        path within the folder; the others return {}). For a policy with adapters, write
        only these, in PEFT's format; with merged checkpoints also the merged model, and the adapters in
        folder/adapter."""
        lora, merged = self.settings.lora, self.settings.merged_checkpoints
        if lora is None or merged:
            self._save_tensors(folder, None)
        if lora is not None:
            self._save_tensors(folder / ADAPTER_FOLDER if merged else folder, lora)
        return sizes(folder) if self.rank == 0 else {}

    def value_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the critic or value head on rank 0; other ranks get an empty dict."""
        gathered: dict[str, Tensor] = {}
        if self.values is not None:
            for name, tensor in full_parameters(self.values, self.settings.train):
                if self.rank == 0:
                    gathered[name] = tensor.cpu().clone()
        return gathered

    def load_value_parameters(self, parameters: dict[str, Tensor]) -> None:
        """Copy the values from `value_parameters` into the model; an optimizer's own float32 copy stays as it is."""
        if self.values is not None:
            for name, parameter in self.values.named_parameters():
                is_partitioned = self.settings.train.zero_stage == 3
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=is_partitioned):
                    parameter.data.copy_(parameters[name])

    def _tensors(self, only_adapter: bool) -> Iterator[tuple[str, Tensor]]:
        hf_model, train = self.policy.hf_model, self.settings.train
        if self.settings.lora is None:
            return itertools.chain(full_parameters(hf_model, train), saved_buffers(hf_model))
        if only_adapter:
            return adapter_tensors(hf_model, lambda parameters: whole(parameters, train))
        merged = merged_tensors(hf_model, lambda parameters: whole(parameters, train))
        return itertools.chain(merged, saved_buffers(hf_model))

    def _save_tensors(self, folder: Path, lora: Lora | None) -> None:
        """Write the whole model, or the adapter alone."""
        model, state = self.settings.model, {}
        for name, tensor in self._tensors(only_adapter=lora is not None):
            if self.rank == 0:
                state[name] = tensor.cpu().clone()
        head = self.value_parameters() if self.is_reward_model else {}
        if self.rank == 0:
            if self.is_reward_model and lora is None:
                save_reward_model(folder, self.policy.hf_model, state, head)
            elif lora is None:
                self.policy.hf_model.save_pretrained(folder, state_dict=state)
            else:
                save_adapter(folder, state, lora, model.path, self.settings.base_name)
            load_tokenizer(model.path, model.trust_remote_code).save_pretrained(folder)
