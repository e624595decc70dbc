"""Named normalisers: what a harness does to a history that means nothing, undone before the history is read (T13).

A profile lists those of its harness; what fired is recorded on the call. `trim_text` is not here: it changes no message, only
how fingerprints compare them (see `lineage`).
"""

import re
from collections.abc import Callable, Sequence

from msgspec import structs

from polar.chat import ChatRequest, Message, TextPart
from polar.specs import NormaliserName

_BILLING = "x-anthropic-billing-header:"
_THINK = re.compile(r"\s*<think(?:ing)?>\n?(.*?)\n?</think(?:ing)?>\s*", re.DOTALL)


def normalise(request: ChatRequest, names: Sequence[NormaliserName]) -> ChatRequest:
    """The request with its messages normalised; names of those that changed something join `normalised`."""
    messages, fired = request.messages, list(request.normalised)
    for name in names:
        if (change := _CHANGES.get(name)) is None:
            continue
        changed = change(messages)
        if changed != messages:
            messages = changed
            fired.append(name)
    return structs.replace(request, messages=messages, normalised=tuple(fired))


def _without_billing(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Leading system messages without the parts that hold the billing header, and without what is then empty."""
    kept: list[Message] = []
    for index, message in enumerate(messages):
        if message.role != "system":
            return (*kept, *messages[index:])
        parts = tuple(part for part in message.content if not part.text.startswith(_BILLING))
        if parts or not message.content:
            kept.append(structs.replace(message, content=parts))
    return tuple(kept)


def _think_apart(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(_split_thinking(message) if message.role == "assistant" else message for message in messages)


def _split_thinking(message: Message) -> Message:
    found = _THINK.match(message.text)
    if found is None or message.reasoning:
        return message
    rest = message.text[found.end() :]
    return structs.replace(message, content=(TextPart(rest),) if rest else (), reasoning=found[1])


_CHANGES: dict[NormaliserName, Callable[[tuple[Message, ...]], tuple[Message, ...]]] = {
    "claude_code_attribution": _without_billing,
    "think_in_text": _think_apart,
}
