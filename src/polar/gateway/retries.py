"""When is a request the same again? (D9)

Who asks again does not repeat the bytes: Codex writes the fields of a map in a new order each time, and Claude Code asks in one
piece after a stream that broke. So a request is known by what it asks for, not by how it is spelled or is to be answered.
"""

from collections.abc import Sequence

import msgspec
import xxhash
from msgspec import Raw

from polar.chat import ChatRequest
from polar.dialects.protocol import Target

_canonical = msgspec.json.Encoder(order="sorted")


def request_hash(dialect: str, target: Target, request: ChatRequest, digests: Sequence[str]) -> str:
    """xxh3_128 in hex; equal for requests of one dialect and route that ask for the same.

    Args:
        digests: those of the request's messages and tools (`addressed`), which stand for them.
    """
    extra = {name: _ordered(raw) for name, raw in request.extra.items()}
    asked = msgspec.structs.replace(request, messages=(), tools=(), stream=False, include_usage=False, extra=extra)
    return xxhash.xxh3_128_hexdigest(_canonical.encode((dialect, target.path, target.query, digests, asked)))


def _ordered(raw: Raw) -> Raw:
    """Raw JSON with the fields of its objects in order; as it is where it cannot be read and written again."""
    try:
        return Raw(_canonical.encode(msgspec.json.decode(raw)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return raw
