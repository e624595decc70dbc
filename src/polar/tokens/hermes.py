"""The Hermes tool format, as the Qwen2.5 and Qwen3 chat templates write it: tools, calls and results in, replies out.

A reply is read as text, so that one parser serves vocabularies in which the tags are control tokens and those in which
they are not. Three rules say what a reply is:

- Layout. Spaces, tabs and line ends that touch a tool call, a reasoning block or the end of the reply are layout, not
  text. All other whitespace is verbatim.
- Reasoning. `<think>` opens it only as the reply's first word. Unclosed, it goes to the reply's end.
- Calls. `<tool_call>`, a JSON object with a string `name` and an object `arguments` (or a string that holds one), and
  `</tool_call>`. Tags within the object's strings are part of them. What is opened as a call and is none goes out as text,
  as the model wrote it, with the finding `tool_parse_error` (T16).

Replies are untrusted: reading takes linear time and bounded recursion, and never raises.
"""

import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from msgspec import Raw, Struct

from polar.chat import Delta, Tool, ToolCall
from polar.errors import InvalidRequest
from polar.tokens.channels import LAYOUT, Channel, Pieces, deltas, is_layout
from polar.tokens.rendering import ParsedReply
from polar.tokens.tokenizer import Draft, Tokenizer

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
TAGS = (CALL, CALL_END, THINK, THINK_END)
MAX_DEPTH = 64  # nesting of a call's JSON; far below any parser's own limit, so that the outcome depends on nothing else

TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def write_tools(draft: Draft, tools: Iterable[Tool]) -> None:
    """The system message's section on tools.

    Raises:
        InvalidRequest: a tool's schema is no JSON, or nested too deeply to be written.
    """
    draft.scaffold(TOOLS_BEFORE)
    for tool in tools:
        spec = tool_spec(tool)
        with writing(tool):
            draft.body("\n" + _json(spec))
    draft.scaffold(TOOLS_AFTER)


def write_call(draft: Draft, call: ToolCall) -> None:
    """One call. Arguments that are a JSON object stay as written; others become a JSON string that holds them."""
    arguments = call.arguments if is_json_object(call.arguments) else _json(call.arguments)
    draft.scaffold(CALL)
    draft.body(f'\n{{"name": {_json(call.name)}, "arguments": {arguments}}}\n')
    draft.scaffold(CALL_END)


def write_result(draft: Draft, text: str) -> None:
    """What a tool answered."""
    draft.scaffold("<tool_response>\n")
    draft.body(text)
    draft.scaffold("\n</tool_response>")


def tool_spec(tool: Tool) -> dict[str, object]:
    """One tool as chat templates are given it, in the schema's key order.

    Raises:
        InvalidRequest: its schema is no JSON, or nested too deeply.
    """
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    try:
        if bytes(tool.parameters):
            function["parameters"] = msgspec.json.decode(tool.parameters)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise _no_schema(tool, fault) from fault
    return {"type": "function", "function": function}


@contextmanager
def writing(tool: Tool) -> Iterator[None]:
    """In here a tool's schema is written.

    Raises:
        InvalidRequest: it is nested too deeply.
    """
    try:
        yield
    except RecursionError as fault:
        raise _no_schema(tool, fault) from fault


