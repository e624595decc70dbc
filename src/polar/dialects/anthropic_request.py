"""Requests of Anthropic Messages, read into the pivot.

Only what is malformed is refused. What no policy is given (server tools, blocks of other sorts, efforts) is left out and
noted by name: Claude Code answers a 400 by giving up features for the rest of its session, so a refusal would change what
it does. `cache_control` hops from block to block between requests and means nothing here: it is noted, and dropped.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from polar.chat import ChatRequest, ImagePart, Message, Part, RequestedSampling, TextPart, Tool, ToolCall
from polar.dialects.anthropic_reply import read_input
from polar.dialects.bodies import NULL, Memory, decode, decode_field, parts_of, shortened
from polar.errors import InvalidRequest
from polar.ids import parse_minted

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_LONGEST_NAME = 80  # characters of a name that the harness chose and a note repeats
_KNOWN_OF_TOOL = {"type", "name", "description", "input_schema", "cache_control", "eager_input_streaming"}


class _Message(Struct):
    role: str
    content: str | list[Raw] | None = None


class _ToolChoice(Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Body(Struct):
    messages: Raw
    model: str = ""
    system: str | list[Raw] | None = None
    tools: Raw = NULL
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    max_tokens: Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    stream: bool | None = None
    cache_control: Raw = NULL


class _Head(Struct):
    """What blocks and tools of every sort have."""

    type: str | None = None
    cache_control: Raw = NULL


class _Text(Struct):
    text: str


class _Thinking(Struct):
    thinking: str
    signature: str | None = None


class _Redacted(Struct):
    data: str


class _ToolUse(Struct):
    id: str
    name: str
    input: Raw = Raw(b"{}")


class _ToolResult(Struct):
    tool_use_id: str
    content: str | list[Raw] | None = None
    is_error: bool | None = None


class _Source(Struct):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[Raw] | None = None


class _Sourced(Struct):
    source: _Source
    title: str | None = None


class _ToolReference(Struct):
    tool_name: str


class _Tool(Struct):
    name: str
    description: str | None = None
    input_schema: Raw = Raw(b"{}")


class _Format(Struct):
    type: str
    schema: Raw = NULL


class _Edit(Struct):
    keep: Raw = NULL


class _Block(Struct, frozen=True):
    path: str
    kind: str
    raw: Raw


_NOT_KEPT = {*_Body.__struct_fields__, "mcp_servers"}  # servers come with their tokens (D20)


class _Said(Struct, frozen=True):
    """What one message or tool of the request comes to."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    unserved: tuple[str, ...] = ()
    normalised: tuple[str, ...] = ()


def parse_request(body: bytes, memory: Memory) -> ChatRequest:
    """The body of a `generate` or `count_tokens` request as pivot.

    Raises:
        InvalidRequest: malformed; the message names the field.
    """
    fields, wire = decode(body, _Body, ("messages", "tools"))
    wires = decode_field("messages", fields["messages"], list[Raw])
    if not wires:
        raise InvalidRequest("messages: expected at least one message")
    reader = _Reader()
    system = reader.system(wire.system)
    messages = reader.take(memory.each(b"anthropic message", wires, _message)).messages
    offered = parts_of("tools", fields.get("tools", NULL))
    tools = reader.take(memory.each(b"anthropic tool", offered, _offered)).tools
    choice = reader.tool_choice(wire.tool_choice, tools)
    sampling = RequestedSampling(
        wire.temperature, wire.top_p, wire.top_k, wire.max_tokens, stop=reader.stop(wire.stop_sequences or [])
    )
    schema = reader.other_fields(fields)
    if _said(wire.cache_control):
        reader.normalised["cache_control"] = None
    return ChatRequest(
        model=wire.model,
        messages=system + messages,
        tools=() if choice == "none" else tools,
        sampling=sampling,
        stream=bool(wire.stream),
        tool_choice=choice,
        json_schema=schema,
        unserved=tuple(reader.unserved),
        normalised=tuple(reader.normalised),
        extra={name: raw.copy() for name, raw in fields.items() if name not in _NOT_KEPT},
    )


