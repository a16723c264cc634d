"""The distribution that responses are drawn from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.blocks.evaluation import EvalRun
from configs.blocks.rl import Eval, Rollout

if TYPE_CHECKING:
    from vllm import SamplingParams


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. vLLM's own parameters are made here and nowhere else."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()  # strings that end a response; they stay in its tokens
    seeded: bool = False
    run_seed: int = 0

    @classmethod
    def of_rollout(cls, block: Rollout, run_seed: int) -> Sampling:
        """Return how the training samples of a job are drawn."""
        return cls(
            max_new_tokens=block.max_new_tokens,
            temperature=block.temperature,
            top_p=block.top_p,
            top_k=block.top_k,
            stop=tuple(block.stop),
            seeded=block.seeded,
            run_seed=run_seed,
        )

    @classmethod
    def of_eval(cls, block: Eval, rollout: Rollout, run_seed: int) -> Sampling:
        """Return how a job is evaluated: always seeded, so that two evaluations of the same weights agree."""
        return cls(
            max_new_tokens=block.max_new_tokens or rollout.max_new_tokens,
            temperature=block.temperature,
            stop=tuple(rollout.stop),
            seeded=True,
            run_seed=run_seed,
        )

    @classmethod
    def of_eval_run(cls, block: EvalRun, run_seed: int, greedy: bool = False) -> Sampling:
        """Return how an evaluation on its own draws its samples, or its greedy response."""
        return cls(
            max_new_tokens=block.max_new_tokens,
            temperature=0.0 if greedy else block.temperature,
            top_p=1.0 if greedy else block.top_p,
            seeded=True,
            run_seed=run_seed,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def request_seed(self, step: int, prompt_id: str, sample: int) -> int:
        """Return a seed in 0..2^63-1 that depends only on (run seed, step, prompt, sample), not on order or engine."""
        key = f"{self.run_seed}\0{step}\0{prompt_id}\0{sample}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1

    def to_vllm(self, step: int, prompt_id: str, sample: int) -> SamplingParams:
        """Return vLLM's parameters for one request, which answers once, with token ids and their log-probabilities."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=self.temperature,
            top_p=1.0 if self.greedy else self.top_p,
            top_k=0 if self.greedy else self.top_k,
            max_tokens=self.max_new_tokens,
            stop=list(self.stop),
            include_stop_str_in_output=bool(self.stop),
            detokenize=bool(self.stop),
            seed=self.request_seed(step, prompt_id, sample) if self.seeded and not self.greedy else None,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
