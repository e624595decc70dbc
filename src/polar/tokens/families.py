"""Model families as the library `renderers` knows them, made safe for text from outside and for threads.

The library is handed over, not imported: it loads much. It renders with a tokenizer object that belongs to one call and
undoes that call's guard (T12), so calls share nothing that changes. Of a conversation's past, a bridge is shown the last
turn at most: the whole of it where the turn was cut and has to be closed, else only the id that ended it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from polar.chat import Message, Tool, ToolCall
from polar.errors import BridgeRefused, InvalidRequest, UsageError
from polar.specs import Int32Array
from polar.tokens import wire
from polar.tokens.guard import Guard, Spellings
from polar.tokens.hermes import TAGS, HermesParser, json_object, tool_spec
from polar.tokens.rendering import Attempt, LastTurn, ReplyParser
from polar.tokens.tagged import ReadCalls, TaggedParser, Tags
from polar.tokens.tokenizer import Draft, Tokenizer
from polar.tokens.wire import Json
from polar.tokens.xmlcalls import Grammar, reader

PROBE: Json = {"role": "user", "content": "?"}
TOOL: Json = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class Family(Struct, frozen=True):
    """What the library does not tell about a family.

    Attributes:
        name: the library's.
        marker: an added token without which no vocabulary is of this family.
        tags: of its replies; None for the Hermes format.
        grammar: of its calls, where the library would change their whitespace; None for the library's parser.
        raw_arguments: calls are written with their arguments as JSON, so they stay as the model wrote them.
        names_results: a result is shown with the name of its tool.
        numbers_calls: calls and results are shown with ids of the form `functions.NAME:NUMBER`, counted from the start.
    """

    name: str
    marker: str = "<tool_call>"
    tags: Tags | None = None
    grammar: Grammar | None = None
    raw_arguments: bool = False
    names_results: bool = False
    numbers_calls: bool = False


class Rendered(Protocol):
    token_ids: list[int]


class ParsedCall(Protocol):
    name: str | None
    arguments: object
    raw: str
    status: str
    id: str | None


class Parsed(Protocol):
    @property
    def tool_calls(self) -> Sequence[ParsedCall]: ...


class Library(Protocol):
    """A renderer of the library."""

    def render_ids(self, messages: list[Json], *, tools: list[Json] | None, add_generation_prompt: bool) -> list[int]: ...

    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: list[Json]
    ) -> Rendered | None: ...

    def parse_response(self, token_ids: list[int], *, tools: list[Json] | None, prompt_ids: list[int]) -> Parsed: ...

    def get_stop_token_ids(self) -> list[int]: ...


class LibraryTokenizer:
    """What the library needs of a tokenizer. It offers no character offsets: ids do not depend on them, and they are slow."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, guard: Guard | None = None) -> None:
        self.name_or_path = ""
        self.eos_token_id = tokenizer.eos_id
        self._tokenizer = tokenizer
        self._guard = guard or Guard(Spellings(()), ())

    def encode(self, text: str, **_: object) -> list[int]:
        ids: list[int] = self._guard.encode(self._tokenizer, text).tolist()
        return ids

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return self._tokenizer.decode(ids)

    def convert_tokens_to_ids(self, spelling: str) -> int | None:
        return self._tokenizer.token_id(spelling)


Make = Callable[[LibraryTokenizer], Library]


