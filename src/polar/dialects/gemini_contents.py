"""The contents of a Gemini request as messages.

Contents of the model that follow each other are one reply: the SDKs' chats keep each chunk of a stream as a content. They are
two where their signatures name two of our calls. Clients may send calls and responses without ids; then a response answers
the oldest open call of its name, and calls get the ids that their signature stands for, or else those of their place.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct

from polar.chat import ImagePart, Message, Part, TextPart, ToolCall
from polar.dialects.arguments import unwrapped
from polar.dialects.bodies import Memory, decode_field, shortened
from polar.dialects.gemini_wire import NULL, Several, base64_of, each, read
from polar.errors import InvalidRequest
from polar.ids import parse_minted, tool_call_id

Note = Callable[[str], None]

_ROLES = ("user", "model", "function", "tool")
# What says how another part is to be read; media that are images are read whole.
_ABOUT_PARTS = {"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"}
_SERVED_PARTS = {"text", "functionCall", "functionResponse", "inlineData", "fileData"}


class _Content(Struct, rename="camel"):
    role: str | None = None
    parts: Several = None


class _Part(Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: Raw = NULL
    function_response: Raw = NULL
    inline_data: Raw = NULL
    file_data: Raw = NULL


class _FunctionCall(Struct, rename="camel"):
    name: str
    id: str | None = None
    args: Raw = NULL


class _FunctionResponse(Struct, rename="camel"):
    name: str = ""
    id: str | None = None
    response: Raw = NULL
    parts: Several = None


class _Blob(Struct, rename="camel"):
    data: str
    mime_type: str | None = None


class _File(Struct, rename="camel"):
    file_uri: str
    mime_type: str | None = None


class _Answer(Struct, frozen=True):
    """What came of a call; `id` is as the client wrote it."""

    name: str
    id: str
    content: tuple[Part, ...]
    failed: bool


class _Piece(Struct, frozen=True):
    """A part of a content, as far as it can be read alone."""

    content: tuple[Part, ...]
    thought: bool
    signature: str
    call: ToolCall | None
    answer: _Answer | None


class _Spoken(Struct, frozen=True):
    """A content, as far as it can be read alone; and names of what the policy is not given of it."""

    by_model: bool
    pieces: tuple[_Piece, ...]
    unserved: tuple[str, ...]


@dataclass
class _Turn:
    """What the model said in contents that follow each other; `place` is the index of the first."""

    place: int
    content: list[Part] = field(default_factory=list)
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    minted: dict[str, None] = field(default_factory=dict)
    replies: dict[tuple[str, int], None] = field(default_factory=dict)  # that the signatures name

    def continues(self, other: "_Turn") -> bool:
        """Whether this belongs to the same reply as `other`, which is just before it."""
        return not self.replies or not other.replies or self.replies.keys() <= other.replies.keys()

    def extend(self, other: "_Turn") -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.minted |= other.minted
        self.replies |= other.replies


class _OpenCalls:
    """The calls of the last reply by name, for responses without an id. Clients send ids or none, so one by id takes nothing."""

    def __init__(self, calls: Iterable[ToolCall]) -> None:
        self._by_name: dict[str, deque[str]] = {}
        for call in calls:
            self._by_name.setdefault(call.name, deque()).append(call.id)

    def oldest(self, name: str) -> str:
        """Take the id of the oldest open call of a name; "" where there is none."""
        waiting = self._by_name.get(name)
        return waiting.popleft() if waiting else ""


class Contents:
    """Reads one request's contents in their order. `note` is told the names of what the policy is not given."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._messages: list[Message] = []
        self._turn: _Turn | None = None
        self._open = _OpenCalls(())
        self._count = 0

    def system_text(self, text: str) -> None:
        """A system instruction that is bare text."""
        self._messages.append(Message("system", (TextPart(text),)))

    def system(self, raw: Raw) -> None:
        """A system instruction that is a content."""
        path = "systemInstruction"
        parts: list[Part] = []
        for at, part in each(f"{path}.parts", read(path, raw, _Content)[1].parts):
            parts += _part(at, part, self._note)[1]
        if parts:
            self._messages.append(Message("system", tuple(parts)))

    def read(self, contents: Sequence[tuple[str, Raw]], memory: Memory) -> None:
        """
        Raises:
            InvalidRequest: a content that cannot be read.
        """
        raws = [raw for _, raw in contents]
        for spoken in memory.each(b"gemini content", raws, lambda index, raw: _spoken(contents[index][0], raw)):
            for name in spoken.unserved:
                self._note(name)
            if spoken.by_model:
                self._model(spoken.pieces)
            else:
                self._user(spoken.pieces)
            self._count += 1

    def done(self) -> tuple[Message, ...]:
        """The messages."""
        self._close()
        return tuple(self._messages)

    def _model(self, pieces: Sequence[_Piece]) -> None:
        said = _Turn(self._count)
        for piece in pieces:
            _say(said, piece)
        if self._turn is not None and said.continues(self._turn):
            self._turn.extend(said)
        else:
            self._close()
            self._turn = said

    def _close(self) -> None:
        """End the model's turn, if there is one."""
        if self._turn is None:
            return
        turn, self._turn = self._turn, None
        calls = tuple(_named(turn, index, call) for index, call in enumerate(turn.calls))
        self._messages.append(Message("assistant", _joined(turn.content), turn.reasoning, calls, minted=tuple(turn.minted)))
        self._open = _OpenCalls(calls)

    def _user(self, pieces: Sequence[_Piece]) -> None:
        self._close()
        said: list[Part] = []
        for index, piece in enumerate(pieces):
            said += piece.content
            if piece.answer is not None:
                if said:
                    self._messages.append(Message("user", tuple(said)))
                said = []
                self._messages.append(self._answered(piece.answer, index))
        if said or not pieces:
            self._messages.append(Message("user", tuple(said)))

    def _answered(self, answer: _Answer, index: int) -> Message:
        """What came of a call, under the call's id."""
        named = _own_id(answer.name, answer.id) or self._open.oldest(answer.name) or f"gemini_{self._count}_{index}"
        return Message("tool", answer.content, tool_call_id=named, is_error=answer.failed)


