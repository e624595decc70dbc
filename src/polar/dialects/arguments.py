"""Tool-call arguments in APIs that take nothing but a JSON object.

What the model wrote otherwise goes out wrapped, `{"INVALID_JSON": "<what it wrote>"}`, and is unwrapped when it comes back; so
does what looks wrapped already, because the model wrote it like that.
"""

import msgspec
from msgspec import Struct


class _Invalid(Struct, forbid_unknown_fields=True):
    text: str = msgspec.field(name="INVALID_JSON")


def wrapped(arguments: str) -> str:
    """The text of a JSON object: the arguments as the model wrote them, if they are one."""
    try:
        written = msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        written = None
    if written is None or written.keys() == {"INVALID_JSON"}:
        return msgspec.json.encode(_Invalid(arguments)).decode()
    return arguments


def unwrapped(arguments: str) -> str:
    """What the model wrote, given the JSON object that came back."""
    try:
        return msgspec.json.decode(arguments, type=_Invalid).text
    except msgspec.ValidationError:
        return arguments
