"""JSON bodies of requests, read as untrusted input: what cannot be read is refused as such, never a traceback.

Fields stay raw beside their typed reading, so that a schema is kept byte for byte and unknown fields are not lost.
"""

import re
from typing import TypeVar

import msgspec
from msgspec import Raw

from polar.errors import InvalidRequest

T = TypeVar("T")

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Pairs and other escapes are matched too, so that neither a pair is cut nor an escaped backslash taken for an escape.
_HALF = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F].."
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf])"
    rb"|\\.",
    re.DOTALL,
)
_LONGEST = 60  # characters of an untrusted value that an error repeats


def decode(body: bytes, type: type[T]) -> tuple[dict[str, Raw], T]:
    """All fields of a JSON object raw, and the object as `type`.

    Half a surrogate pair, which JavaScript leaves where it cuts a string, is read as U+FFFD; all else is byte for byte.

    Raises:
        InvalidRequest: not JSON, not an object, or not what `type` says.
    """
    text = text_of(body)
    try:
        return msgspec.json.decode(text, type=dict[str, Raw]), msgspec.json.decode(text, type=type)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None


def text_of(body: bytes) -> str:
    """A body as text, with whole characters.

    Raises:
        InvalidRequest: not UTF-8.
    """
    try:
        return _whole_characters(body).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None


def decode_field(name: str, raw: Raw, type: type[T]) -> T:
    """One raw field as `type`; `name` is its path in the body, for the error.

    Raises:
        InvalidRequest: not what `type` says.
    """
    try:
        return msgspec.json.decode(raw, type=type)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name}: {error}") from None


def shortened(value: object) -> str:
    """An untrusted value as an error may repeat it."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _whole_characters(body: bytes) -> bytes:
    if (b"\\u" not in body and b"\xed" not in body) or not _SURROGATE.search(body):
        return body
    return _HALF.sub(lambda found: "\ufffd".encode() if found["half"] else found[0], body)