class FamilyRenderer:
    """Renders for one family with one tokenizer; see `Renderer`.

    A system message that is not the first is a user's where the family takes none there.

    Attributes:
        shows_tools: a prompt says which tools there are; some families' templates leave that to the harness.
    """

    def __init__(self, tokenizer: Tokenizer, family: Family, make: Make, identity: str = "", as_sent: Make | None = None) -> None:
        """Take what makes a renderer of the library for a tokenizer, and what `name` is to tell from others.

        Args:
            as_sent: makes one that leaves out of a history what the template leaves out; as `make` without it.

        Raises:
            UsageError: the vocabulary is not of this family.
        """
        self.name = f"{family.name}-{identity}" if identity else family.name
        self._tokenizer = tokenizer
        self._family = family
        self._make = make
        self._make_as_sent = as_sent or make
        self._spellings = Spellings([*tokenizer.spellings, *TAGS, *(family.tags.all if family.tags else ())])
        try:
            library = make(LibraryTokenizer(tokenizer))
            stops = dict.fromkeys(library.get_stop_token_ids())
            closed, opened = (library.render_ids([PROBE], tools=None, add_generation_prompt=opens) for opens in (False, True))
        except Exception as fault:  # the library raises what it likes, an assertion for a missing token
            raise UsageError(f"this vocabulary is none of the family {family.name}: {fault}") from fault
        if tokenizer.eos_id is not None:
            stops[tokenizer.eos_id] = None
        self.stop_ids: tuple[int, ...] = tuple(stops)
        self._opening = opened[len(closed) :]
        think_end = tokenizer.token_id(family.tags.think_end) if family.tags else None
        self._think_end = [] if think_end is None else [think_end]
        self._late_system = _takes_late_system(library)
        self.shows_tools = library.render_ids([PROBE], tools=[TOOL], add_generation_prompt=True) != opened

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """A whole history, ending where the assistant's next words begin; int32[n].

        Raises:
            InvalidRequest: the family has no way to write it.
        """
        return self._rendered(self._make, messages, tools)

    def render_as_sent(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """As `render`, but by the template's own rules for earlier reasoning."""
        return self._rendered(self._make_as_sent, messages, tools)

    def _rendered(self, make: Make, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        if tools and not self.shows_tools:
            raise InvalidRequest(
                f"{self._family.name} models are shown no tools by their template; serve the model in chat mode, in which the "
                "engine's template may show them, or without tools"
            )
        guard = Guard(self._spellings, wire.texts(messages, tools))
        turns = self._turns(messages, _numbered(messages) if self._family.numbers_calls else {}, guard)
        specs = [wire.spec(tool, guard) for tool in tools]
        try:
            ids = make(LibraryTokenizer(self._tokenizer, guard)).render_ids(
                turns, tools=specs or None, add_generation_prompt=True
            )
        except Exception as fault:  # see above
            raise InvalidRequest(f"{self._family.name} models cannot be shown this history: {fault}") from fault
        return np.asarray(ids, np.int32)

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        """What follows sampled ids up to the next turn's opening; int32[n].

        Raises:
            BridgeRefused: the library refuses, or would change what was sampled.
            ValueError: `messages` holds an assistant message; its ids are sampled, never rendered here.
        """
        if any(message.role == "assistant" for message in messages):
            raise ValueError("a bridge holds what came after the reply, never an assistant message")
        guard = Guard(self._spellings, wire.texts(messages))
        library = self._library(guard)
        turns = self._turns(messages, self._result_ids(last), guard, last.calls)
        if turns:
            return np.asarray(self._tail(library, last, turns), np.int32)
        one, two = (self._tail(library, last, [PROBE] * count) for count in (1, 2))
        closing = one[: max(0, 2 * len(one) - len(two) - len(self._opening))]  # what comes before the first message
        return np.asarray([*closing, *self._opening], np.int32)

    def parser(self, tools: Sequence[Tool] = ()) -> ReplyParser:
        """A fresh parser for one generation."""
        if (tags := self._family.tags) is None:
            return HermesParser(self._tokenizer, self.stop_ids)
        opening = self._tokenizer.decode(self._opening)
        thinking = bool(tags.think) and opening.rfind(tags.think) > opening.rfind(tags.think_end)
        return TaggedParser(self._tokenizer, self.stop_ids, tags, self._reader(tags, tools), thinking=thinking)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens spelled out."""
        return self._tokenizer.decode(ids)

    def _library(self, guard: Guard | None = None) -> Library:
        return self._make(LibraryTokenizer(self._tokenizer, guard))

    def _tail(self, library: Library, last: LastTurn, turns: list[Json]) -> list[int]:
        """A turn that was stopped is over, whatever is in it; one that was cut is closed as it needs it."""
        said: list[int] = last.ids.tolist()
        before, said = (said[-1:], [*self._think_end, said[-1]]) if last.stopped else (self._opening, said)
        try:
            bridged = library.bridge_to_next_turn(before, said, turns)
        except Exception as fault:  # see above
            raise BridgeRefused(f"{self._family.name}: {fault}") from fault
        stored = [*before, *said]
        if bridged is None or bridged.token_ids[: len(stored)] != stored:
            raise BridgeRefused(
                f"{self._family.name}: no way from the sampled ids to {', '.join(str(turn['role']) for turn in turns)}"
            )
        return bridged.token_ids[len(stored) :]

    def _turns(
        self, messages: Sequence[Message], ids: Mapping[str, str], guard: Guard, calls: Sequence[ToolCall] = ()
    ) -> list[Json]:
        names = {call.id: call.name for call in (*calls, *(call for message in messages for call in message.tool_calls))}
        return [self._turn(message, index, names, ids, guard) for index, message in enumerate(messages)]

    def _turn(self, message: Message, index: int, names: Mapping[str, str], ids: Mapping[str, str], guard: Guard) -> Json:
        turn = wire.turn(message, guard, ids, raw_arguments=self._family.raw_arguments)
        if message.role == "system" and index and not self._late_system:
            turn["role"] = "user"
        if message.role == "tool" and self._family.names_results and message.tool_call_id in names:
            turn["name"] = guard.text(names[message.tool_call_id])
        return turn

    def _result_ids(self, last: LastTurn) -> Mapping[str, str]:
        """For the ids by which results come back, those that the model wrote."""
        if not (self._family.numbers_calls and last.calls):
            return {}
        written = [call.id for call in self._parsed(self._library(), [], last.ids.tolist()) if call.status == "ok"]
        if len(written) != len(last.calls):
            raise BridgeRefused(f"{self._family.name}: {len(last.calls)} calls were answered, and {len(written)} sampled")
        return {call.id: id for call, id in zip(last.calls, written, strict=True) if id}

    def _reader(self, tags: Tags, tools: Sequence[Tool]) -> ReadCalls:
        if (grammar := self._family.grammar) is not None:
            read = reader(grammar, tools)
            return lambda block: read(tags.inner(block))

        @functools.cache  # made where there is a block, and once: a reply may hold thousands
        def made() -> tuple[Library, list[Json]]:
            return self._library(), _specs(tools)

        return lambda block: [_attempt(call) for call in self._parsed(*made(), self._ids(block))]

    def _parsed(self, library: Library, specs: list[Json], ids: list[int]) -> Sequence[ParsedCall]:
        try:
            return library.parse_response(ids, tools=specs or None, prompt_ids=self._opening).tool_calls
        except Exception:  # replies are untrusted; one that a parser stumbles over holds no call
            return ()

    def _ids(self, block: str) -> list[int]:
        """A part of a reply as the library reads it: it looks for ids, and decodes the others."""
        draft = Draft(self._tokenizer)
        draft.scaffold(block)
        return [*self._think_end, *draft.ids().tolist()]


def _specs(tools: Sequence[Tool]) -> list[Json]:
    """The tools, none where one of them cannot be written: the model was shown them long ago, if at all."""
    try:
        return [tool_spec(tool) for tool in tools]
    except InvalidRequest:
        return []


def _attempt(call: ParsedCall) -> Attempt:
    """The library takes anything for a name that JSON has in its place, half of a surrogate pair too."""
    name: object = call.name
    if call.status != "ok" or not isinstance(name, str) or not name or not name.isprintable():
        return Attempt("", None, call.raw)
    return Attempt(name, json_object(call.arguments), call.raw)


def _numbered(messages: Sequence[Message]) -> dict[str, str]:
    calls = [call for message in messages for call in message.tool_calls]
    return {call.id: f"functions.{call.name}:{number}" for number, call in enumerate(calls)}


def _takes_late_system(library: Library) -> bool:
    try:
        library.render_ids([PROBE, {"role": "system", "content": "?"}, PROBE], tools=None, add_generation_prompt=True)
    except Exception:  # see above
        return False
    return True
