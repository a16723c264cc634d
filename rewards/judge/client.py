"""One question to an OpenAI-compatible endpoint, asked again when the endpoint is busy or broken."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
ASK_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}

# A client keeps connections, which belong to an event loop.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


@dataclass(frozen=True)
class Answer:
    """What the endpoint said, and what it took."""

    text: str
    tokens_in: int
    tokens_out: int
    calls: int


class JudgeError(RuntimeError):
    """The endpoint gave no usable answer."""


async def ask(url: str, request: dict[str, Any], api_key: str | None, attempts: int, request_seconds: float) -> Answer:
    """POST the request. A busy or broken endpoint (429, 5xx, no connection, time-out, an answer that is none) is asked
    up to `attempts` times, with waits that double up to half a minute, at random between half and all of that, and never
    less than Retry-After says.

    Raises:
        JudgeError: it refused the request (other 4xx), or all attempts failed. The key is never in the message.
    """
    client = _client()
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    problem, wait = "", 0.0
    for attempt in range(attempts):
        if attempt:
            doubled = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
            await asyncio.sleep(max(wait, doubled * random.uniform(0.5, 1.0)))
        wait = 0.0
        try:
            response = await client.post(url, json=request, headers=headers, timeout=request_seconds)
        except httpx.TimeoutException:
            problem = f"no answer within {request_seconds:g} s"
            continue
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if response.status_code != 200:
            problem = f"HTTP {response.status_code}: {response.text[:300]}"
            if response.status_code not in ASK_AGAIN:
                raise JudgeError(f"{url} refused the request: {problem}")
            wait = _retry_after(response.headers.get("retry-after", ""))
            continue
        try:
            body = response.json()
            text, usage = body["choices"][0]["message"]["content"], body.get("usage") or {}
            if not isinstance(text, str):
                raise TypeError(f"the message's content is {text!r}")
            tokens = int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))
            return Answer(text, *tokens, calls=attempt + 1)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            problem = f"no chat completion ({type(error).__name__}: {error}): {response.text[:300]}"
    raise JudgeError(f"{url} gave no answer in {attempts} attempts; the last: {problem}")


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        # How many are asked at once is the scoring process's to say (reward.concurrency).
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        _clients[loop] = httpx.AsyncClient(limits=limits, follow_redirects=False)
    return _clients[loop]


def _retry_after(header: str) -> float:
    """Seconds to wait, from a number of them or a date; 0 when it says neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0