class _Reader:
    """Reads the parts of one request, and notes by name what it leaves out.

    Attributes:
        unserved, normalised: those names, each once, in the order in which they were met.
    """

    def __init__(self) -> None:
        self.unserved: dict[str, None] = {}
        self.normalised: dict[str, None] = {}

    def system(self, content: str | list[Raw] | None) -> tuple[Message, ...]:
        """The system prompt: each block is a part of one message, as some blocks differ between agents of one harness."""
        parts = self._parts(self._blocks("system", content))
        return (Message("system", parts),) if parts else ()

    def take(self, all_said: Sequence[_Said]) -> _Said:
        """Several parts of a request as one, noting what they left out."""
        for said in all_said:
            if said.unserved or said.normalised:
                self.unserved |= dict.fromkeys(said.unserved)
                self.normalised |= dict.fromkeys(said.normalised)
        messages = [message for said in all_said for message in said.messages]
        return _Said(tuple(messages), tuple([tool for said in all_said for tool in said.tools]))

    def message(self, path: str, wire: _Message) -> tuple[Message, ...]:
        """What one of Anthropic's messages says: tool results are messages of their own."""
        blocks = self._blocks(f"{path}.content", wire.content)
        if wire.role == "user":
            return self._user(blocks)
        if wire.role == "assistant":
            return (self._assistant(blocks),)
        if wire.role == "system":
            return (Message("system", self._parts(blocks)),)
        raise InvalidRequest(f"{path}.role: expected one of user, assistant, system, got {shortened(wire.role)}")

    def tool(self, path: str, raw: Raw) -> tuple[Tool, ...]:
        """A tool that the harness runs itself; those of Anthropic's servers are left out."""
        kind = self._head(path, raw).type or "custom"
        if kind == "custom":
            return (self._tool(path, raw),)
        self._note(f"tool:{kind}")
        return ()

    def tool_choice(self, wire: _ToolChoice | None, tools: tuple[Tool, ...]) -> str:
        if wire is None:
            return "auto"
        if wire.disable_parallel_tool_use:
            self._note("parallel_tool_calls")
        if wire.type in ("auto", "none"):
            return wire.type
        if wire.type not in ("any", "tool"):
            raise InvalidRequest(f"tool_choice.type: expected one of auto, any, tool, none, got {shortened(wire.type)}")
        names = {tool.name for tool in tools}
        if names and wire.type == "any":
            return "required"
        if wire.name in names:
            return wire.name
        self._note("tool_choice")  # of a tool that the policy is not given
        return "auto"

    def stop(self, texts: list[str]) -> tuple[str, ...]:
        """Stop texts; those of nothing but whitespace, which Anthropic refuses, would end nearly every reply."""
        if any(not text.strip() for text in texts):
            self._note("stop_sequences")
        return tuple(text for text in texts if text.strip())

    def other_fields(self, fields: dict[str, Raw]) -> Raw | None:
        """Note what the fields that are only kept would have asked for; the JSON schema of the reply, if one of them has it."""
        if "budget_tokens" in self._options(fields, "thinking"):
            self._note("thinking")
        for name in ("mcp_servers", "container"):
            if bytes(fields.get(name, NULL)) not in (b"null", b"[]"):
                self._note(name)
        edits = self._options(fields, "context_management").get("edits", Raw(b"[]"))
        if any(bytes(edit.keep) != b'"all"' for edit in decode_field("context_management.edits", edits, list[_Edit])):
            self._note("context_management")
        options = self._options(fields, "output_config")
        for name in options:
            if name != "format":
                self._note(name)
        return self._schema("output_config.format", options.get("format", fields.get("output_format", NULL)))

    def _schema(self, path: str, raw: Raw) -> Raw | None:
        if not _said(raw):
            return None
        form = decode_field(path, raw, _Format)
        if form.type != "json_schema" or not _said(form.schema):
            self._note("output_format")
            return None
        return form.schema.copy()

    def _options(self, fields: dict[str, Raw], name: str) -> dict[str, Raw]:
        """The options that a field says something about."""
        field = fields.get(name, NULL)
        options = decode_field(name, field, dict[str, Raw]) if _said(field) else {}
        return {option: raw for option, raw in options.items() if _said(raw)}

    def _user(self, blocks: Iterator[_Block]) -> tuple[Message, ...]:
        """Each tool result is a message of its own, and so is what stands between them."""
        messages: list[Message] = []
        parts: list[Part] = []
        for block in blocks:
            if block.kind == "tool_result":
                messages += [Message("user", tuple(parts))] if parts else []
                messages.append(self._tool_result(block))
                parts = []
            else:
                parts += self._part(block)
        return tuple(messages) if messages and not parts else (*messages, Message("user", tuple(parts)))

    def _assistant(self, blocks: Iterator[_Block]) -> Message:
        parts: list[Part] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        minted: list[str] = []
        for block in blocks:
            if block.kind == "thinking":
                thinking = decode_field(block.path, block.raw, _Thinking)
                reasoning.append(thinking.thinking)
                minted.append(thinking.signature or "")
            elif block.kind == "redacted_thinking":
                self._note("block:redacted_thinking")
                minted.append(decode_field(block.path, block.raw, _Redacted).data)
            elif block.kind == "tool_use":
                calls.append(_tool_call(block))
            else:
                parts += self._part(block)
        ours = tuple(dict.fromkeys(value for value in minted if parse_minted(value)))
        return Message("assistant", tuple(parts), "".join(reasoning), tuple(calls), minted=ours)

    def _tool_result(self, block: _Block) -> Message:
        wire = decode_field(block.path, block.raw, _ToolResult)
        parts = self._parts(self._blocks(f"{block.path}.content", wire.content))
        return Message("tool", parts, tool_call_id=wire.tool_use_id, is_error=bool(wire.is_error))

    def _parts(self, blocks: Iterator[_Block]) -> tuple[Part, ...]:
        return tuple(part for block in blocks for part in self._part(block))

    def _part(self, block: _Block) -> tuple[Part, ...]:
        """What the policy is shown of a block that may stand in any message."""
        if block.kind == "text":
            return _text(decode_field(block.path, block.raw, _Text).text)
        if block.kind == "image":
            return self._image(decode_field(block.path, block.raw, _Sourced).source)
        if block.kind == "document":
            return self._document(block.path, decode_field(block.path, block.raw, _Sourced))
        self._note(f"block:{block.kind}")
        if block.kind == "tool_reference":
            return _text(f"[tool {decode_field(block.path, block.raw, _ToolReference).tool_name}]")
        return ()

    def _image(self, source: _Source) -> tuple[Part, ...]:
        if source.type == "base64":
            return (ImagePart(source.media_type, source.data),)
        if source.type == "url":
            return (ImagePart(url=source.url),)
        self._note("block:image")  # a file on Anthropic's servers
        return _text("[image]")

    def _document(self, path: str, wire: _Sourced) -> tuple[Part, ...]:
        if wire.source.type == "text":
            return _text(wire.source.data)
        if wire.source.type == "content":
            return self._parts(self._blocks(f"{path}.source.content", wire.source.content))
        self._note("block:document")
        return _text(f"[document {wire.title or wire.source.media_type or wire.source.url or wire.source.type}]")

    def _tool(self, path: str, raw: Raw) -> Tool:
        wire = decode_field(path, raw, _Tool)
        for name, value in decode_field(path, raw, dict[str, Raw]).items():
            if name not in _KNOWN_OF_TOOL and bytes(value) not in (b"null", b"false"):
                self._note(name)
        return Tool(wire.name, wire.description or "", wire.input_schema.copy())

    def _blocks(self, path: str, content: str | list[Raw] | None) -> Iterator[_Block]:
        """The blocks of a content; a string is one block of text."""
        if isinstance(content, str):
            yield _Block(path, "text", Raw(msgspec.json.encode({"text": content})))
            return
        for index, raw in enumerate(content or []):
            place = f"{path}[{index}]"
            kind = self._head(place, raw).type
            if kind is None:
                raise InvalidRequest(f"{place}.type: expected the name of a block, got none")
            yield _Block(place, kind, raw)

    def _head(self, path: str, raw: Raw) -> _Head:
        head = decode_field(path, raw, _Head)
        if _said(head.cache_control):
            self.normalised["cache_control"] = None
        return head

    def _note(self, name: str) -> None:
        self.unserved[name[:_LONGEST_NAME]] = None


def _message(index: int, raw: Raw) -> _Said:
    path, reader = f"messages[{index}]", _Reader()
    messages = reader.message(path, decode_field(path, raw, _Message))
    return _Said(messages, (), tuple(reader.unserved), tuple(reader.normalised))


def _offered(index: int, raw: Raw) -> _Said:
    reader = _Reader()
    tools = reader.tool(f"tools[{index}]", raw)
    return _Said((), tools, tuple(reader.unserved), tuple(reader.normalised))


def _said(raw: Raw) -> bool:
    return bytes(raw) != b"null"


def _text(text: str) -> tuple[Part, ...]:
    return (TextPart(text),) if text else ()


def _tool_call(block: _Block) -> ToolCall:
    wire = decode_field(block.path, block.raw, _ToolUse)
    if not _said(wire.input):
        return ToolCall(wire.id, wire.name, "{}")
    decode_field(f"{block.path}.input", wire.input, dict[str, Raw])
    arguments = msgspec.json.format(bytes(wire.input), indent=-1).decode()
    return ToolCall(wire.id, wire.name, read_input(wire.id, arguments))
