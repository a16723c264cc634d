"""The judge against a local endpoint that fails, limits, stalls, drops, lies and is slow."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import json
import math
import multiprocessing
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.blocks.rl import Reward
from plugins.parameters import check
from records.rollout import Prompt, Trajectory
from rewards.judge import cache as judge_cache
from rewards.judge.client import JudgeError
from rewards.llm_judge import llm_judge
from rewards.scoring.counted import Counted
from rewards.scoring.service import ScoringService

KEY = "sk-very-secret"


class Endpoint(ThreadingHTTPServer):
    """Does what the requested model's name says; remembers what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []
        self.headers: list[str] = []
        self.now, self.most = 0, 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.times.append(time.monotonic())
            self.server.keys.append(self.headers["Authorization"])
            self.server.headers.append(str(self.headers))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            count = len(self.server.asked)
        try:
            self.behave(body["model"], body["messages"][-1]["content"], count)
        finally:
            with self.server.lock:
                self.server.now -= 1

    def behave(self, model: str, text: str, count: int) -> None:
        if model == "stall":
            time.sleep(3)
        if model == "slow":
            time.sleep(0.3)
        if model == "flaky" and count <= 2:
            return self.reply(503, b"busy")
        if model == "limited" and count == 1:
            return self.reply(429, b"later", {"Retry-After": "2"})
        if model == "limited_until" and count == 1:
            until = email.utils.formatdate(time.time() + 3, usegmt=True)
            return self.reply(429, b"later", {"Retry-After": until})
        if model == "broken":
            return self.reply(500, b"boom")
        if model == "refused":
            return self.reply(401, b"who are you?")
        if model == "garbage" and count == 1:
            return self.reply(200, b"<html>gateway</html>")
        if model == "empty" and count == 1:
            return self.reply(200, b'{"choices": []}')
        if model == "long" and count == 1:
            return self.reply(200, b"[" * (2**20 + 1))
        if model == "compressed" and count == 1:
            return self.reply(200, gzip.compress(b"0" * 10**7), {"Content-Encoding": "gzip"})
        if model == "drop" and count == 1:
            self.close_connection = True
            return self.connection.close()
        said = {"no_score": "It is fine.", "too_high": "Score: 11", "two": "Score: 3? No.\n**Score: 9**"}
        content = said.get(model, "Score: 7.5")
        answer = {
            "choices": [{"message": {"role": "assistant", "content": content}}],
            "usage": {"prompt_tokens": len(text), "completion_tokens": 5},
        }
        if model == "null_usage":
            answer["usage"] = {"prompt_tokens": None, "completion_tokens": math.inf}  # written as Infinity
        if model == "odd_usage":
            answer["usage"] = [1]
        return self.reply(200, json.dumps(answer).encode())

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def trajectory(response: str = "4", answer: Any = "4", messages: list[dict[str, Any]] | None = None) -> Trajectory:
    prompt = Prompt("p/0", messages or [{"role": "user", "content": "2 + 2?"}], answer)
    none, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Trajectory(prompt, "g", 0, none, none, floats, none, np.zeros(0, bool), none, response=response)


def judged(endpoint: Endpoint, model: str, t: Trajectory | None = None, **params: Any) -> Counted:
    return asyncio.run(llm_judge(t or trajectory(), base_url=endpoint.url, model=model, **params))


def test_score_and_counters(endpoint: Endpoint) -> None:
    found = judged(endpoint, "good", template="Q {question} A {answer} R {response}", system="Be fair.")
    assert found.value == 0.75
    sent = "Q 2 + 2? A 4 R 4"
    assert found.counters == {
        "calls": 1.0, "retries": 0.0, "cache_hits": 0.0, "tokens_in": len(sent), "tokens_out": 5.0,
    }  # fmt: skip
    assert endpoint.asked[0]["messages"] == [
        {"role": "system", "content": "Be fair."}, {"role": "user", "content": sent},
    ]  # fmt: skip
    assert endpoint.asked[0]["temperature"] == 0.0 and endpoint.keys == [None]


def test_the_last_score_in_its_range_counts(endpoint: Endpoint) -> None:
    assert judged(endpoint, "two").value == 0.9
    assert judged(endpoint, "good", low=5, high=10).value == 0.5
    assert judged(endpoint, "good", score_pattern=r"(\d)\.", high=7).value == 1.0


