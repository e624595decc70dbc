"""JSON in ASCII: some clients break lines at U+2028, so every event is written without a character beyond."""

import json
import re

import msgspec

_WIDE = re.compile(r"[^\x00-\x7f]+")
_encode = msgspec.json.Encoder().encode


def encode(body: object) -> bytes:
    """`body` on one line. Raw values in it must be compact."""
    text = _encode(body)
    return text if text.isascii() else _WIDE.sub(lambda found: json.dumps(found[0])[1:-1], text.decode()).encode()
