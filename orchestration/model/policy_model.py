"""Run the policy's forward pass: from a packed micro-batch to log-probabilities and entropy of its action tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import orchestration.model.packed_attention  # noqa: F401  registers the attention functions
from configs.blocks.lora import Lora
from configs.blocks.rl import Model
from orchestration.cluster.devices import DeviceSpec
from orchestration.model.adapter_files import start_from
from orchestration.model.checkpoint_facts import training_noise
from orchestration.model.chunked_logprobs import token_logprobs
from orchestration.model.lora import add_adapters
from orchestration.model.prepared_batch import PreparedBatch
from orchestration.model.rotary import pin_rotary, refuse_dynamic, rotary_kinds


class PolicyHead(nn.Module):
    """The language-model head, in chunks. It holds no parameters of its own: the model keeps its head.
    It is a module so that DeepSpeed's hooks surround exactly this use of the weight: under ZeRO-3 the weight is
    registered as an external parameter and gathered here, in forward and backward.
    """

    def __init__(self, linear: nn.Linear, softcap: float | None, float32: bool) -> None:
        super().__init__()
        self._linear = (linear,)  # in a tuple: not a submodule, so no second name for its parameters
        self._softcap = softcap
        self._float32 = float32
        self._external = False

    def register_partitioned(self) -> None:
        """Tell DeepSpeed, before the first forward pass under ZeRO-3, that this module uses the head's parameters."""
        (linear,) = self._linear
        if not self._external and hasattr(linear.weight, "ds_id"):
            import deepspeed

            for parameter in linear.parameters():
                deepspeed.zero.register_external_parameter(self, parameter)
            self._external = True

    def forward(self, hidden: Tensor, targets: Tensor, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        (linear,) = self._linear
        return token_logprobs(
            hidden,
            linear.weight,
            targets,
            temperature,
            rows=rows,
            head_bias=linear.bias,
            softcap=self._softcap,
            float32_head=self._float32,
        )


class ValueHead(nn.Module):
    """Compute the value of the state that a token is predicted from. A fresh head says 0 everywhere."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the values, [N] float32, of hidden [U, H] at rows [N] int64 in 0..U-1."""
        with torch.autocast(hidden.device.type, enabled=False):
            values = hidden.float() @ self.weight.float() + self.bias.float()
        return values.index_select(0, rows)


def packed_hidden(hf_model: Any, batch: PreparedBatch) -> Tensor:
    """Return the last hidden states [U, H] of the packed sequences at `batch.positions`. Raise ValueError when a layer
    does not use the packed attention, because sequences would see each other.
    """
    batch.layout.calls = 0
    hidden = hf_model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        use_cache=False,
        packed=batch.layout,
    ).last_hidden_state
    layers = hf_model.config.num_hidden_layers
    if batch.layout.calls != layers:
        raise ValueError(
            f"{type(hf_model).__name__}: {batch.layout.calls} of its {layers} layers use the packed attention; "
            "packed sequences would leak into each other"
        )
    return hidden[0].index_select(0, batch.positions)