def test_places_are_filled_once(endpoint: Endpoint) -> None:
    judged(endpoint, "good", trajectory("{answer} {question} \\1 {x}"), template='{"r": {response}}')
    assert endpoint.asked[0]["messages"][0]["content"] == '{"r": {answer} {question} \\1 {x}}'


def test_talks_and_pictures(endpoint: Endpoint) -> None:
    messages = [
        {"role": "system", "content": "hidden"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    judged(endpoint, "good", trajectory("yes", {"a": 1}, messages), template="{question}|{answer}|{response}")
    said = endpoint.asked[0]["messages"][0]["content"]
    assert said == 'user: [image]\nWhat?\n\nassistant: A cat.\n\nuser: Sure?|{"a": 1}|yes'


def test_the_key_is_sent_and_told_nobody(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with pytest.raises(JudgeError, match="refused the request: HTTP 401: who are you") as caught:
        judged(endpoint, "refused", api_key_env="JUDGE_KEY")
    assert endpoint.keys == [f"Bearer {KEY}"], "one that refuses is not asked again"
    assert KEY not in str(caught.value)


def test_the_environments_openai_account_is_not_for_the_judge(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, KEY)
    judged(endpoint, "good")
    assert KEY not in endpoint.headers[0]


@pytest.mark.parametrize("model", ["null_usage", "odd_usage"])
def test_an_endpoint_may_count_no_tokens(endpoint: Endpoint, model: str) -> None:
    counted = judged(endpoint, model)
    assert (counted.counters["tokens_in"], counted.counters["tokens_out"]) == (0, 0)


@pytest.mark.parametrize(
    ("model", "retries"), [("long", 1), ("compressed", 1), ("flaky", 2), ("garbage", 1), ("empty", 1), ("drop", 1)]
)
def test_asked_again_until_it_answers(endpoint: Endpoint, model: str, retries: int) -> None:
    found = judged(endpoint, model)
    assert found.value == 0.75 and found.counters["retries"] == retries
    gaps = np.diff(endpoint.times)
    assert all(gap >= 0.25 * 2**i for i, gap in enumerate(gaps))


@pytest.mark.parametrize(("model", "seconds"), [("limited", 2.0), ("limited_until", 1.9)])
def test_retry_after_is_honoured(endpoint: Endpoint, model: str, seconds: float) -> None:
    assert judged(endpoint, model).counters["retries"] == 1
    assert endpoint.times[1] - endpoint.times[0] >= seconds  # a date has whole seconds


def test_gives_up(endpoint: Endpoint) -> None:
    with pytest.raises(JudgeError, match="gave no answer in 2 attempts; the last: HTTP 500: boom"):
        judged(endpoint, "broken", attempts=2)
    with pytest.raises(JudgeError, match=r"in 1 attempts; the last: no answer within 0.2 s"):
        judged(endpoint, "stall", attempts=1, request_seconds=0.2)
    assert len(endpoint.asked) == 3
    with pytest.raises(JudgeError, match="ConnectError"):
        asyncio.run(llm_judge(trajectory(), base_url="http://127.0.0.1:1/v1", model="x", attempts=1))


def test_an_answer_without_a_score_is_an_error_and_not_kept(endpoint: Endpoint, tmp_path: Path) -> None:
    cache = str(tmp_path / "judge.sqlite")
    for model, said in (("no_score", "no score in the judge's answer: 'It is fine.'"), ("too_high", "score 11 is not")):
        for _ in range(2):
            with pytest.raises(JudgeError, match=said):
                judged(endpoint, model, cache=cache)
    assert len(endpoint.asked) == 4
    with pytest.raises(JudgeError, match="is no number"):
        judged(endpoint, "good", score_pattern="(Score)")


def test_the_cache_knows_all_that_matters(endpoint: Endpoint, tmp_path: Path) -> None:
    cache = str(tmp_path / "judge.sqlite")
    first = judged(endpoint, "good", cache=cache)
    again = judged(endpoint, "good", cache=cache)
    assert again.value == first.value and len(endpoint.asked) == 1
    assert again.counters == {"calls": 0, "retries": 0, "cache_hits": 1, "tokens_in": 0, "tokens_out": 0}
    assert judged(endpoint, "good", cache=cache, high=7.5).value == 1.0 and len(endpoint.asked) == 1
    others: list[dict[str, Any]] = [
        {"t": trajectory("5")}, {"temperature": 0.5}, {"max_tokens": 7}, {"request": {"top_p": 0.5}}, {"system": "x"},
        {"template": "{response}"}, {"score_pattern": r"(\d)$", "template": "{response}!"},
    ]  # fmt: skip
    for n, other in enumerate(others):
        judged(endpoint, "good", cache=cache, **other)
        assert len(endpoint.asked) == 2 + n
    judged(endpoint, "other", cache=cache)
    assert len(endpoint.asked) == 2 + len(others)
    # Kept, but worth nothing under this pattern: it asks again.
    with pytest.raises(JudgeError):
        judged(endpoint, "good", cache=cache, score_pattern="Mark: (.)")
    assert len(endpoint.asked) == 3 + len(others)


def _keep_many(path: str, start: int) -> None:
    for n in range(25):
        judge_cache.keep(path, f"{start}-{n}", "x" * 100)


def test_the_cache_is_shared_by_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "judge.sqlite")
    processes = [multiprocessing.get_context("fork").Process(target=_keep_many, args=(path, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert all(judge_cache.find(path, f"{start}-{n}") for start in range(4) for n in range(25))
    assert judge_cache.find(path, "no") is None


def scored(endpoint: Endpoint, model: str, count: int, **settings: Any) -> list[Trajectory]:
    params = settings.pop("params", {})
    part = {"function": "llm_judge", "params": {"base_url": endpoint.url, "model": model, **params}}

    async def run() -> list[Trajectory]:
        service = ScoringService(Reward(parts=[part], **settings))  # type: ignore[list-item]
        await service.start()
        try:
            return list(await asyncio.gather(*(service.score(trajectory(str(n))) for n in range(count))))
        finally:
            await service.close()

    return asyncio.run(run())


def test_a_scoring_process_asks_many_at_once_and_no_more_than_allowed(endpoint: Endpoint) -> None:
    done = scored(endpoint, "slow", 20, concurrency=5)
    assert [t.reward for t in done] == [0.75] * 20, done[0].reward_error
    assert 3 <= endpoint.most <= 5
    assert done[0].reward_parts["llm_judge"] == 0.75 and done[0].reward_parts["llm_judge/calls"] == 1.0


def test_time_outs_and_failures_are_errors_of_their_own_response(endpoint: Endpoint) -> None:
    done = scored(endpoint, "stall", 3, timeout_seconds=1.0, first_timeout_seconds=1.0)
    assert all(t.reward is None and "no answer within 1 s (reward." in (t.reward_error or "") for t in done)
    done = scored(endpoint, "broken", 2, params={"attempts": 1})
    assert all(t.reward is None and "JudgeError" in (t.reward_error or "") for t in done)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"base_url": "localhost:8000"}, "params.base_url: 'localhost:8000' is no address"),
        ({"template": "{answer}"}, "params.template: {response} is not in it"),
        ({"score_pattern": "("}, "params.score_pattern: '(' is no regular expression"),
        ({"score_pattern": "a"}, "params.score_pattern: 'a' has 0 groups"),
        ({"low": 10}, "params.low: 10 is not below high 10"),
        ({"api_key_env": "NO_SUCH_KEY"}, "params.api_key_env: the environment variable NO_SUCH_KEY is not set"),
        ({"request": {"model": "x"}}, "params.request: model cannot be set there"),
        ({"cache": "/no/such/folder/x.sqlite"}, "params.cache: /no/such/folder/x.sqlite: unable to open"),
        ({"attempts": 0}, "params.attempts: must be at least 1"),
        ({"model": None}, "params.model"),
    ],
)
def test_bad_params(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check("reward", "llm_judge", {"base_url": "http://x/v1", "model": "m", **params})
    assert said in str(caught.value)


def test_a_cache_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, and long enough to be read as one" * 100)
    with pytest.raises(ValueError, match="file is not a database; name a file of its own"):
        judge_cache.check(str(tmp_path / "notes.txt"))
