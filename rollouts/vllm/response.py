"""One response of an engine: made by one request, or by several when new weights cut it off and it was continued."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from records.rollout import FloatArray, IntArray
from rollouts.vllm.sampling import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput


@dataclasses.dataclass(frozen=True)
class Generation:
    """What an engine made after one prompt."""

    token_ids: IntArray  # [T], with the end-of-sequence token when the model ended by itself
    logprobs: FloatArray  # [T] of the distribution each token was sampled from
    versions: IntArray  # [T] policy version that made each token; several when weights changed in flight
    finish_reason: str  # "stop" ended by itself, "length" cut at the limit, "abort"
    seconds: float  # from the call to the last token, queueing included
    resumed: int = 0  # how often it was cut off in the middle and continued by a new request


class Response:
    """A response while it is being made. Every request continues where the one before was cut off."""

    def __init__(self, prompt_ids: Sequence[int] | IntArray, sampling: Sampling) -> None:
        self._prompt_ids: list[int] = np.asarray(prompt_ids).tolist()
        self._sampling = sampling
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._resumed = 0
        self.finish_reason = "abort"  # why the last request ended; before the first one, as if it had been cut off

    def __len__(self) -> int:
        """Return how many tokens there are so far."""
        return len(self._token_ids)

    def context(self) -> list[int]:
        """Return the prompt of the next request: the response's prompt and all tokens made so far."""
        return self._prompt_ids + self._token_ids

    def parameters(self, step: int, prompt_id: str, sample: int) -> SamplingParams:
        """Return vLLM's parameters for the next request: the rest of the length limit, and a seed of its own."""
        left = self._sampling.max_new_tokens - len(self._token_ids)
        parameters = dataclasses.replace(self._sampling, max_new_tokens=left).to_vllm(step, prompt_id, sample)
        if parameters.seed is not None and self._token_ids:
            parameters.seed = continued_seed(parameters.seed, self._token_ids)
        return parameters

    def add(self, made: CompletionOutput, decode: Callable[[list[int]], str]) -> None:
        """Append what a request made. decode: turns token ids into text without special tokens, for stop strings."""
        seam = len(self._token_ids)
        self._token_ids += made.token_ids
        self._logprobs += made.logprobs.logprobs  # type: ignore[union-attr]  # flat: one for each sampled token
        # vLLM labels every token with the version active when it was sampled; "default" is before the first sync.
        for span in made.weight_versions or []:
            self._versions += [0 if span.version == "default" else int(span.version)] * (span.end - span.start)
        assert len(self._token_ids) == len(self._logprobs) == len(self._versions)
        assert made.finish_reason is not None
        self.finish_reason = made.finish_reason
        if 0 < seam < len(self._token_ids):
            self._resumed += 1
            end = stop_across(self._token_ids, seam, self._sampling.stop, decode)
            if end is not None:
                self._token_ids, self._logprobs = self._token_ids[:end], self._logprobs[:end]
                self._versions, self.finish_reason = self._versions[:end], "stop"

    def generation(self, seconds: float) -> Generation:
        """Return what was made so far."""
        return Generation(
            np.asarray(self._token_ids, dtype=np.int32),
            np.asarray(self._logprobs, dtype=np.float32),
            np.asarray(self._versions, dtype=np.int32),
            self.finish_reason,
            seconds,
            self._resumed,
        )


def continued_seed(seed: int, token_ids: list[int]) -> int:
    """Return the seed of a request that continues after these tokens, in 0..2^63-1. The first request's seed would
    repeat the noise of the first token."""
    key = seed.to_bytes(8, "big") + np.asarray(token_ids, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def stop_across(
    token_ids: list[int], seam: int, stop: tuple[str, ...], decode: Callable[[list[int]], str]
) -> int | None:
    """Return the number of tokens up to the end of a stop string that began before the seam; None without such a
    string.

    vLLM looks for stop strings in one request's text only. Tokens made after such a string are dropped: what is kept
    has the distribution of a response that was not cut off.
    """
    if not stop:
        return None
    longest = max(map(len, stop))
    before = len(decode(token_ids[:seam]))
    for end in range(seam + 1, len(token_ids) + 1):
        text = decode(token_ids[:end])
        if any(string in text[max(0, before - longest + 1) :] for string in stop):
            return end
        if len(text) >= before + longest:  # any other stop string begins after the seam, where vLLM looks
            return None
    return None
