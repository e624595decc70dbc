"""Identifiers that Polar mints.

Tool-call ids name the call and the choice that made them, because most harnesses send them back untouched: they are
how a history names its own past. They stay within `[A-Za-z0-9_-]` and 40 characters, which every dialect accepts.
"""

import re
import secrets
import time

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_TOOL_CALL = re.compile(r"call_(c[0-9]+[a-z][0-9a-z]{7})_([0-9]{1,9})_([0-9]{1,9})")


def _base36(number: int, width: int) -> str:
    digits: list[str] = []
    for _ in range(width):
        number, digit = divmod(number, 36)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def _random36(width: int) -> str:
    return _base36(secrets.randbelow(36**width), width)


def new_session_id() -> str:
    """A session id that sorts by creation time (milliseconds) and is unique across machines."""
    return f"s{_base36(time.time_ns() // 1_000_000, 8)}{_random36(6)}"


def new_call_id(ordinal: int) -> str:
    """Id of the `ordinal`-th call of a session; unique across sessions."""
    return f"c{ordinal}{_ALPHABET[10 + secrets.randbelow(26)]}{_random36(7)}"


def new_model_key() -> str:
    """A session's model key: 192 random bits, safe in a URL path and in a header."""
    return f"pk-{secrets.token_urlsafe(24)}"


def tool_call_id(call_id: str, choice: int, index: int) -> str:
    """Id of the `index`-th tool call in choice `choice` of `call_id`."""
    return f"call_{call_id}_{choice}_{index}"


def parse_tool_call_id(value: str) -> tuple[str, int, int] | None:
    """(call_id, choice, index) of an id that we minted, or None for any other text."""
    match = _TOOL_CALL.fullmatch(value)
    return (match[1], int(match[2]), int(match[3])) if match else None
