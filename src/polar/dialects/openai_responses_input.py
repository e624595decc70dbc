"""Input items of OpenAI's Responses API, read as messages.

One reply comes back as several items: reasoning, message, calls. Items that follow each other are one assistant message,
unless identifiers that we minted name different replies, or reasoning begins anew. A harness may put a call's output before
the next call of the same reply: only our identifiers tell that from a new reply, and nothing else is guessed.
"""

from collections.abc import Sequence

from msgspec import Raw, Struct

from polar.chat import Message, Part, Role, TextPart, Tool, ToolCall
from polar.dialects.bodies import Memory, decode_field, shortened
from polar.dialects.openai_common import image_part
from polar.dialects.openai_responses_config import Dropped, ReasoningConfig, TextConfig
from polar.dialects.openai_responses_tools import custom_arguments, flat_name, read_tools
from polar.errors import InvalidRequest
from polar.ids import parse_minted

_ROLES: dict[str, Role] = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_PARAGRAPH = "\n\n"  # between parts of reasoning


class _Kind(Struct):
    type: str | None = None
    role: str | None = None


class _Part(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


Content = str | list[_Part] | None


class _Message(Struct):
    role: str
    content: Content = None
    id: str | None = None


class _Reasoning(Struct):
    summary: list[_Part] | None = None
    content: list[_Part] | None = None
    encrypted_content: str | None = None
    id: str | None = None


class _FunctionCall(Struct):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None
    id: str | None = None


class _CustomCall(Struct):
    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None
    id: str | None = None


class _Output(Struct):
    call_id: str | None = None
    output: Content = None


class _Reference(Struct):
    id: str


class _Configuration(Struct):
    instructions: str | None = None
    tools: list[Raw] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None


class _Said(Struct, frozen=True):
    """One assistant-side item. `identifiers` are all that it carries, the most telling first."""

    identifiers: tuple[str | None, ...]
    reasoning: str | None = None
    content: tuple[Part, ...] = ()
    call: ToolCall | None = None

    @property
    def minted(self) -> tuple[str, ...]:
        return tuple(value for value in self.identifiers if value and parse_minted(value))

    @property
    def reply(self) -> tuple[str, int] | None:
        """The call and choice that made it, if it says so."""
        return parse_minted(self.minted[0]) if self.minted else None


class _Item(Struct, frozen=True):
    """An item as far as it can be read alone: what it says, a configuration as its JSON; and names of what is dropped."""

    what: _Said | Message | _Reference | Raw | None
    dropped: tuple[str, ...]


class _Turn:
    """One assistant message while its items arrive, and the tool messages that answer it."""

    def __init__(self) -> None:
        self.outputs: list[Message] = []
        self._reply: tuple[str, int] | None = None
        self._answering = False  # something came that is not reasoning
        self._reasoning: list[str] = []
        self._content: list[Part] = []
        self._calls: list[ToolCall] = []
        self._minted: dict[str, None] = {}

    def takes(self, said: _Said) -> bool:
        """Whether an item belongs to this reply."""
        if said.reply and self._reply:
            return said.reply == self._reply
        return not self.outputs and not (self._answering and said.reasoning is not None)

    def add(self, said: _Said) -> None:
        self._reply = self._reply or said.reply
        self._answering = self._answering or said.reasoning is None
        self._reasoning += [said.reasoning] if said.reasoning else []
        self._content += said.content
        self._calls += [said.call] if said.call else []
        tool_call = said.call.id if said.call else ""
        self._minted |= {value: None for value in said.minted if value != tool_call}

    def messages(self) -> list[Message]:
        said = Message(
            "assistant",
            tuple(self._content),
            _PARAGRAPH.join(self._reasoning),
            tuple(self._calls),
            minted=tuple(self._minted),
        )
        return [said, *self.outputs]


class InputItems:
    """Reads a request's items in order. `messages` and `tools` are what they say, `json_schema` is what they make of it."""

    def __init__(self, dropped: Dropped, json_schema: Raw | None, *, follows: bool) -> None:
        """`follows`: the request follows an earlier reply, whose items it may name without repeating them."""
        self.tools: list[Tool] = []
        self.json_schema = json_schema
        self._dropped = dropped
        self._follows = follows
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self._messages, *(self._turn.messages() if self._turn else ()))

    def text(self, text: str) -> None:
        """Input that is bare text, of the user."""
        self._append(Message("user", (TextPart(text),)))

    def read(self, items: Sequence[Raw], memory: Memory) -> None:
        """
        Raises:
            InvalidRequest: an item that cannot be read, or one that is refused by name.
        """
        for index, item in enumerate(memory.each(b"responses item", items, _item)):
            for name in item.dropped:
                self._dropped.add(name)
            self._take(f"input[{index}]", item)

    def _take(self, place: str, item: _Item) -> None:
        match item.what:
            case _Said() as said:
                self._say(said)
            case Message(role="tool") as output if self._turn:
                self._turn.outputs.append(output)
            case Message() as message:
                self._append(message)
            case _Reference() as reference:
                self._reference(place, reference)
            case Raw() as configuration:
                self._configure(place, decode_field(place, configuration, _Configuration))

    def _reference(self, place: str, wire: _Reference) -> None:
        if not (self._follows and parse_minted(wire.id)):
            raise InvalidRequest(f"{place}: the item {shortened(wire.id)} is not kept here; send the item itself")

    def _configure(self, place: str, wire: _Configuration) -> None:
        self.tools += read_tools(f"{place}.tools", wire.tools or (), self._dropped)
        if wire.instructions:
            self._append(Message("system", (TextPart(wire.instructions),)))
        if wire.text is not None:
            self.json_schema = wire.text.json_schema(self._dropped)
        if wire.reasoning is not None:
            wire.reasoning.drop(self._dropped)

    def _say(self, said: _Said) -> None:
        if self._turn is None or not self._turn.takes(said):
            self._close()
            self._turn = _Turn()
        self._turn.add(said)

    def _append(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def _close(self) -> None:
        if self._turn:
            self._messages += self._turn.messages()
            self._turn = None


def _item(index: int, raw: Raw) -> _Item:
    dropped = Dropped()
    return _Item(_what(f"input[{index}]", raw, dropped), dropped.names)


def _what(place: str, raw: Raw, dropped: Dropped) -> _Said | Message | _Reference | Raw | None:
    kind = decode_field(place, raw, _Kind)
    match kind.type or ("message" if kind.role is not None else None):
        case "message":
            return _message(place, decode_field(place, raw, _Message), dropped)
        case "reasoning":
            return _reasoned(decode_field(place, raw, _Reasoning))
        case "function_call":
            call = decode_field(place, raw, _FunctionCall)
            return _called(call, call.arguments)
        case "custom_tool_call":
            custom = decode_field(place, raw, _CustomCall)
            return _called(custom, custom_arguments(custom.input, custom.id))
        case "function_call_output" | "custom_tool_call_output":
            wire = decode_field(place, raw, _Output)
            return Message("tool", _content(f"{place}.output", wire.output, dropped), tool_call_id=wire.call_id or "")
        case "item_reference":
            return decode_field(place, raw, _Reference)
        case "additional_tools" | "configuration_update":
            return raw.copy()
        case None:
            raise InvalidRequest(f"{place}: expected an item with a `type`, or a message with a `role`")
        case unknown:
            dropped.add(f"input:{unknown}")
            return None


def _message(place: str, wire: _Message, dropped: Dropped) -> _Said | Message:
    role = _ROLES.get(wire.role)
    if role is None:
        raise InvalidRequest(f"{place}.role: expected one of {', '.join(_ROLES)}, got {shortened(wire.role)}")
    content = _content(f"{place}.content", wire.content, dropped)
    if role == "assistant":
        return _Said((wire.id,), content=tuple(part for part in content if part.text))
    return Message(role, content)


def _reasoned(wire: _Reasoning) -> _Said:
    texts = [part.text for part in (*(wire.summary or ()), *(wire.content or ())) if part.text]
    return _Said((wire.encrypted_content, wire.id), reasoning=_PARAGRAPH.join(texts))


def _called(wire: _FunctionCall | _CustomCall, arguments: str) -> _Said:
    call = ToolCall(wire.call_id, flat_name(wire.name, wire.namespace), arguments)
    return _Said((wire.call_id, wire.id), call=call)


def _content(place: str, wire: Content, dropped: Dropped) -> tuple[Part, ...]:
    if isinstance(wire, str):
        return (TextPart(wire),) if wire else ()
    parts = [_part(f"{place}[{index}]", part, dropped) for index, part in enumerate(wire or ())]
    return tuple(part for part in parts if part is not None)


def _part(place: str, wire: _Part, dropped: Dropped) -> Part | None:
    if wire.type in ("input_text", "output_text", "text", "refusal"):
        return TextPart(wire.text or wire.refusal or "")
    if wire.type == "input_image" and wire.image_url is not None:
        return image_part(f"{place}.image_url", wire.image_url)
    dropped.add(f"part:{wire.type}")
    return None
