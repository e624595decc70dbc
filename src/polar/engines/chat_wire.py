"""Chat Completions as a client speaks it: messages written, and a reply read, streamed or whole. No I/O.

What the server says is passed on as it is or refused by name: ids and log-probabilities are paired by place, never invented.
"""

import math
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Raw, Struct

from polar.chat import Delta, ImagePart, Message, Part, ReasoningDelta, TextDelta, Tool, ToolCall, Usage
from polar.engines.protocol import Chatted, EngineFinish, Generated
from polar.engines.streaming import Events
from polar.errors import EngineError
from polar.recent import Recent
from polar.specs import Int32Array, VersionSpan
from polar.tokens.rendering import ParsedReply

WRITTEN = 16_000_000  # bytes of messages that are remembered, in each of two generations
PROMPT_KEY = b'"prompt_token_ids":['
FINISHES: dict[str, EngineFinish] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "content_filter": "stop",
    "length": "length",
    "abort": "abort",
}

PromptReader = Callable[[bytes], Int32Array]  # takes the ids' text between its brackets


class MessageWriter:
    """Writes histories in OpenAI's form, a message that comes again without writing it again.

    Args:
        reasoning_field: where the server looks for earlier reasoning.
    """

    def __init__(self, reasoning_field: str) -> None:
        self._reasoning_field = reasoning_field
        self._written: Recent[Message, bytes] = Recent(WRITTEN)

    def write(self, messages: Iterable[Message]) -> Raw:
        """A JSON array of messages."""
        known = self._written
        return Raw(b"[" + b",".join([known.get(message) or self._write(message) for message in messages]) + b"]")

    def _write(self, message: Message) -> bytes:
        if (known := self._written.older(message)) is not None:
            return known
        written = msgspec.json.encode(_message(message, self._reasoning_field))
        return self._written.keep(message, written, len(written))


def write_tools(tools: Iterable[Tool]) -> list[dict[str, object]]:
    """Tools in OpenAI's form, their schemas byte for byte."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def write_tool_choice(choice: str) -> object:
    """`auto` and `required`, or the tool that must be called."""
    return choice if choice in ("auto", "required", "none") else {"type": "function", "function": {"name": choice}}


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, gc=False):
    index: int | None = None
    function: _Function | None = None


class _Said(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Entry(Struct, gc=False):
    logprob: float | None = None


class _Logprobs(Struct):
    content: list[_Entry] | None = None


class _Choice(Struct):
    delta: _Said | None = None
    message: _Said | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Error(Struct):
    message: str = ""


class _Reply(Struct):
    """A whole reply, or one event of a streamed one."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | str | None = None


_REPLY = msgspec.json.Decoder(_Reply)
_REPLIES = msgspec.json.Decoder(list[_Reply])