def _spoken(path: str, raw: Raw) -> _Spoken:
    wire = read(path, raw, _Content)[1]
    role = wire.role or "user"
    if role not in _ROLES:
        raise InvalidRequest(f"{path}.role: expected one of {', '.join(_ROLES)}, got {shortened(role)}")
    unserved: dict[str, None] = {}
    by_model = role == "model"
    pieces = [
        _piece(at, part, by_model, lambda name: unserved.update({name: None})) for at, part in each(f"{path}.parts", wire.parts)
    ]
    return _Spoken(by_model, tuple(pieces), tuple(unserved))


def _piece(path: str, raw: Raw, by_model: bool, note: Note) -> _Piece:
    wire, content = _part(path, raw, note)
    if by_model and wire.function_response != NULL:
        raise InvalidRequest(f"{path}.functionResponse: expected in a content of role user, got it from the model")
    if not by_model and wire.function_call != NULL:
        raise InvalidRequest(f"{path}.functionCall: expected in a content of role model, got it from the user")
    call = _call(f"{path}.functionCall", wire.function_call) if wire.function_call != NULL else None
    answered = wire.function_response != NULL
    answer = _answer(f"{path}.functionResponse", wire.function_response, note) if answered else None
    return _Piece(tuple(content), bool(wire.thought), base64_of(wire.thought_signature or ""), call, answer)


def _say(turn: _Turn, piece: _Piece) -> None:
    """Add a part to what the model said."""
    if named := parse_minted(piece.signature):
        turn.minted[piece.signature] = turn.replies[named] = None
    if piece.thought:
        turn.reasoning += "".join(part.text for part in piece.content)
    else:
        turn.content += [part for part in piece.content if part != TextPart("")]  # which only carries a signature
    if piece.call is not None:
        turn.calls.append(piece.call)


def _answer(path: str, raw: Raw, note: Note) -> _Answer:
    wire = read(path, raw, _FunctionResponse)[1]
    text, failed = _result(f"{path}.response", wire.response)
    content: list[Part] = [TextPart(text)] if text else []
    for at, part in each(f"{path}.parts", wire.parts):
        content += _part(at, part, note)[1]
    return _Answer(wire.name, wire.id or "", tuple(content), failed)


def _part(path: str, raw: Raw, note: Note) -> tuple[_Part, list[Part]]:
    """A part, and what of it is content."""
    fields, wire = read(path, raw, _Part)
    content: list[Part] = [] if wire.text is None else [TextPart(wire.text)]
    if wire.inline_data != NULL:
        blob = read(f"{path}.inlineData", wire.inline_data, _Blob)[1]
        content.append(_media("inlineData", ImagePart(blob.mime_type or "", base64_of(blob.data)), note))
    if wire.file_data != NULL:
        file = read(f"{path}.fileData", wire.file_data, _File)[1]
        content.append(_media("fileData", ImagePart(file.mime_type or "", url=file.file_uri), note))
    for name in fields:
        if name not in _SERVED_PARTS | _ABOUT_PARTS:
            note(f"part:{name}")
    return wire, content


def _media(name: str, image: ImagePart, note: Note) -> Part:
    """The image, or what stands for media of another sort."""
    if image.media_type.startswith("image/") or (image.url and not image.media_type):
        return image
    note(f"part:{name}")
    return TextPart(f"[{image.media_type or 'file'}]")


def _call(path: str, raw: Raw) -> ToolCall:
    wire = read(path, raw, _FunctionCall)[1]
    if wire.args == NULL:
        return ToolCall(_own_id(wire.name, wire.id or ""), wire.name, "{}")
    decode_field(f"{path}.args", wire.args, dict[str, object])
    return ToolCall(_own_id(wire.name, wire.id or ""), wire.name, bytes(wire.args).decode())


def _own_id(name: str, id: str) -> str:
    """The id without what Gemini CLI puts before it, if it is ours."""
    bare = id.removeprefix(f"{name}__")
    return bare if parse_minted(bare) else id


def _named(turn: _Turn, index: int, call: ToolCall) -> ToolCall:
    """The call with an id, and with its arguments as the model wrote them."""
    named = parse_minted(call.id) or next(iter(turn.replies), None)
    arguments = unwrapped(call.arguments) if named else call.arguments
    id = call.id or (tool_call_id(*named, index) if named else f"gemini_{turn.place}_{index}")
    return ToolCall(id, call.name, arguments)


def _result(path: str, raw: Raw) -> tuple[str, bool]:
    """The text of a response, and whether it says that the tool failed.

    Where `output` or `error` is all that it says, its value is the text; anything else is shown as it was written.
    """
    if raw == NULL:
        return "", False
    fields = decode_field(path, raw, dict[str, Raw])
    if len(fields) == 1:
        ((name, value),) = fields.items()
        if name in ("output", "error"):
            return _bare(value), name == "error"
    return bytes(raw).decode(), False


def _bare(raw: Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return bytes(raw).decode()


def _joined(content: list[Part]) -> tuple[Part, ...]:
    """Texts that follow each other as one: where a stream was cut means nothing."""
    joined: list[Part] = []
    for part in content:
        if isinstance(part, TextPart) and joined and isinstance(joined[-1], TextPart):
            part = TextPart(joined.pop().text + part.text)
        joined.append(part)
    return tuple(joined)
