"""Why does a prompt that an engine rendered not begin with what is stored? (chat mode)

The stored path is what the policy saw and said; the new prompt is how the engine's template and tokenizer write the same
history. The reason is that of the first token in which they differ: later differences are not looked at. Where no decoder
is at hand, only what ids and messages prove is named; the rest is `drifted`. A drift always forks, whatever it is called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from polar.chat import Message
from polar.specs import Int32Array
from polar.tokens.tree import common_prefix

Decode = Callable[[Sequence[int]], str]
DriftReason = Literal[
    "retokenised",  # the same text in other ids
    "arguments_respelled",  # a tool call's arguments are spelled otherwise
    "text_trimmed",  # whitespace around the text is gone
    "reasoning_dropped",  # the reasoning is not there any more
    "template_glue",  # what the template puts around a turn differs between a prompt's end and its middle
    "stop_doubled",  # the turn's end is written although it was sampled
    "stop_trimmed",  # the turn does not end with the id that was sampled as its end
    "drifted",  # anything else
]
CODES: Mapping[DriftReason, str] = {
    "retokenised": "T01",
    "arguments_respelled": "T02",
    "text_trimmed": "T02",
    "reasoning_dropped": "T03",
    "template_glue": "T04",
    "stop_doubled": "T06",
    "stop_trimmed": "T06",
    "drifted": "T01",
}
_GLUE = 64  # tokens that a template may put in front of a reply
_LINE = 8  # tokens of a reply by which it is found again


@dataclass(frozen=True)
class Turn:
    """A reply on the stored path.

    Attributes:
        start, end: its tokens on that path.
        stopped: its last token is a stop id.
        sent: the message as the harness got it.
        came: the message as the harness gave it back; None where it is not known.
    """

    start: int
    end: int
    stopped: bool
    sent: Message
    came: Message | None


@dataclass(frozen=True)
class _Seen:
    """A stored path and a new prompt which differ at token `at`, and the reply that is spelled otherwise."""

    stored: Int32Array
    new: Int32Array
    at: int
    turn: Turn

    @property
    def words(self) -> Int32Array:
        """The reply's ids without its stop id."""
        return self.stored[self.turn.start : self.turn.end - self.turn.stopped]

    @property
    def rest(self) -> Int32Array:
        """Where the new prompt has the reply, and as much again as it could be spelled in."""
        start = min(self.at, self.turn.start)
        return self.new[start : start + 2 * len(self.words) + 2 * _GLUE]


def drift_reason(
    stored: Int32Array, new: Int32Array, at: int, turns: Sequence[Turn], decode: Decode | None = None
) -> DriftReason:
    """Why `new` leaves `stored` at token `at`.

    Args:
        turns: the replies on the stored path, in order, as far as they are known.
        decode: text of ids with control tokens spelled out.
    """
    number = next((number for number, turn in enumerate(turns) if turn.end > at), None)
    if number is None:
        return "drifted"
    turn = turns[number]
    seen = _Seen(stored, new, at, turn)
    if number and at == turns[number - 1].end and turns[number - 1].stopped and doubles_stop(new, at):
        return "stop_doubled"
    if turn.stopped and at == turn.end - 1:
        return "stop_trimmed"
    if _moved(seen):
        return "template_glue"
    return _by_text(seen, decode) if decode is not None else _by_message(seen)


def doubles_stop(new: Int32Array, at: int) -> bool:
    """Whether a prompt says at token `at`, after a stop id, that id once more (T06)."""
    return 0 < at < len(new) and bool(new[at] == new[at - 1])


def _moved(seen: _Seen) -> bool:
    """The reply is there to the token, a little earlier or later: only what is around it differs."""
    line = seen.words[:_LINE]
    if not len(line) or seen.at > seen.turn.start:
        return False
    near = seen.new[seen.at : seen.at + _GLUE + len(line)]
    places = (place for place in range(len(near) - len(line) + 1) if (near[place : place + len(line)] == line).all())
    found = next(places, None)
    return found is not None and common_prefix(seen.new[seen.at + found :], seen.words) == len(seen.words)


def _by_text(seen: _Seen, decode: Decode) -> DriftReason:
    sent, said, text = seen.turn.sent, decode(seen.words.tolist()), decode(seen.rest.tolist())
    if seen.at >= seen.turn.start and _same_text(seen, decode, said, text):
        return "retokenised"
    kept = sent.text.strip() in text
    if kept and sent.reasoning.strip() not in text:
        return "reasoning_dropped"
    if kept and sent.text not in text:
        return "text_trimmed"
    for call in sent.tool_calls:  # as the engine told them, which need not be how they were sampled
        if call.name in text and not (call.arguments in text and call.arguments in said):
            return "arguments_respelled"
    return "drifted"


def _same_text(seen: _Seen, decode: Decode, said: str, text: str) -> bool:
    """Both texts go on alike through the first token in which the ids differ, the stored one and the new one."""
    old, new = (
        decode(ids[seen.turn.start : seen.at + 1].tolist()).rstrip("\ufffd")  # half of a character
        for ids in (seen.stored, seen.new)
    )
    return text.startswith(old) and (said.startswith(new) or new.startswith(said))


def _by_message(seen: _Seen) -> DriftReason:
    """By what came back, and by where the difference is: reasoning stands first."""
    sent, came = seen.turn.sent, seen.turn.came or seen.turn.sent
    if sent.reasoning and (came.reasoning != sent.reasoning or seen.at <= seen.turn.start):
        return "reasoning_dropped"
    if came.text != sent.text:
        return "text_trimmed"
    if [call.arguments for call in came.tool_calls] != [call.arguments for call in sent.tool_calls]:
        return "arguments_respelled"
    return "drifted"
