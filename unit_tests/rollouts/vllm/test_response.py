"""A response that several requests make: nothing lost, doubled or drawn with used noise at the seams."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollouts.vllm.response import Response, continued_seed, stop_across
from rollouts.vllm.sampling import Sampling

SEEDED = Sampling(max_new_tokens=10, seeded=True, run_seed=3, stop=("x",))


def output(token_ids, version, finish_reason):
    """What vLLM gives back of one request."""
    spans = [SimpleNamespace(version=version, start=0, end=len(token_ids))] if token_ids else []
    logprobs = SimpleNamespace(logprobs=[-float(token) for token in token_ids])
    return SimpleNamespace(
        token_ids=token_ids, logprobs=logprobs, weight_versions=spans, finish_reason=finish_reason
    )  # fmt: skip


def letters(token_ids):
    """Token 0 is a, and so on."""
    return "".join(chr(ord("a") + token) for token in token_ids)


def test_requests_join_into_one_response():
    response = Response(np.array([50, 51], np.int32), Sampling(max_new_tokens=10))
    assert response.context() == [50, 51]
    response.add(output([], "default", "abort"), letters)  # cut off before its first token
    response.add(output([1, 2, 3], "default", "abort"), letters)
    assert response.context() == [50, 51, 1, 2, 3]
    response.add(output([], "4", "abort"), letters)
    response.add(output([4], "5", "abort"), letters)
    response.add(output([5, 6], "6", "length"), letters)
    made = response.generation(1.5)
    assert made.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
    assert made.versions.tolist() == [0, 0, 0, 5, 6, 6]
    assert (made.finish_reason, made.seconds, made.resumed) == ("length", 1.5, 2)


def test_the_limit_holds_over_all_requests():
    response = Response([50], SEEDED)
    assert response.parameters(1, "p", 0).max_tokens == 10
    response.add(output([1, 2, 3], "1", "abort"), letters)
    assert response.parameters(1, "p", 0).max_tokens == 7
    assert response.parameters(1, "p", 0).stop == ["x"]


def test_a_continuation_draws_other_noise_and_always_the_same():
    response, other = Response([50], SEEDED), Response([50], SEEDED)
    first = response.parameters(1, "p", 0).seed
    assert first == SEEDED.request_seed(1, "p", 0)
    response.add(output([], "1", "abort"), letters)
    assert response.parameters(1, "p", 0).seed == first  # none of it was used
    seeds = [first]
    for token in range(4):
        for one in (response, other):
            one.add(output([token], "1", "abort"), letters)
        seeds.append(response.parameters(1, "p", 0).seed)
        assert other.parameters(1, "p", 0).seed == seeds[-1]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert continued_seed(first, [1, 2]) != continued_seed(first, [2, 1])
    unseeded = Response([50], Sampling(max_new_tokens=10))
    unseeded.add(output([1], "1", "abort"), letters)
    assert unseeded.parameters(1, "p", 0).seed is None


def stopped_at(token_ids, stop, begin=0):
    """Tokens up to the one that completes a stop string, looking from `begin` on; all when there is none."""
    for end in range(begin + 1, len(token_ids) + 1):
        if any(s in letters(token_ids[begin:end]) for s in stop):
            return end
    return len(token_ids)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=2, max_size=40),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    seam=st.integers(1, 39),
)
def test_stop_strings_end_a_cut_response_where_they_end_a_whole_one(tokens, stop, seam):
    whole = tokens[: stopped_at(tokens, stop)]
    if len(whole) <= seam:
        return  # it was over before the cut
    continued = tokens[: stopped_at(tokens, stop, seam)]  # vLLM looks at the second request alone
    end = stop_across(continued, seam, tuple(stop), letters)
    assert (continued if end is None else continued[:end]) == whole


def test_what_came_after_a_stop_string_is_dropped():
    response = Response([50], Sampling(max_new_tokens=10, stop=("bc",)))
    response.add(output([0, 1], "1", "abort"), letters)
    response.add(output([2, 0, 0], "2", "length"), letters)
    made = response.generation(0.0)
    assert made.token_ids.tolist() == [0, 1, 2]
    assert made.logprobs.tolist() == [0, -1, -2]
    assert made.versions.tolist() == [1, 1, 2]
    assert (made.finish_reason, made.resumed) == ("stop", 1)
