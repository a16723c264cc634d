"""One object decides how responses are drawn, for engine and trainer."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from configs.blocks.evaluation import EvalRun
from configs.blocks.rl import Eval, Rollout
from rollouts.vllm.sampling import Sampling


def test_request_seeds_differ_in_every_coordinate_and_in_nothing_else() -> None:
    coordinates = list(itertools.product((0, 1), (0, 1, 11), ("a", "b", "1"), (0, 1, 10)))
    seeds = [Sampling(8, run_seed=run).request_seed(step, prompt, sample) for run, step, prompt, sample in coordinates]
    assert len(set(seeds)) == len(coordinates)
    again = [Sampling(9, 0.5, run_seed=run).request_seed(step, prompt, n) for run, step, prompt, n in coordinates]
    assert seeds == again


def test_request_seed_is_the_same_in_every_process_and_release() -> None:
    # A recorded value: Python's own hash() changes from process to process, and a changed recipe breaks old runs.
    assert Sampling(8, run_seed=3).request_seed(7, "chain_sum-12", 1) == 4923581874250394140


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.text(max_size=20), st.integers(0, 1000))
def test_request_seed_fits_what_generators_take(run: int, step: int, prompt: str, sample: int) -> None:
    assert 0 <= Sampling(8, run_seed=run).request_seed(step, prompt, sample) < 2**63


def test_rollout_block_is_taken_over_whole() -> None:
    block = Rollout(max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=3, stop=["\n"], seeded=True)
    assert Sampling.of_rollout(block, 4) == Sampling(5, 0.7, 0.9, 3, ("\n",), True, 4)


def test_evaluation_is_repeatable_untruncated_and_as_long_as_training_unless_told() -> None:
    rollout = Rollout(max_new_tokens=5, temperature=0.7, top_p=0.9, stop=["\n"])
    assert Sampling.of_eval(Eval(), rollout, 4) == Sampling(5, 0.0, stop=("\n",), seeded=True, run_seed=4)
    assert Sampling.of_eval(Eval(max_new_tokens=64), rollout, 4).max_new_tokens == 64


def test_evaluation_run_draws_samples_or_one_greedy_response() -> None:
    block = EvalRun(temperature=0.8, top_p=0.9, max_new_tokens=7)
    assert Sampling.of_eval_run(block, 1) == Sampling(7, 0.8, 0.9, seeded=True, run_seed=1)
    assert Sampling.of_eval_run(block, 1, greedy=True) == Sampling(7, 0.0, seeded=True, run_seed=1)


def test_vllm_is_asked_for_exactly_this() -> None:
    asked = Sampling(5, 0.7, 0.9, 3, run_seed=2).to_vllm(1, "p", 0)
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (5, 0.7, 0.9, 3)
    assert (asked.n, asked.logprobs, asked.detokenize, asked.seed) == (1, 0, False, None)
    assert asked.repetition_penalty == 1 and asked.presence_penalty == 0 and asked.frequency_penalty == 0


def test_vllm_detokenizes_only_for_stop_strings_and_keeps_them() -> None:
    asked = Sampling(5, stop=("\n",)).to_vllm(1, "p", 0)
    assert asked.stop == ["\n"] and asked.detokenize and asked.include_stop_str_in_output


def test_vllm_gets_a_seed_of_its_own_per_request() -> None:
    sampling = Sampling(5, seeded=True, run_seed=2)
    seeds = [sampling.to_vllm(1, "p", sample).seed for sample in range(4)]
    assert seeds == [sampling.request_seed(1, "p", sample) for sample in range(4)]
    assert len(set(seeds)) == 4
