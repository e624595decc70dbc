"""One conversation in every dialect: what an agent sends in the middle of its work.

A first request brings the whole history; every measured one goes on from the answer to it with a short message of its own, as a
harness does. A `Template` is such a request, ready to be sent over and over with another number in its last message.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]

SIZES = {"small": 0, "medium": 98_000, "large": 490_000}  # characters of history
NUMBER = "000000"
FOLLOW_UP = f"Go on with part {NUMBER}."
_WORDS = (
    "the parser reads each block and keeps its offset while a second pass checks order types bounds names of fields "
    "in return for value error path line import class self test assert module index buffer length start end node"
).split()


@dataclass(frozen=True)
class Step:
    """A tool call of the agent and what came of it."""

    number: int
    said: str
    path: str
    result: str

    @property
    def call_id(self) -> str:
        return f"call_{self.number:08d}"

    @property
    def arguments(self) -> Json:
        return {"path": self.path, "offset": self.number * 40, "limit": 40}

    @property
    def arguments_text(self) -> str:
        return msgspec.json.encode(self.arguments).decode()


@dataclass(frozen=True)
class Conversation:
    """A history without a dialect. A small one has neither system prompt nor tools."""

    system: str
    task: str
    steps: tuple[Step, ...]
    tools: tuple[Json, ...]


@dataclass(frozen=True)
class Template:
    """A request whose last message holds a number that the sender chooses."""

    before: bytes
    after: bytes

    def request(self, number: int) -> bytes:
        return b"%s%06d%s" % (self.before, number, self.after)


@dataclass(frozen=True)
class Dialect:
    """How a conversation is asked for in one API.

    Attributes:
        path, stream_path: below the base URL.
        first: body of the first request.
        follow: the body that goes on from a body and the answer to it.
        streaming: what is added to a body so that the answer is streamed.
        ended: stands in the last event of every streamed answer.
        headers: that the API's clients always send.
    """

    name: str
    path: str
    stream_path: str
    first: Callable[[Conversation], Json]
    follow: Callable[[Json, Json], Json]
    streaming: Json
    ended: bytes
    headers: str = ""

    def template(self, prefix: str, body: Json, *, stream: bool) -> Template:
        """`body` as a request below the path `prefix`."""
        path = prefix + (self.stream_path if stream else self.path)
        before, _, after = post(path, body | self.streaming if stream else body, self.headers).rpartition(NUMBER.encode())
        return Template(before, after)


def post(path: str, body: Json, headers: str = "") -> bytes:
    """An HTTP request."""
    encoded = msgspec.json.encode(body)
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nauthorization: Bearer none\r\n"
        f"{headers}content-length: {len(encoded)}\r\n\r\n"
    ).encode() + encoded


def conversation(size: str) -> Conversation:
    """The history of a size in `SIZES`."""
    if not SIZES[size]:
        return Conversation("", "Say in a few sentences how far you are.", (), ())
    words = _Prose()
    tools = tuple(_tool(name, words) for name in ("read", "write", "edit", "bash", "grep", "find"))
    system = words.take(4000)
    steps: list[Step] = []
    length = len(system) + sum(len(msgspec.json.encode(tool)) for tool in tools)
    while length < SIZES[size]:
        number = len(steps)
        steps.append(Step(number, words.take(160), f"src/package_{number % 7}/module_{number}.py", words.take(1800)))
        length += 2230
    return Conversation(system, "Repair the failing test, and say what was wrong.", tuple(steps), tools)


class _Prose:
    """Text that never repeats a line."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def take(self, length: int) -> str:
        lines: list[str] = []
        while sum(map(len, lines)) < length:
            number = next(self._numbers)
            places = (number * 31 + place * (7 + number % 5) for place in range(11))
            lines.append(" ".join(_WORDS[place % len(_WORDS)] for place in places) + f" {number}\n")
        return "".join(lines)[:length]


def _tool(name: str, words: _Prose) -> Json:
    properties = {
        "path": {"type": "string", "description": words.take(90)},
        "offset": {"type": "integer", "description": words.take(60)},
        "limit": {"type": "integer", "description": words.take(60)},
    }
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    return {"name": name, "description": words.take(300), "parameters": schema}


# --- OpenAI Chat ------------------------------------------------------------------------------------------------------


def _chat_first(talk: Conversation) -> Json:
    messages: list[Json] = [{"role": "system", "content": talk.system}] if talk.system else []
    messages.append({"role": "user", "content": talk.task})
    for step in talk.steps:
        function = {"name": "read", "arguments": step.arguments_text}
        call = {"id": step.call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": step.said, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": step.call_id, "content": step.result})
    tools = {"tools": [{"type": "function", "function": tool} for tool in talk.tools]} if talk.tools else {}
    return {"model": "policy", "messages": messages, **tools}


