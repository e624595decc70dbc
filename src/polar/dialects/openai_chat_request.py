"""Requests of OpenAI Chat Completions as pivot.

What cannot be answered meaningfully (legacy functions, audio, files) is refused by name. What is asked and the policy is
not given is named in `unserved`: harnesses send such fields by habit, and have to work. Unknown fields are kept raw.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from polar.chat import ChatRequest, Message, Part, RequestedSampling, Role, TextPart, Tool, ToolCall
from polar.dialects.bodies import NULL, Memory, decode, decode_field, parts_of, shortened
from polar.dialects.openai_common import image_part
from polar.errors import InvalidRequest

MAX_CHOICES = 16
MAX_STOPS = 16

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_CHOICES = ("auto", "none", "required")
_ANY_OBJECT = Raw(b'{"type":"object"}')

# Refused, unless it says no more than if it were not there.
_REFUSED: dict[str, tuple[object, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, [], ["text"]),
}
# Unserved, unless it says no more than if it were not there.
_UNSERVED: dict[str, tuple[object, ...]] = {
    "parallel_tool_calls": (None, True),
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "service_tier": (None, "auto", "default"),
    "web_search_options": (None,),
}

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Stop = Annotated[str, Meta(min_length=1)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]


class _ImageUrl(Struct):
    url: str


class _Part(Struct):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | _ImageUrl | None = None


class _Function(Struct):
    name: str
    arguments: str | None = None


class _ToolCall(Struct):
    function: _Function
    id: str | None = None
    type: Literal["function"] | None = None


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Raw = NULL
    audio: Raw = NULL


class _ToolFunction(Struct):
    name: str
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None


class _Tool(Struct):
    type: str
    function: _ToolFunction | None = None


class _Named(Struct):
    name: str


class _ToolChoice(Struct):
    type: str
    function: _Named | None = None


class _JSONSchema(Struct):
    schema: Raw = NULL


class _ResponseFormat(Struct):
    type: str
    json_schema: _JSONSchema | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Body(Struct):
    messages: Raw
    model: str = ""
    tools: Raw = NULL
    tool_choice: str | _ToolChoice | None = None
    response_format: _ResponseFormat | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    seed: Whole | None = None
    stop: Stop | Stops | None = None
    n: Count | None = None


class _Spoken(Struct, frozen=True):
    """A message, and whether it names its speaker."""

    message: Message
    named: bool


class _Offered(Struct, frozen=True):
    """A tool, and whether its arguments are to be sampled under its schema."""

    tool: Tool
    strict: bool


def read(body: bytes, memory: Memory) -> ChatRequest:
    """The body of `POST …/chat/completions`.

    Raises:
        InvalidRequest: malformed, or it asks for what is refused by name.
    """
    fields, wire = decode(body, _Body, ("messages", "tools"))
    extra = {name: raw.copy() for name, raw in fields.items() if name not in _Body.__struct_fields__}
    for name in _asked(extra, _REFUSED):
        raise InvalidRequest(f"{name}: {shortened(_value(name, extra[name]))} is not served by this gateway; leave the field out")
    spoken = memory.each(b"chat message", decode_field("messages", fields["messages"], list[Raw]), _spoken)
    if not spoken:
        raise InvalidRequest("messages: expected at least one message")
    offered = memory.each(b"chat tool", parts_of("tools", fields.get("tools", NULL)), _offered)
    tools = tuple([each.tool for each in offered])
    choice = _tool_choice(wire.tool_choice, tools)
    return ChatRequest(
        model=wire.model,
        messages=tuple([each.message for each in spoken]),
        tools=() if choice == "none" else tools,
        sampling=_sampling(wire),
        stream=bool(wire.stream),
        include_usage=wire.stream_options is not None and bool(wire.stream_options.include_usage),
        tool_choice=choice,
        json_schema=_json_schema(wire.response_format),
        logprobs=bool(wire.logprobs),
        unserved=tuple(_unserved(spoken, offered, extra)),
        extra=extra,
    )


def _sampling(wire: _Body) -> RequestedSampling:
    limits = [limit for limit in (wire.max_tokens, wire.max_completion_tokens) if limit is not None]
    stop = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ())
    return RequestedSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        max_tokens=min(limits, default=None),
        seed=wire.seed,
        stop=stop,
        n=wire.n or 1,
    )


def _asked(extra: dict[str, Raw], harmless: dict[str, tuple[object, ...]]) -> Iterator[str]:
    """Names of the fields that say more than the values listed as harmless."""
    return (name for name, values in harmless.items() if name in extra and _value(name, extra[name]) not in values)


def _value(name: str, raw: Raw) -> object:
    return decode_field(name, raw, object)


def _unserved(spoken: list[_Spoken], offered: list[_Offered], extra: dict[str, Raw]) -> Iterator[str]:
    yield from _asked(extra, _UNSERVED)
    if True in [each.named for each in spoken]:
        yield "name"
    if any(each.strict for each in offered):
        yield "strict"


def _spoken(index: int, raw: Raw) -> _Spoken:
    place = f"messages[{index}]"
    wire = decode_field(place, raw, _Message)
    return _Spoken(_message(place, wire), bool(wire.name))


def _offered(index: int, raw: Raw) -> _Offered:
    tool = decode_field(f"tools[{index}]", raw, _Tool)
    return _Offered(_tool(index, tool), bool(tool.function and tool.function.strict))


def _message(place: str, wire: _Message) -> Message:
    role = _ROLES.get(wire.role)
    if role is None:
        raise InvalidRequest(f"{place}.role: expected one of {', '.join(_ROLES)}, got {shortened(wire.role)}")
    if wire.function_call != NULL:
        raise InvalidRequest(f"{place}.function_call is not served; use tool_calls")
    if wire.audio != NULL:
        raise InvalidRequest(f"{place}.audio is not served; the policy reads no audio")
    calls = tuple(ToolCall(call.id or "", call.function.name, call.function.arguments or "") for call in wire.tool_calls or ())
    reasoning = wire.reasoning_content or wire.reasoning or ""
    return Message(role, _content(place, wire), reasoning, calls, wire.tool_call_id or "")


def _content(place: str, wire: _Message) -> tuple[Part, ...]:
    if isinstance(wire.content, list):
        return tuple(_part(f"{place}.content[{index}]", part) for index, part in enumerate(wire.content))
    text = wire.content or wire.refusal
    return (TextPart(text),) if text else ()


def _part(place: str, part: _Part) -> Part:
    if part.type in ("text", "refusal"):
        return TextPart(part.text or part.refusal)
    if part.type != "image_url":
        raise InvalidRequest(f"{place}: a part of type {shortened(part.type)} is not served; expected text or image_url")
    if part.image_url is None:
        raise InvalidRequest(f'{place}.image_url: expected {{"url": …}}, got nothing')
    return image_part(f"{place}.image_url", part.image_url if isinstance(part.image_url, str) else part.image_url.url)


def _tool(index: int, tool: _Tool) -> Tool:
    if tool.type != "function" or tool.function is None:
        raise InvalidRequest(
            f"tools[{index}]: a tool of type {shortened(tool.type)} is not served; expected 'function' with a function"
        )
    parameters = tool.function.parameters
    schema = Raw(b"{}") if parameters == NULL else _object(f"tools[{index}].function.parameters", parameters)
    return Tool(tool.function.name, tool.function.description or "", schema)


def _tool_choice(choice: str | _ToolChoice | None, tools: tuple[Tool, ...]) -> str:
    if isinstance(choice, _ToolChoice):
        return _named_choice(choice, tools)
    if choice is not None and choice not in _CHOICES:
        raise InvalidRequest(f"tool_choice: expected one of {', '.join(_CHOICES)} or a function, got {shortened(choice)}")
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice: 'required' needs at least one tool in tools")
    return choice or "auto"


def _named_choice(choice: _ToolChoice, tools: tuple[Tool, ...]) -> str:
    if choice.type != "function" or choice.function is None:
        raise InvalidRequest(
            f"tool_choice: a choice of type {shortened(choice.type)} is not served; expected 'function' with a name"
        )
    name = choice.function.name
    if name in _CHOICES or all(name != tool.name for tool in tools):
        names = shortened([tool.name for tool in tools if tool.name not in _CHOICES])
        raise InvalidRequest(f"tool_choice: expected the name of one of the tools {names}, got {shortened(name)}")
    return name


def _json_schema(wanted: _ResponseFormat | None) -> Raw | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _ANY_OBJECT
    if wanted.type != "json_schema" or wanted.json_schema is None:
        came = shortened(wanted.type)
        raise InvalidRequest(f"response_format: expected text, json_object, or json_schema with a json_schema, got {came}")
    return _object("response_format.json_schema.schema", wanted.json_schema.schema)


def _object(name: str, raw: Raw) -> Raw:
    """A schema byte for byte, free of the body that it was read from."""
    if not bytes(raw).startswith(b"{"):
        raise InvalidRequest(f"{name}: expected a JSON schema, got {shortened(_value(name, raw))}")
    return raw.copy()
