"""Tools as OpenAI's Responses API knows them.

The policy calls functions by one flat name. A namespace becomes a prefix, a custom tool's free text becomes the parameter
`input`, and what OpenAI would run itself is dropped by name. `wire_call` and `custom_arguments` go the ways back.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from polar.chat import Tool, ToolCall
from polar.dialects.bodies import decode_field, shortened
from polar.dialects.openai_responses_config import Dropped, as_object
from polar.errors import InvalidRequest
from polar.ids import parse_minted

RAW_CALL = "ctr"  # what the id of a `raw` call's item begins with
_INPUT = Raw(b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}')
_NO_PARAMETERS = Raw(b"{}")
_NULL = Raw(b"null")
_MODES = ("auto", "none", "required")


class _Kind(Struct):
    type: str


class _Function(Struct):
    name: str
    description: str | None = None
    parameters: Raw = _NULL
    strict: bool | None = None


class _Format(Struct):
    type: str = "text"
    syntax: str = ""
    definition: str = ""


class _Custom(Struct):
    name: str
    description: str | None = None
    format: _Format | None = None


class _Namespace(Struct):
    name: str
    tools: list[Raw]


class _Choice(Struct):
    type: str
    name: str = ""
    namespace: str | None = None
    mode: str = "auto"


class _Input(Struct, forbid_unknown_fields=True):
    input: str


WireChoice = str | _Choice | None


def read_tools(where: str, wire: Sequence[Raw], dropped: Dropped, namespace: str = "") -> list[Tool]:
    """Tools of a request, flat. `where` is their path in the body, for errors.

    Raises:
        InvalidRequest: a tool without a type or a name, or fields of the wrong type.
    """
    tools: list[Tool] = []
    for index, raw in enumerate(wire):
        place = f"{where}[{index}]"
        kind = decode_field(place, raw, _Kind).type
        if kind == "function":
            tools.append(_function(place, decode_field(place, raw, _Function), dropped, namespace))
        elif kind == "custom":
            tools.append(_custom(decode_field(place, raw, _Custom), namespace))
        elif kind == "namespace" and not namespace:
            inner = decode_field(place, raw, _Namespace)
            tools += read_tools(f"{place}.tools", inner.tools, dropped, inner.name)
        else:
            dropped.add(f"tool:{kind}")
    return tools


def read_choice(wire: WireChoice, tools: Sequence[Tool], dropped: Dropped) -> str:
    """`ChatRequest.tool_choice`.

    Raises:
        InvalidRequest: an unknown choice, or a tool that the request does not have.
    """
    if wire is None:
        return "auto"
    if isinstance(wire, _Choice) and wire.type in ("function", "custom"):
        return _named(flat_name(wire.name, wire.namespace), tools)
    if isinstance(wire, _Choice):
        dropped.add(f"tool_choice:{wire.type}")
        wire = wire.mode if wire.type == "allowed_tools" else "auto"
    if wire not in _MODES:
        raise InvalidRequest(f"tool_choice: expected one of {', '.join(_MODES)}, or a tool, got {shortened(wire)}")
    if wire == "required" and not tools:
        raise InvalidRequest("tool_choice: 'required' needs at least one tool that the policy can be given")
    return wire


def flat_name(name: str, namespace: str | None) -> str:
    """What the policy calls a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str, item: str | None) -> str:
    """The arguments that a custom tool's free text stands for; `item` is the id that it came back under."""
    if item and item.startswith(f"{RAW_CALL}_") and parse_minted(item):
        return text
    return msgspec.json.encode({"input": text}).decode()


class WireCall(Struct, frozen=True):
    """A tool call as the harness is told of it: bare name, its namespace, and the text that is its input.

    `raw` says that a custom tool's text is not what the policy put into `input`, but all that it wrote: it put nothing there.
    """

    name: str
    namespace: str
    custom: bool
    input: str
    raw: bool = False


def wire_call(call: ToolCall, tools: Sequence[Tool]) -> WireCall:
    """How the harness knows a call of the policy. A tool that the request does not have is a function of that name."""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return WireCall(call.name, "", False, call.arguments)
    name = call.name.removeprefix(flat_name("", tool.namespace))
    text = _free_text(call.arguments) if tool.custom else None
    return WireCall(name, tool.namespace, tool.custom, call.arguments if text is None else text, tool.custom and text is None)


def _free_text(arguments: str) -> str | None:
    """A custom tool's text; None where the policy wrote something else."""
    try:
        return msgspec.json.decode(arguments, type=_Input).input
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def _function(place: str, tool: _Function, dropped: Dropped, namespace: str) -> Tool:
    if tool.strict:
        dropped.add("strict")
    given = tool.parameters != _NULL
    parameters = as_object(f"{place}.parameters", tool.parameters) if given else _NO_PARAMETERS
    return Tool(flat_name(tool.name, namespace), tool.description or "", parameters, namespace)


def _custom(tool: _Custom, namespace: str) -> Tool:
    description = tool.description or ""
    if tool.format is not None and tool.format.definition:
        description += f"\n\nThe input follows this {tool.format.syntax} grammar:\n{tool.format.definition}"
    return Tool(flat_name(tool.name, namespace), description.lstrip("\n"), _INPUT, namespace, custom=True)


def _named(name: str, tools: Sequence[Tool]) -> str:
    if name in _MODES or all(tool.name != name for tool in tools):
        names = shortened([tool.name for tool in tools if tool.name not in _MODES])
        raise InvalidRequest(f"tool_choice: expected the name of one of the tools {names}, got {shortened(name)}")
    return name
