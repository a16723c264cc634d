"""Refuse replies of a judge that are too long, compressed or no chat completion. (Imported late, with openai.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from httpx2 import AsyncByteStream, DecodingError

MOST_BYTES = 2**20  # of a reply


class _Capped(AsyncByteStream):
    """A reply's bytes as they come, up to MOST_BYTES."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self.inner:
            size += len(chunk)
            if size > MOST_BYTES:
                raise DecodingError(f"the reply has more than {MOST_BYTES:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self.inner.aclose()


async def refuse_what_is_no_completion(response: Any) -> None:
    """Raise DecodingError for a reply that is no chat completion: openai's client retries it as a broken connection."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":  # a few bytes may stand for more than there is memory
        raise DecodingError(f"the reply is compressed ({encoding}), though identity was asked for")
    response.stream = _Capped(response.stream)
    await response.aread()
    if response.status_code != 200:
        return
    try:
        content = response.json()["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError(f"the message's content is {content!r}")
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise DecodingError(f"no chat completion ({type(error).__name__}: {error}): {response.text[:300]}") from error
