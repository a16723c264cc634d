"""One data-parallel rank of the trainer: DeepSpeed around a packed forward pass, the same for every method.

The trainer owns everything a method does not: forward pass at the sampling temperature, accumulation over micro-batches,
clipping, stepping, metrics as sums and counts. It works in a plain process (one rank) or inside one Ray actor per rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor

from algs.method import PolicyMethod
from algs.records import PolicyTokens
from configs.schema import Train
from data_feeds.chat import load_tokenizer
from data_feeds.packing import MicroBatch
from orchestration.devices import DeviceSpec
from orchestration.forward import PolicyModel, PreparedBatch, load_policy, to_device
from orchestration.metrics import Tally
from orchestration.trainer_settings import TrainerSettings, deepspeed_config, learning_rate_at


class NonFiniteError(RuntimeError):
    """A loss or gradient was Inf or NaN; the same on every rank."""


class Trainer:
    """One rank. `deepspeed.init_distributed` must be possible: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set."""

    def __init__(self, settings: TrainerSettings, method: PolicyMethod, device: DeviceSpec) -> None:
        self.settings, self.method = settings, method
        # gloo alone is enough between CPU ranks; DeepSpeed's shared-memory operator would need a compiler at start-up.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=device.backend, verbose=False)
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.device = torch.device(device.device, torch.cuda.current_device() if device.device == "cuda" else 0)
        torch.manual_seed(settings.seed)  # construction is the same on every rank: ZeRO-3 does not broadcast parameters
        policy = load_policy(settings.model, device)
        self.reference = load_policy(settings.model, device) if "ref_logprobs" in method.needs() else None
        if self.reference is not None:
            self.reference.requires_grad_(False).eval().to(
                device=self.device, dtype=getattr(torch, settings.model.dtype)
            )
        self.engine, _, _, _ = deepspeed.initialize(
            model=policy,
            optimizer=torch.optim.AdamW(parameter_groups(policy, settings.train), **adamw_arguments(settings.train)),
            config=deepspeed_config(settings.model, settings.train, self.ranks),
        )
        torch.manual_seed(settings.seed + self.rank)
        self.updates = 0

    @property
    def policy(self) -> PolicyModel:
        return self.engine.module

    def step(self, updates: list[list[MicroBatch]]) -> Tally:
        """Run one optimizer step per entry of `updates`, this rank's micro-batches of each; every rank passes as many.

        Raises:
            NonFiniteError: a loss or gradient norm is Inf or NaN (on every rank alike).
        """
        tally = Tally()
        # With one update per step the policy at its start is the policy itself: the ratio is one by definition and
        # recomputing it would cost a forward pass for nothing.
        old = [self.logprobs(batches) for batches in updates] if len(updates) > 1 else [None]
        for batches, old_logprobs in zip(updates, old, strict=True):
            tally.merge(self._update(batches, old_logprobs))
        return tally

    def _update(self, batches: list[MicroBatch], old_logprobs: list[np.ndarray] | None) -> Tally:
        rate = learning_rate_at(self.updates, self.settings.train, self.settings.total_updates)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        sums = StepSums()
        self.engine.train()
        for i, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            prepared = to_device(batch, self.device)
            logprobs, entropy = self.engine(prepared, self.settings.temperature)
            old = None if old_logprobs is None else torch.from_numpy(old_logprobs[i]).to(self.device)
            tokens = self._policy_tokens(prepared, logprobs, entropy, old)
            token_loss = self.method.loss(tokens)
            loss = (token_loss.values * prepared.loss_weights).sum()
            sums.add(prepared, tokens, token_loss.metrics, loss)
            # DeepSpeed averages gradients over ranks; our weights already hold the global denominator.
            self.engine.backward(loss * self.ranks, scale_wrt_gas=False)
            self.engine.step()
        self.updates += 1
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        tally = sums.to_tally(self.rank)
        self._refuse_non_finite(tally, norm)
        tally.add("train/gradient_norm", norm, 1)
        tally.add("train/learning_rate", rate, 1)
        tally.maximum("train/micro_batches", len(batches))
        return tally

    def _refuse_non_finite(self, tally: Tally, norm: float) -> None:
        finite = torch.tensor([float(math.isfinite(norm) and math.isfinite(tally.sums["train/loss"]))])
        finite = finite.to(self.device)
        torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        if finite.item() == 0:
            raise NonFiniteError(
                f"optimizer step {self.updates}: loss {tally.sums['train/loss']:g}, gradient norm {norm:g} on rank "
                f"{self.rank}; the run stops before these weights are used. Try a lower train.learning_rate."
            )

    def _policy_tokens(
        self, prepared: PreparedBatch, logprobs: Tensor, entropy: Tensor, old: Tensor | None
    ) -> PolicyTokens:
        ref = None
        if self.reference is not None:
            with torch.no_grad():
                ref = self.reference(prepared, self.settings.temperature)[0]
        return PolicyTokens(
            logprobs=logprobs,
            behavior_logprobs=prepared.behavior_logprobs,
            old_logprobs=logprobs.detach() if old is None else old,
            advantages=prepared.advantages,
            entropy=entropy,
            sequence=prepared.sequence,
            group=prepared.group,
            staleness=prepared.staleness,
            ref_logprobs=ref,
        )

    @torch.no_grad()
    def logprobs(self, batches: list[MicroBatch], temperature: float | None = None) -> list[np.ndarray]:
        """Log-probabilities of every micro-batch's action tokens under the current weights, [N] float32 each."""
        self.engine.eval()
        t = self.settings.temperature if temperature is None else temperature
        return [self.engine(to_device(batch, self.device), t)[0].float().cpu().numpy() for batch in batches]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters by their Hugging Face names, in the compute dtype. A collective: every rank iterates."""
        for name, parameter in self.policy.hf_model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.settings.train.zero_stage == 3):
                yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """Write the policy and its tokenizer in Hugging Face format (rank 0 writes; a collective)."""
        state = {}
        for name, tensor in self.weights():
            if self.rank == 0:
                state[name] = tensor.cpu().clone()
        if self.rank == 0:
            self.policy.hf_model.save_pretrained(folder, state_dict=state)
            load_tokenizer(self.settings.model.path, self.settings.model.trust_remote_code).save_pretrained(folder)


class StepSums:
    """Sums over the tokens of an optimizer step, kept on the device until its end: no host sync per micro-batch."""

    def __init__(self) -> None:
        self.loss: Tensor | float = 0.0
        self.tokens = 0
        self.forward_tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, prepared: PreparedBatch, t: PolicyTokens, metrics: dict[str, Tensor], loss: Tensor) -> None:
        self.forward_tokens += prepared.input_ids.shape[1]
        self.loss = self.loss + loss.detach()
        if prepared.is_dummy:
            return
        log_rho = t.logprobs.detach() - t.behavior_logprobs
        self.tokens += t.logprobs.shape[0]
        self._put("train/entropy_nats", t.entropy)
        self._put("train/logprob_gap_mean", log_rho.abs())
        self._put("train/kl_behavior_nats", torch.expm1(log_rho) - log_rho)
        self._put("train/staleness_mean", t.staleness.float())
        for name, values in metrics.items():
            self._put(f"method/{name}", values)
        self._max("train/logprob_gap_max", log_rho.abs())
        self._max("train/staleness_max", t.staleness.float())

    def _put(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + values.detach().double().sum()

    def _max(self, name: str, values: Tensor) -> None:
        largest = values.max()
        self.maxima[name] = torch.maximum(self.maxima[name], largest) if name in self.maxima else largest

    def to_tally(self, rank: int) -> Tally:
        tally = Tally()
        tally.add("train/loss", float(self.loss), 1 if rank == 0 else 0)  # ranks hold parts of one sum
        tally.total("train/tokens", self.forward_tokens)
        tally.total("train/action_tokens", self.tokens)
        for name, value in self.sums.items():
            tally.add(name, float(value), self.tokens)
        for name, value in self.maxima.items():
            tally.maximum(name, float(value))
        return tally


def parameter_groups(policy: torch.nn.Module, train: Train) -> list[dict[str, Any]]:
    """Matrices are decayed, norms and biases are not; without decay there is one group."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if train.weight_decay == 0:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw_arguments(train: Train) -> dict[str, Any]:
    return {"lr": train.learning_rate, "betas": train.betas, "eps": train.eps, "fused": True}
