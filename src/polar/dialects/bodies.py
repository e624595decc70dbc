"""JSON bodies of requests, read as untrusted input: what cannot be read is refused as such, never a traceback.

Fields stay raw beside their typed reading, so that a schema is kept byte for byte and unknown fields are not lost.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import msgspec
import xxhash
from msgspec import Raw

from polar.errors import InvalidRequest
from polar.recent import Recent

T = TypeVar("T")

REMEMBERED = 16_000_000  # bytes of JSON, in each of two generations
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
# Pairs and other escapes are matched too, so that neither a pair is cut nor an escaped backslash taken for an escape.
_HALF = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F].."
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf])"
    rb"|\\.",
    re.DOTALL,
)
NULL = Raw(b"null")
_LONGEST = 60  # characters of an untrusted value that an error repeats


class Memory:
    """What the parts of earlier requests said, by their JSON: a history comes again with every request, and is read once."""

    def __init__(self) -> None:
        self._recent: Recent[bytes, object] = Recent(REMEMBERED)

    def each(self, what: bytes, parts: Iterable[Raw], read: Callable[[int, Raw], T]) -> list[T]:
        """What each part says.

        Args:
            what: names `read`, which has to give the same for the same JSON, and nothing that anybody changes or that is None.
        """
        raws, recent = list(parts), self._recent
        keys = [what + xxhash.xxh3_128_digest(raw) for raw in raws]
        known = [*map(recent.get, keys)]
        if None in known:
            for index, key in enumerate(keys):
                if known[index] is None and (again := recent.older(key)) is not None:
                    known[index] = again
                elif known[index] is None:
                    known[index] = recent.keep(key, read(index, _whole(raws[index])), len(bytes(raws[index])))
        return cast(list[T], known)


def decode(body: bytes, type: type[T], apart: tuple[str, ...] = ()) -> tuple[dict[str, Raw], T]:
    """All fields of a JSON object raw, and the object as `type`.

    Half a surrogate pair, which JavaScript leaves where it cuts a string, is read as U+FFFD; all else is byte for byte.

    Args:
        apart: large fields, for `Memory.each`: `type` has them as `Raw`, and gets null. They are as they came.

    Raises:
        InvalidRequest: not JSON, not an object, or not what `type` says.
    """
    try:
        fields = _fields(body)
        large = {name: fields.pop(name) for name in apart if name in fields}
        rest = text_of(msgspec.json.encode({**fields, **dict.fromkeys(large, NULL)}) if large else body)
        return msgspec.json.decode(rest, type=dict[str, Raw]) | large, msgspec.json.decode(rest, type=type)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
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


def parts_of(name: str, raw: Raw) -> list[Raw]:
    """The elements of a raw list; none where it is null.

    Raises:
        InvalidRequest: it is no list.
    """
    return [] if raw == NULL else decode_field(name, raw, list[Raw])


def _fields(body: bytes) -> dict[str, Raw]:
    """The fields of a JSON object as they came, if they can be told apart so."""
    try:
        return msgspec.json.decode(body, type=dict[str, Raw])
    except msgspec.DecodeError:  # half a pair at the end of a string is enough
        return msgspec.json.decode(text_of(body), type=dict[str, Raw])


def _whole(raw: Raw) -> Raw:
    return Raw(text_of(bytes(raw)))


def shortened(value: object) -> str:
    """An untrusted value as an error may repeat it."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _whole_characters(body: bytes) -> bytes:
    if b"\xed" not in body and not _ESCAPED_HALF.search(body):
        return body
    return _HALF.sub(lambda found: "\ufffd".encode() if found["half"] else found[0], body)