class ChatReply:
    """One reply without its I/O. What comes with and after the finish reason is held until the end, because the usage comes last.

    Args:
        read_prompt: turns the ids of the prompt into an array; None for a server that shows no ids.

    Attributes:
        sampled: how many tokens have come.
    """

    def __init__(self, read_prompt: PromptReader | None = None) -> None:
        self.sampled = 0
        self._read_prompt = read_prompt
        self._prompt: Int32Array | None = None
        self._prompt_told = False
        self._events = Events()
        self._spoken = _Spoken()
        self._deltas: list[Delta] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: EngineFinish | None = None
        self._usage: Usage | None = None

    def feed(self, data: bytes) -> Chatted | None:
        """What all events say that `data` completes; None if there is nothing to give yet."""
        events = self._events.feed(data)
        if not events:
            return None
        for reply in _REPLIES.decode(b"[" + b",".join(map(self._without_prompt, events)) + b"]"):
            self._take(reply)
        if self._finish is not None or not (self._ids or self._deltas or self._prompt is not None):
            return None
        return self._chatted(Generated(tuple(self._ids), tuple(self._logprobs)))

    def whole(self, body: bytes) -> None:
        """A reply that came in one piece; `end` gives it."""
        self._take(_REPLY.decode(self._without_prompt(body)))

    def end(self, versions: tuple[VersionSpan, ...] = ()) -> Chatted:
        """What is left, with the finish reason, the usage, and the whole reply as the server parsed it.

        Raises:
            EngineError: there was no finish reason, or no prompt.
        """
        if self._finish is None and self._usage is not None and not self.sampled + self._usage.completion_tokens:
            self._finish = "abort"  # before the first token, of which vLLM says nothing but the usage
        if self._finish is None:
            raise EngineError("the engine's reply ended without a finish reason")
        if self._read_prompt is not None and not self._prompt_told:
            raise EngineError("T08: the engine told no ids of the prompt: is it too old to know `return_token_ids`?")
        last = Generated(tuple(self._ids), tuple(self._logprobs), self._finish, versions, self._usage)
        return self._chatted(last, self._spoken.parsed())

    def _chatted(self, tokens: Generated, parsed: ParsedReply | None = None) -> Chatted:
        chatted = Chatted(tokens, tuple(self._deltas), self._prompt, parsed)
        self._ids.clear()
        self._logprobs.clear()
        self._deltas.clear()
        self._prompt = None
        return chatted

    def _without_prompt(self, event: bytes) -> bytes:
        """The event without the prompt's ids, which are read apart: they may be most of it."""
        if self._read_prompt is None or self._prompt_told or (found := event.find(PROMPT_KEY)) < 0:
            return event
        start = found + len(PROMPT_KEY)
        end = event.index(b"]", start)
        self._prompt = self._read_prompt(event[start:end])
        self._prompt_told = True
        return event[:start] + event[end:]

    def _take(self, reply: _Reply) -> None:
        if reply.error is not None:
            why = reply.error if isinstance(reply.error, str) else reply.error.message
            raise EngineError(f"the engine failed in mid-stream: {why}")
        if reply.usage is not None:
            self._usage = reply.usage
        for choice in reply.choices:
            if (said := choice.delta or choice.message) is not None:
                self._deltas += self._spoken.take(said)
            if self._read_prompt is not None:
                self._take_tokens(choice)
            if choice.finish_reason is not None:
                self._finish = _finish(choice.finish_reason)

    def _take_tokens(self, choice: _Choice) -> None:
        ids = choice.token_ids or []
        entries = (choice.logprobs.content if choice.logprobs else None) or []
        if len(ids) != len(entries):
            raise EngineError(f"T08: the engine sent {len(ids)} token ids with {len(entries)} log-probabilities")
        self.sampled += len(ids)
        self._ids += ids
        self._logprobs += [math.nan if entry.logprob is None else entry.logprob for entry in entries]


class _Spoken:
    """What a reply has said so far."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}  # name, and its arguments piece by piece

    def take(self, said: _Said) -> list[Delta]:
        """Note what is said; give its text and reasoning."""
        deltas: list[Delta] = []
        if reasoning := said.reasoning or said.reasoning_content:
            self._reasoning.append(reasoning)
            deltas.append(ReasoningDelta(reasoning))
        if said.content:
            self._text.append(said.content)
            deltas.append(TextDelta(said.content))
        for call in said.tool_calls or ():
            self._take_call(call)
        return deltas

    def parsed(self) -> ParsedReply:
        """The whole reply. A call whose arguments are no JSON object stays as it is, with a finding (T16)."""
        calls = tuple((name, "".join(arguments)) for name, *arguments in self._calls.values())
        odd = any(not _is_object(arguments) for _, arguments in calls)
        return ParsedReply("".join(self._text), "".join(self._reasoning), calls, ("tool_parse_error",) if odd else ())

    def _take_call(self, call: _Call) -> None:
        function = call.function or _Function()
        place = call.index
        if place is None:  # as some servers send whole calls; a piece without a name belongs to the last
            place = len(self._calls) if function.name or not self._calls else max(self._calls)
        said = self._calls.setdefault(place, [""])
        said[0] += function.name or ""
        if function.arguments:
            said.append(function.arguments)


def _finish(reason: str) -> EngineFinish:
    if reason not in FINISHES:
        raise EngineError(f"the engine ended its reply for a reason that is unknown here: {reason!r}")
    return FINISHES[reason]


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, Raw])
    except ValueError:
        return False
    return True


def _message(message: Message, reasoning_field: str) -> dict[str, object]:
    wire: dict[str, object] = {"role": message.role, "content": _content(message.content)}
    if message.reasoning:
        wire[reasoning_field] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _content(parts: tuple[Part, ...]) -> object:
    """Text as one string: of several parts some servers make lines."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return "".join(part.text for part in parts)
    return [_image(part) if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in parts]


def _image(part: ImagePart) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": part.url or f"data:{part.media_type};base64,{part.data}"}}


def _call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _function(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if bytes(tool.parameters):
        function["parameters"] = tool.parameters
    return function
