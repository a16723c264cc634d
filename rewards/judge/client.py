"""Send one request to an OpenAI-compatible endpoint; openai's client retries when the endpoint is busy or broken."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# A client keeps connections, which belong to an event loop.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


@dataclass(frozen=True)
class Answer:
    """The endpoint's text, and the tokens and calls that it took."""

    text: str
    tokens_in: int
    tokens_out: int
    calls: int


class JudgeError(RuntimeError):
    """The error of an endpoint that gave no usable answer."""


async def ask(
    base_url: str, request: dict[str, Any], api_key: str | None, attempts: int, request_seconds: float
) -> Answer:
    """Send the request and return the answer.

    A busy or broken endpoint (408, 409, 429, 5xx, no connection, a time-out, an answer that is no chat completion) is
    tried up to `attempts` times. The waits double from half a second to 8 s; Retry-After is obeyed up to two minutes.

    Raises:
        JudgeError: the endpoint refused the request, or all attempts failed. The key is never in the message.
    """
    import openai  # late: it takes a second to load, and most jobs have no judge

    # What the environment says of OpenAI's own service (key, organization, project) is not for this endpoint.
    headers: dict[str, Any] = {
        "Accept-Encoding": "identity",
        "OpenAI-Organization": openai.omit,
        "OpenAI-Project": openai.omit,
    }
    if api_key is None:
        headers["Authorization"] = openai.omit
    client = _client().with_options(
        base_url=base_url, api_key=api_key or "none", max_retries=attempts - 1, timeout=request_seconds
    )
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=request["model"], messages=request["messages"], extra_body=request, extra_headers=headers
        )
    except openai.APIStatusError as error:
        is_refused = error.status_code < 500 and error.status_code not in (408, 409, 429)
        way = "refused the request" if is_refused else f"gave no answer in {attempts} attempts; the last"
        raise JudgeError(f"{base_url} {way}: HTTP {error.status_code}: {error.response.text[:300]}") from error
    except openai.APIConnectionError as error:
        cause = error.__cause__
        what = (
            f"no answer within {request_seconds:g} s"
            if isinstance(error, openai.APITimeoutError)
            else f"{type(cause).__name__}: {cause}"
        )
        raise JudgeError(f"{base_url} gave no answer in {attempts} attempts; the last: {what}") from error
    answer = raw.parse()
    tokens = [getattr(answer.usage, f"{which}_tokens", None) for which in ("prompt", "completion")]
    sent, made = (count if isinstance(count, int) else 0 for count in tokens)  # an endpoint may send null, or 1e999
    return Answer(str(answer.choices[0].message.content), sent, made, raw.retries_taken + 1)


def _client() -> AsyncOpenAI:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    from rewards.judge.limits import refuse_what_is_no_completion

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        hooks = {"response": [refuse_what_is_no_completion]}
        http = DefaultAsyncHttpxClient(follow_redirects=False, event_hooks=hooks)
        _clients[loop] = AsyncOpenAI(api_key="none", http_client=http)
    return _clients[loop]
