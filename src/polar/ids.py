"""Identifiers that Polar mints.

Tool-call ids, item ids, response ids and signatures name the call and the choice that made them, because most harnesses
send them back untouched: they are how a history names its own past. Ids stay within `[A-Za-z0-9_-]` and 40 characters, which
every dialect accepts; a signature is base64, which those that decode it expect.
"""

import base64
import binascii
import re
import secrets
import time

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_CALL = r"(c[0-9]+[a-z][0-9a-z]{7})"
_ITEM = re.compile(rf"[a-z]+_{_CALL}_([0-9]{{1,9}})_([0-9]{{1,9}})")
_RESPONSE = re.compile(rf"[a-z]+[_-]{_CALL}")
_SIGNATURE = re.compile(rf"polar/{_CALL}/([0-9]{{1,9}})")


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


def item_id(prefix: str, call_id: str, choice: int, index: int) -> str:
    """Id of the `index`-th item of its sort in choice `choice` of `call_id`; `prefix` is the sort, in small letters (`msg`)."""
    return f"{prefix}_{call_id}_{choice}_{index}"


def tool_call_id(call_id: str, choice: int, index: int) -> str:
    """Id of the `index`-th tool call in choice `choice` of `call_id`."""
    return item_id("call", call_id, choice, index)


def response_id(call_id: str) -> str:
    """Id of a whole reply, by which a later request may follow it."""
    return f"resp_{call_id}"


def parse_response_id(value: str) -> str:
    """The call of a response id that we minted, or "" for any other text."""
    match = _RESPONSE.fullmatch(value)
    return match[1] if match else ""


def signature(call_id: str, choice: int) -> str:
    """What stands for a choice's reasoning where a dialect has an opaque signature; base64."""
    return base64.b64encode(f"polar/{call_id}/{choice}".encode()).decode()


def parse_minted(value: str) -> tuple[str, int] | None:
    """(call_id, choice) of an item id or a signature that we minted, or None for any other text."""
    if match := _ITEM.fullmatch(value):
        return match[1], int(match[2])
    try:
        text = base64.b64decode(value, validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return None
    found = _SIGNATURE.fullmatch(text)
    return (found[1], int(found[2])) if found else None