class KeptInFloat32(nn.Module):
    """A model whose rotary frequencies, and buffers of which its family says so, stay float32 when it is cast, e.g. by
    DeepSpeed. In bfloat16 frequencies are so coarse that distant positions are wrong, and a router's bias picks other
    experts than the engine's."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> KeptInFloat32:
        strict = {n for m in self.modules() for n in getattr(m, "_keep_in_fp32_modules_strict", None) or ()}
        ends = ("inv_freq", *strict)
        kept = {name: buffer.clone() for name, buffer in self.named_buffers() if name.endswith(ends)}
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if name in kept and buffer.dtype != kept[name].dtype:
                buffer.data = kept[name].to(buffer.device)
        return self


class PolicyModel(KeptInFloat32):
    """A Hugging Face causal language model whose forward pass returns what a policy loss needs.

    DeepSpeed wraps this module; `hf_model` is the model itself, to be saved and synchronised.
    """

    hf_model: Any  # a transformers PreTrainedModel

    def __init__(self, hf_model: Any, float32_head: bool = False, with_values: bool = False) -> None:
        """Wrap a model. with_values: add a value head on the policy's trunk, which is not part of `hf_model`. Raise
        ValueError when the model's family needs something that packed sequences do not have here.
        """
        super().__init__()
        _refuse_unsupported(hf_model)
        self.hf_model = hf_model
        self.value_head = ValueHead(hf_model.config.hidden_size) if with_values else None
        softcap = getattr(hf_model.config, "final_logit_softcapping", None)
        self.head = PolicyHead(hf_model.get_output_embeddings(), softcap, float32_head)

    def forward(
        self, batch: PreparedBatch, temperature: float = 1.0, train_trunk_on_values: bool = True
    ) -> tuple[Tensor, ...]:
        """Return logprobs [N] float32 and entropy [N] float32 (nats) of the action tokens, at `temperature`; with a
        value head also values [N] float32, whose gradient reaches the trunk only with `train_trunk_on_values`."""
        self.head.register_partitioned()
        chosen = packed_hidden(self.hf_model, batch)
        predicted = self.head(chosen, batch.targets, batch.rows, temperature)
        if self.value_head is None:
            return predicted
        return (*predicted, self.value_head(chosen if train_trunk_on_values else chosen.detach(), batch.rows))


def load_policy(
    model: Model, device: DeviceSpec, with_values: bool = False, lora: Lora | None = None, longest: int = 0
) -> PolicyModel:
    """Load the configured causal language model (Hugging Face format) on the CPU, with packed attention.

    The weights are float32: DeepSpeed, or whoever runs the model, casts them to the compute type and keeps the float32
    ones. With adapters only these are float32; the base, which is not trained, is loaded in the compute type.

    Args:
        longest: tokens of the longest sequence that the job allows; some rotary embeddings depend on it.

    Raises:
        ValueError: there is no model configuration, or not one of a causal text model; or adapters do not fit it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path '{model.path}' holds no Hugging Face model configuration: {error}") from error
    shipped = getattr(config, "auto_map", {})
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in shipped:
        raise ValueError(f"model.path '{model.path}' is a {config.model_type}, which is not a causal language model")
    refuse_dynamic(rotary_kinds(config.get_text_config()), model.path)
    # Engines have no dropout, nor have old log-probabilities and the reference: with it in training only, the policy would
    # differ from itself before anything was learned.
    for key in training_noise(config):
        setattr(config, key, 0.0)
    hf_model = AutoModelForCausalLM.from_pretrained(
        model.path,
        config=config,
        dtype=torch.float32 if lora is None else getattr(torch, model.dtype),
        attn_implementation=device.attention,
        trust_remote_code=model.trust_remote_code,
    )
    pin_rotary(hf_model, longest)
    for module in hf_model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # of a model's own code, which config.json may not show
            module.p = 0.0
    if model.gradient_checkpointing:
        hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        add_adapters(hf_model, lora)
        start_from(hf_model, lora, model.path)
    return PolicyModel(hf_model, model.float32_head, with_values)


def _refuse_unsupported(hf: Any) -> None:
    config = hf.config
    name = type(hf).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(
            f"{name} has layers of type {', '.join(sorted(kinds))}: packed sequences would leak through them"
        )
    if not getattr(hf, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use transformers' attention interface, which packed sequences need")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{name} attends in both directions; only causal models are supported")
    if not isinstance(hf.get_output_embeddings(), nn.Linear):
        raise ValueError(f"{name} has no linear language-model head")
    for factor in ("logit_scale", "logits_scaling"):
        if getattr(config, factor, None) not in (None, 1, 1.0):
            raise ValueError(f"{name} scales its logits ({factor}), which is not supported")
