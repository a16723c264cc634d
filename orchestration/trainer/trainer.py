"""One data-parallel rank of the trainer: DeepSpeed around a packed forward pass, the same for every method.

The trainer owns everything a method does not: forward pass at the sampling temperature, accumulation over
micro-batches, clipping, stepping, metrics as sums and counts. It runs in a plain process (one rank) or in a Ray actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor

from algs.method import PolicyMethod
from algs.records import PolicyTokens
from data_feeds.packing import MicroBatch
from orchestration.cluster.devices import DeviceSpec
from orchestration.cluster.heartbeat import Activity
from orchestration.cluster.loopback import init_method
from orchestration.metrics.tally import Tally
from orchestration.model.critic import load_critic
from orchestration.model.lora import adapters_off
from orchestration.model.policy_model import PolicyModel, load_policy
from orchestration.model.prepared_batch import PreparedBatch, to_device
from orchestration.trainer.captured_step import CapturedStep
from orchestration.trainer.metric_sums import MetricSums
from orchestration.trainer.optimizer import (
    engine_around,
    learning_rate_at,
    optimizer_step,
    summed_over_ranks,
)
from orchestration.trainer.resume_state import Counters, load_state, save_state
from orchestration.trainer.settings import TrainerSettings
from orchestration.trainer.token_objective import TokenObjective
from orchestration.trainer.weights import TrainedWeights


class Trainer:
    """One rank. `deepspeed.init_distributed` must be possible: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set."""

    def __init__(
        self, settings: TrainerSettings, method: PolicyMethod, device: DeviceSpec, with_reference: bool = True,
        activity: Activity | None = None,
    ) -> None:  # fmt: skip
        self.activity = activity or Activity()  # of whoever must be able to say what this rank is doing
        self.settings, self.method = settings, method
        self.objective = TokenObjective(method, settings.objective)
        # gloo alone is enough between CPU ranks; DeepSpeed's shared-memory operator would need a compiler at start-up.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=device.backend, verbose=False, init_method=init_method())
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.device = torch.device(device.device, torch.cuda.current_device() if device.device == "cuda" else 0)
        torch.manual_seed(settings.seed)  # construction is the same on every rank: ZeRO-3 does not broadcast parameters
        shares_trunk = self.objective.has_values and settings.critic.kind == "shared"
        policy = load_policy(
            settings.model, device, with_values=shares_trunk, lora=settings.lora, longest=settings.longest
        )
        self.ds_engine = engine_around(policy, settings)
        has_critic = self.objective.has_values and not shares_trunk
        self.ds_critic = None
        if has_critic:
            self.ds_critic = engine_around(load_critic(settings.model, device, settings.longest), settings)
        has_reference = with_reference and self.objective.has_reference  # a captured step has its numbers already
        has_reference &= settings.lora is None  # with adapters the base is the reference
        self.reference = load_policy(settings.model, device, longest=settings.longest) if has_reference else None
        if self.reference is not None:
            self.reference.requires_grad_(False).eval().to(
                device=self.device, dtype=getattr(torch, settings.model.dtype)
            )
        torch.manual_seed(settings.seed + self.rank)
        self.counters = Counters()
        values = self.policy.value_head if self.ds_critic is None else self.ds_critic.module
        is_reward_model = method.data == "pairs" and self.objective.has_values
        self.weights = TrainedWeights(self.policy, values, settings, is_reward_model)

    @property
    def policy(self) -> PolicyModel:
        return self.ds_engine.module

    @property
    def ds_engines(self) -> list[Any]:
        """Return the policy's engine, and the critic's if it has one of its own."""
        return [self.ds_engine] if self.ds_critic is None else [self.ds_engine, self.ds_critic]

    def step(self, updates: list[list[MicroBatch]], step: int = 0) -> Tally:
        """Run every update of a step on this rank's micro-batches; every rank passes equally many.

        An update with an Inf or NaN in its loss or gradient changes no weight, on any rank; it is counted in
        `counters.skipped_in_a_row` and train/skipped_updates, and captured. So are the steps of settings.capture_steps.
        """
        tally = Tally()
        for index, batches in enumerate(updates):
            captured = CapturedStep(
                step, index, self.rank, self.ranks, self.counters.steps, self.counters.updates, self.settings,
                self.method, batches, self.device.type,
            )  # fmt: skip
            is_wanted = step in self.settings.capture_steps
            if is_wanted:
                captured.save_weights(self.weights)
            measured = self.update(batches)
            is_skipped = self.counters.skipped_in_a_row > 0
            if is_skipped and not is_wanted:
                captured.save_weights(self.weights)  # a skipped update left them as they were
            if is_skipped or is_wanted:
                captured.save_batch(measured, reason="not finite" if is_skipped else "asked for")
            tally.merge(measured)
        self.counters.steps += 1
        return tally

    def update(self, batches: list[MicroBatch]) -> Tally:
        """Take one optimizer step on this rank's micro-batches."""
        rates = self._set_learning_rates()
        sums = MetricSums(has_behavior=self.method.data == "prompts")
        prepared_batches = [to_device(batch, self.device) for batch in batches]
        update_sums = self._update_sums(prepared_batches)
        for ds_engine in self.ds_engines:
            ds_engine.train()
        for i, prepared in enumerate(prepared_batches):
            self.activity.enter(f"forward and backward, micro-batch {i + 1} of {len(batches)}")
            policy_loss, critic_loss = self._losses(prepared, update_sums, sums)
            self._backward(policy_loss, critic_loss, is_last=i == len(batches) - 1)
        self.counters.updates += 1
        self.activity.enter("optimizer step")
        norm, critic_norm, is_skipped = self._apply()
        self.counters.skipped_in_a_row = self.counters.skipped_in_a_row + 1 if is_skipped else 0
        tally = sums.to_tally(self.rank)
        tally.add("train/gradient_norm", norm, 1)
        if critic_norm is not None:
            tally.add("critic/gradient_norm", critic_norm, 1)
        tally.add("train/learning_rate", rates[0], 1)
        tally.total("train/skipped_updates", float(is_skipped and self.rank == 0))
        tally.maximum("train/micro_batches", len(batches))
        return tally

    def _losses(
        self, prepared: PreparedBatch, update_sums: dict[str, Tensor], sums: MetricSums
    ) -> tuple[Tensor, Tensor | None]:
        """Return a micro-batch's part of the policy's and of the critic's loss, scalars; add its metrics to `sums`."""
        tokens = self._policy_tokens(prepared, update_sums)
        if prepared.is_dummy:  # no method should meet what is no data
            alone = self.ds_critic is not None
            nothing = self.objective.nothing(tokens, of_critic=not alone)
            critic_nothing = self.objective.nothing(tokens, of_policy=False) if alone else None
            sums.add(prepared, tokens, {}, nothing, critic_nothing)
            return nothing, critic_nothing
        answer = self.objective(tokens)
        policy_loss = (answer.loss * prepared.loss_weights).sum()
        critic_loss = None if answer.critic is None else (answer.critic * prepared.loss_weights).sum()
        sums.add(prepared, tokens, answer.metrics, policy_loss, critic_loss)
        return policy_loss, critic_loss

    @torch.no_grad()
    def evaluate(self, batches: list[MicroBatch]) -> Tally:
        """Return the loss and the method's metrics on this rank's micro-batches under the current weights, as eval/*.
        They are exact for any split when the loss weights hold the whole set's denominators."""
        for ds_engine in self.ds_engines:
            ds_engine.eval()
        sums = MetricSums(has_behavior=False)
        prepared_batches = [to_device(batch, self.device) for batch in batches]
        update_sums = self._update_sums(prepared_batches)
        for prepared in prepared_batches:
            self._losses(prepared, update_sums, sums)
        return sums.to_tally(self.rank).renamed(lambda name: f"eval/{name.removeprefix('train/')}")

    def _set_learning_rates(self) -> list[float]:
        train, critic = self.settings.train, self.settings.critic
        rate = learning_rate_at(self.counters.updates, train, self.settings.total_updates)
        rates = [rate, rate * (critic.learning_rate or train.learning_rate) / train.learning_rate][
            : len(self.ds_engines)
        ]
        for ds_engine, own in zip(self.ds_engines, rates, strict=True):
            for group in ds_engine.optimizer.param_groups:
                group["lr"] = own
        return rates

    @property
    def is_warming_up(self) -> bool:
        """Return whether only the critic learns."""
        return self.objective.has_values and self.counters.steps < self.settings.critic.warmup_steps

    def _learns(self, ds_engine: Any) -> bool:
        """Return whether an engine takes this update's step: the policy's does not while its own critic warms up."""
        return ds_engine is self.ds_critic or self.ds_critic is None or not self.is_warming_up

    def _backward(self, policy_loss: Tensor, critic_loss: Tensor | None, is_last: bool) -> None:
        losses = [policy_loss]
        if critic_loss is not None and self.ds_critic is None:
            losses = [policy_loss * float(not self.is_warming_up) + critic_loss]
        elif critic_loss is not None:
            losses.append(critic_loss)
        for ds_engine, loss in zip(self.ds_engines, losses, strict=True):
            if self._learns(ds_engine):
                ds_engine.set_gradient_accumulation_boundary(is_last)
                # A loss that is not finite makes the gradient so, also where calculus would not (log 0): the norm then
                # tells every rank, without a word between them. DeepSpeed averages gradients over ranks; our weights
                # hold the global denominator already.
                poison = torch.where(torch.isfinite(loss.detach()), float(self.ranks), torch.nan)
                ds_engine.backward(loss * poison, scale_wrt_gas=False)
                if not is_last:
                    ds_engine.step()  # counts the micro-batch

    def _apply(self) -> tuple[float, float | None, bool]:
        """Take the optimizer steps. Return the gradient norms of policy and critic, and whether a step was skipped
        because its norm was not finite. Norms are global, so that all ranks decide alike."""
        norms, is_skipped = {id(self.ds_engine): 0.0}, False
        for ds_engine in filter(self._learns, self.ds_engines):
            norms[id(ds_engine)], is_applied = optimizer_step(ds_engine, self.settings)
            is_skipped |= not is_applied
        return norms[id(self.ds_engine)], norms.get(id(self.ds_critic)), is_skipped

    def _update_sums(self, batches: list[PreparedBatch]) -> dict[str, Tensor]:
        """Return the method's sums over all action tokens of the update, on all ranks; float32 scalars."""
        if not self.objective.has_update_sums:
            return {}
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for i, prepared in enumerate(batches):
                self.activity.enter(f"sums over the update, micro-batch {i + 1} of {len(batches)}")
                tokens = self._policy_tokens(prepared, {})  # a dummy too: under ZeRO-3 its forward pass is a collective
                if not prepared.is_dummy:
                    for name, values in self.method.update_sums(tokens).items():
                        sums[name] = sums.get(name, 0.0) + values.double().sum()
        return summed_over_ranks(sums, self.device)

    def _policy_tokens(self, prepared: PreparedBatch, update_sums: dict[str, Tensor]) -> PolicyTokens:
        predicted = self.ds_engine(prepared, self.settings.temperature, not self.is_warming_up)
        logprobs, entropy = predicted[:2]
        values = predicted[2] if len(predicted) > 2 else None
        columns = prepared.columns
        if "old_logprobs" not in columns:
            from_engine = self.settings.objective.old_logprobs == "engine"
            columns = {**columns, "old_logprobs": columns["behavior_logprobs"] if from_engine else logprobs.detach()}
        return PolicyTokens(
            logprobs=logprobs,
            entropy=entropy,
            values=values if self.ds_critic is None else self.ds_critic(prepared),
            sequence=prepared.sequence,
            group=prepared.group,
            chosen=prepared.chosen,
            update_sums=update_sums,
            **columns,
        )

    @torch.no_grad()
    def recompute(
        self, batches: list[MicroBatch], names: Sequence[str], temperature: float | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Return numbers of every micro-batch's action tokens under the current weights, [N] float32 each: old_logprobs
        of the policy, ref_logprobs of the reference, old_values of the critic. temperature: None: the sampling's."""
        for ds_engine in self.ds_engines:
            ds_engine.eval()
        t, computed = temperature or self.settings.temperature, []
        for i, batch in enumerate(batches):
            self.activity.enter(f"compute {', '.join(names)}, micro-batch {i + 1} of {len(batches)}")
            prepared, columns = to_device(batch, self.device), {}
            if "old_logprobs" in names or (self.ds_critic is None and "old_values" in names):
                predicted = self.ds_engine(prepared, t)
                columns["old_logprobs"] = predicted[0]
                if len(predicted) > 2:
                    columns["old_values"] = predicted[2]
            if self.ds_critic is not None and "old_values" in names:
                columns["old_values"] = self.ds_critic(prepared)
            if self.reference is not None and "ref_logprobs" in names:
                columns["ref_logprobs"] = self.reference(prepared, t)[0]
            elif self.settings.lora is not None and "ref_logprobs" in names:
                with adapters_off(self.policy.hf_model):
                    columns["ref_logprobs"] = self.ds_engine(prepared, t)[0]
            if missing := set(names) - columns.keys():
                raise ValueError(f"the trainer has no way to compute {', '.join(sorted(missing))}, which needs() names")
            computed.append({name: columns[name].float().cpu().numpy() for name in names})
        return computed

    def save_state(self, folder: Path) -> dict[str, int]:
        """Write all that decides the next step, and return the sizes of the files. A collective: every rank calls
        it."""
        return save_state(folder, self.ds_engines, self.counters, self.device)

    def load_state(self, folder: Path) -> None:
        """Continue where `save_state` was called; only for a trainer that has not trained yet. A collective.

        Raises:
            ValueError: the folder holds no state, or that of another number of ranks.
        """
        self.counters = load_state(folder, self.ds_engines, self.device)