def _chat_follow(body: Json, reply: Json) -> Json:
    said = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    return body | {"messages": [*body["messages"], said, {"role": "user", "content": FOLLOW_UP}]}


# --- OpenAI Responses -------------------------------------------------------------------------------------------------


def _responses_first(talk: Conversation) -> Json:
    items: list[Json] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": talk.task}]}]
    for step in talk.steps:
        said = [{"type": "output_text", "text": step.said}]
        items.append({"type": "message", "role": "assistant", "content": said})
        items.append({"type": "function_call", "call_id": step.call_id, "name": "read", "arguments": step.arguments_text})
        items.append({"type": "function_call_output", "call_id": step.call_id, "output": step.result})
    tools = {"tools": [{"type": "function", **tool} for tool in talk.tools]} if talk.tools else {}
    system = {"instructions": talk.system} if talk.system else {}
    return {"model": "policy", "input": items, "store": False, **system, **tools}


def _responses_follow(body: Json, reply: Json) -> Json:
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": FOLLOW_UP}]}
    return body | {"input": [*body["input"], *reply["output"], asked]}


# --- Anthropic Messages -----------------------------------------------------------------------------------------------


def _anthropic_first(talk: Conversation) -> Json:
    messages: list[Json] = [{"role": "user", "content": talk.task}]
    for step in talk.steps:
        use = {"type": "tool_use", "id": step.call_id, "name": "read", "input": step.arguments}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": step.said}, use]})
        result = {"type": "tool_result", "tool_use_id": step.call_id, "content": step.result}
        messages.append({"role": "user", "content": [result]})
    tools = {"tools": [_renamed(tool, "input_schema") for tool in talk.tools]} if talk.tools else {}
    system = {"system": [{"type": "text", "text": talk.system}]} if talk.system else {}
    return {"model": "policy", "messages": messages, "max_tokens": 4096, **system, **tools}


def _anthropic_follow(body: Json, reply: Json) -> Json:
    said = {"role": "assistant", "content": reply["content"]}
    return body | {"messages": [*body["messages"], said, {"role": "user", "content": [{"type": "text", "text": FOLLOW_UP}]}]}


# --- Gemini -----------------------------------------------------------------------------------------------------------


def _gemini_first(talk: Conversation) -> Json:
    contents: list[Json] = [{"role": "user", "parts": [{"text": talk.task}]}]
    for step in talk.steps:
        call = {"functionCall": {"id": step.call_id, "name": "read", "args": step.arguments}}
        contents.append({"role": "model", "parts": [{"text": step.said}, call]})
        answer = {"id": step.call_id, "name": "read", "response": {"output": step.result}}
        contents.append({"role": "user", "parts": [{"functionResponse": answer}]})
    declared = [_renamed(tool, "parametersJsonSchema") for tool in talk.tools]
    tools = {"tools": [{"functionDeclarations": declared}]} if declared else {}
    system = {"systemInstruction": {"parts": [{"text": talk.system}]}} if talk.system else {}
    return {"contents": contents, **system, **tools}


def _gemini_follow(body: Json, reply: Json) -> Json:
    asked = {"role": "user", "parts": [{"text": FOLLOW_UP}]}
    return body | {"contents": [*body["contents"], reply["candidates"][0]["content"], asked]}


def _renamed(tool: Json, schema: str) -> Json:
    return {"name": tool["name"], "description": tool["description"], schema: tool["parameters"]}


_GEMINI = "/v1beta/models/policy:"
_STREAM: Json = {"stream": True}
CHAT = Dialect(
    *("chat", "/v1/chat/completions", "/v1/chat/completions", _chat_first, _chat_follow),
    streaming={"stream": True, "stream_options": {"include_usage": True}},
    ended=b"[DONE]",
)
DIALECTS = (
    CHAT,
    Dialect("responses", "/v1/responses", "/v1/responses", _responses_first, _responses_follow, _STREAM, b"response.completed"),
    Dialect(
        *("anthropic", "/v1/messages", "/v1/messages", _anthropic_first, _anthropic_follow, _STREAM, b"message_stop"),
        headers="anthropic-version: 2023-06-01\r\n",
    ),
    Dialect(
        *("gemini", f"{_GEMINI}generateContent", f"{_GEMINI}streamGenerateContent?alt=sse", _gemini_first, _gemini_follow),
        streaming={},
        ended=b"finishReason",
    ),
)
