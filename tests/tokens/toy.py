"""A renderer that can be read: an id is a character. Each character has two ids, so one text can be sampled in two ways."""

from collections.abc import Sequence

import msgspec
import numpy as np

from polar.chat import Message, Tool
from polar.specs import Int32Array
from polar.tokens.rendering import LastTurn, ReplyParser

START, END, CALL = 3, 4, 5
OTHER = 0x200000  # added to an id: the same character, as no rendering spells it
ROLES = {"system": 10, "user": 11, "assistant": 12, "tool": 13}


def spell(text: str) -> list[int]:
    return [ord(letter) + 32 for letter in text]


def body(message: Message) -> list[int]:
    calls = [token for call in message.tool_calls for token in (CALL, *spell(f"{call.name} {call.arguments}"))]
    return spell(message.text) + calls


def left(stopped: bool) -> LastTurn:
    """A reply of which only matters how it ended."""
    return LastTurn(np.empty(0, np.int32), stopped)


def turn(message: Message) -> list[int]:
    return [START, ROLES[message.role], *body(message), END]


class ToyRenderer:
    """Every message is a turn; see `polar.tokens.rendering.Renderer`."""

    name = "toy"
    stop_ids: tuple[int, ...] = (END,)
    shows_tools = True

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        head = [token for tool in tools for token in (CALL, *spell(msgspec.json.encode(tool).decode()))]
        return self._opened(head + [token for message in messages for token in turn(message)])

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        assert all(message.role != "assistant" for message in messages)
        return self._opened(([] if last.stopped else [END]) + [token for message in messages for token in turn(message)])

    def parser(self, tools: Sequence[Tool] = ()) -> ReplyParser:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def _opened(self, ids: list[int]) -> Int32Array:
        return np.asarray([*ids, START, ROLES["assistant"]], np.int32)
