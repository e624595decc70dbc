"""What OpenAI's Responses API asks of a reply beside its messages, and the names of what the policy is not given.

Requests say it in fields, and in mid-conversation in an input item.
"""

from msgspec import Raw, Struct

from polar.dialects.bodies import decode_field, shortened
from polar.errors import InvalidRequest

_ANY_OBJECT = Raw(b'{"type":"object"}')
_LONGEST = 60  # characters of an untrusted name that a call records


class Dropped:
    """Names of what was asked and the policy is not given, each once, in order."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        self._names[name[:_LONGEST]] = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)


class _Format(Struct):
    type: str
    schema: Raw = Raw(b"null")


class TextConfig(Struct):
    """How the reply's text is to be."""

    format: _Format | None = None
    verbosity: str | None = None

    def json_schema(self, dropped: Dropped) -> Raw | None:
        """What the text must fit, byte for byte; None for free text."""
        if self.verbosity not in (None, "medium"):
            dropped.add("text.verbosity")
        if self.format is None or self.format.type == "text":
            return None
        if self.format.type == "json_object":
            return _ANY_OBJECT
        if self.format.type != "json_schema":
            raise InvalidRequest(
                f"text.format.type: expected text, json_object or json_schema, got {shortened(self.format.type)}"
            )
        return as_object("text.format.schema", self.format.schema)


class ReasoningConfig(Struct):
    """How much the model is to think; a summary is always given."""

    effort: str | None = None

    def drop(self, dropped: Dropped) -> None:
        if self.effort is not None:
            dropped.add("reasoning.effort")


def as_object(name: str, raw: Raw) -> Raw:
    """A JSON schema byte for byte, free of the body that it was read from.

    Raises:
        InvalidRequest: it is no JSON object.
    """
    if not bytes(raw).startswith(b"{"):
        raise InvalidRequest(f"{name}: expected a JSON schema, got {shortened(decode_field(name, raw, object))}")
    return raw.copy()
