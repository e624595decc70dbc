"""JSON as Google's APIs write it: lower-camel names or the snake_case ones of the protobuf, and bytes in two base64 alphabets.

A field that is null was not said, and a list of one may come as its bare element.
"""

import re
from typing import TypeVar

import msgspec
from msgspec import Raw

from polar.dialects.bodies import decode_field

T = TypeVar("T")
Several = list[Raw] | dict[str, Raw] | None

NULL = Raw(b"null")
_SNAKE = re.compile(r"(?<=[A-Za-z0-9])_([a-z0-9])")
_STANDARD_ALPHABET = str.maketrans("-_", "+/")


def camel(name: str) -> str:
    """A field's name in the API's own spelling."""
    return _SNAKE.sub(lambda found: found[1].upper(), name)


def read(path: str, raw: Raw, type: type[T]) -> tuple[dict[str, Raw], T]:
    """The fields of a JSON object that were said, raw under their camel names, and the object as `type`.

    Raises:
        InvalidRequest: not an object, or not what `type` says; `path` names it.
    """
    fields = decode_field(path, raw, dict[str, Raw])
    if any("_" in name for name in fields):
        fields = {camel(name): value for name, value in fields.items()}
        raw = Raw(msgspec.json.encode(fields))
    return {name: value for name, value in fields.items() if value != NULL}, decode_field(path, raw, type)


def each(path: str, several: Several) -> list[tuple[str, Raw]]:
    """The elements of a list, with their paths."""
    if isinstance(several, dict):
        return [(path, Raw(msgspec.json.encode(several)))]
    return [(f"{path}[{index}]", raw) for index, raw in enumerate(several or ())]


def base64_of(text: str) -> str:
    """Base64 in the standard alphabet and padded, from any of its spellings."""
    text = text.translate(_STANDARD_ALPHABET).rstrip("=")
    return text + "=" * (-len(text) % 4)