def _no_schema(tool: Tool, fault: Exception) -> InvalidRequest:
    return InvalidRequest(f"expected a JSON schema as the parameters of tool {tool.name!r}: {fault}")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class HermesParser:
    """Reads one reply; see `ReplyParser`."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        self._words = Pieces(tokenizer, stop_ids, TAGS)
        self._pieces: deque[str] = deque()
        self._text = Channel()
        self._reasoning = Channel()
        self._thinking = False
        self._begun = False
        self._call: _OpenCall | None = None
        self._calls: list[tuple[str, str]] = []
        self._findings: dict[str, None] = {}

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next sampled ids; give the text and reasoning that is now certain. Amortised O(1) per id."""
        self._read(self._words.push(ids))
        return deltas(self._reasoning, self._text)

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        """The deltas still held back, and the whole reply."""
        self._read(self._words.finish())
        while self._call:
            self._abandon(self._call)
            self._read(())
        fresh = deltas(self._reasoning, self._text)
        return fresh, ParsedReply(self._text.all, self._reasoning.all, tuple(self._calls), tuple(self._findings))

    def _read(self, pieces: Iterable[str]) -> None:
        self._pieces.extend(pieces)
        while self._pieces:
            piece = self._pieces.popleft()
            if self._call:
                self._read_call(self._call, piece)
            elif self._thinking:
                self._read_reasoning(piece)
            else:
                self._read_text(piece)

    def _read_text(self, piece: str) -> None:
        if piece == CALL:
            self._call = _OpenCall()
        elif piece == THINK and not self._begun:
            self._thinking = True
            self._text.block()
            self._reasoning.block()
        else:
            self._text.write(piece)
        self._begun = self._begun or not is_layout(piece)

    def _read_reasoning(self, piece: str) -> None:
        if piece == THINK_END:
            self._thinking = False
            self._reasoning.block()
        else:
            self._reasoning.write(piece)

    def _read_call(self, call: "_OpenCall", piece: str) -> None:
        call.pieces.append(piece)
        if call.scan.done and piece == CALL_END:
            self._close(call)
        elif not call.scan.feed(piece):
            self._abandon(call)

    def _close(self, call: "_OpenCall") -> None:
        parsed = _parse_call("".join(call.pieces[:-1]))
        if parsed is None:
            self._abandon(call)
            return
        self._calls.append(parsed)
        self._call = None
        self._text.block()

    def _abandon(self, call: "_OpenCall") -> None:
        """The opening tag was text, and what follows it is read anew: it may hold a call of its own.

        This stays linear. A scan runs past an opening tag only within a JSON string, and whoever starts at that tag reads
        strings as structure and structure as strings, so of any two scans over the same stretch one ends at the next tag.
        """
        self._call = None
        self._findings["tool_parse_error"] = None
        self._text.write(CALL)
        self._pieces.extendleft(reversed(call.pieces))


class _OpenCall:
    """A call whose end is not in sight: what followed its opening tag."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.scan = _ObjectScan()


class _WrittenCall(Struct):
    name: str
    arguments: Raw


_written_call = msgspec.json.Decoder(_WrittenCall)


def _parse_call(source: str) -> tuple[str, str] | None:
    """Name and arguments as written, or None if `source` is no call."""
    try:
        call = _written_call.decode(source)
        arguments = bytes(call.arguments).decode()
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
    except msgspec.DecodeError:
        return None
    return (call.name, arguments) if call.name and is_json_object(arguments) else None


def is_json_object(text: str) -> bool:
    """`text` is a strict JSON object, not nested deeper than `MAX_DEPTH`."""
    scan = _ObjectScan()
    if not (scan.feed(text) and scan.done):
        return False
    try:
        msgspec.json.decode(text)
    except ValueError:  # malformed, or not encodable as UTF-8
        return False
    return True


def json_object(value: object) -> str | None:
    """`value` as JSON, where it is an object of which `is_json_object` holds."""
    try:
        text = value if isinstance(value, str) else _json(value)
    except (ValueError, TypeError, RecursionError):
        return None
    return text if is_json_object(text) else None


class _ObjectScan:
    """Finds where a JSON object ends, fed in pieces. It knows strings and nesting; a parser judges the rest.

    Attributes:
        done: the object is closed; only layout may follow.
    """

    _STRUCTURE = re.compile(r'["{}\[\]<\\]')
    _IN_STRING = re.compile(r'["\\\x00-\x1f]')

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> bool:
        """Take the next piece. False: this is not a JSON object (and feeding more is pointless)."""
        at = int(self._escaped)
        self._escaped = False
        while at < len(text):
            if self._depth == 0:
                return self._outside(text, at)
            found = (self._IN_STRING if self._in_string else self._STRUCTURE).search(text, at)
            if found is None:
                return True
            at = found.end()
            if self._in_string and found[0] == "\\":
                self._escaped = at == len(text)
                at += 1
            elif not self._step(found[0]):
                return False
        return True

    def _outside(self, text: str, at: int) -> bool:
        rest = text[at:].lstrip(LAYOUT)
        if not rest:
            return True
        if self.done or rest[0] != "{":
            return False
        self._depth = 1
        return self.feed(rest[1:])

    def _step(self, letter: str) -> bool:
        if letter == '"':
            self._in_string = not self._in_string
            return True
        if self._in_string or letter in "<\\":
            return False
        self._depth += 1 if letter in "{[" else -1
        self.done = self._depth == 0
        return self._depth <= MAX_DEPTH
