"""What a client of OpenAI Chat can send: requests of the pivot, and a writer that puts them on the wire."""

import json
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import Raw

from polar.chat import (
    ChatRequest,
    Choice,
    ImagePart,
    Message,
    Part,
    Reply,
    RequestedSampling,
    TextPart,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.protocol import Target

DIALECT = OpenAIChat()
TARGET = Target("POST", "/v1/chat/completions")
HELLO = {"role": "user", "content": "x"}

# Text as a client can send it: any character, alone or in the company that breaks naive parsers.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "",
        "\u2028\u2029",
        "\x00",
        "\ufeff",
        "\ufffd",
        "data: [DONE]\n\n",
        "\r\n\r\n",
        "\U0001f600",
        '"\\',
        "\\ud83d",
        "</tool_call>",
    ]
)
said = texts.filter(bool)
tool_calls = st.builds(ToolCall, texts, texts, texts)
data_images = st.builds(
    ImagePart, media_type=st.sampled_from(["image/png", "image/svg+xml"]), data=st.sampled_from(["AAAA", "iVBORw0KGgo=", "_-8="])
)
url_images = st.builds(ImagePart, url=said.filter(lambda url: url[:5].lower() != "data:"))
parts: st.SearchStrategy[Part] = st.builds(TextPart, texts) | data_images | url_images
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.lists(parts, max_size=3).map(tuple),
    texts,
    st.lists(tool_calls, max_size=2).map(tuple),
    texts,
)
schemas = st.dictionaries(texts, texts | st.integers(0, 9) | st.just({"type": "string"}), max_size=2).map(
    lambda schema: Raw(json.dumps(schema, separators=(",", ":")).encode())
)
tools = st.builds(Tool, texts, texts, schemas)
numbers = st.none() | st.floats(0, 2)
limits = st.none() | st.integers(1, 2**63 - 1)
sampling = st.builds(
    RequestedSampling,
    numbers,
    numbers,
    st.none() | st.integers(-1, 100),
    limits,
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.lists(said, max_size=16).map(tuple),
    st.integers(1, 16),
)


@st.composite
def requests(draw: st.DrawFn) -> ChatRequest:
    """Any request that a client can write."""
    given = tuple(draw(st.lists(tools, max_size=2)))
    choice = draw(st.sampled_from(["auto", "none", *(["required", *(tool.name for tool in given)] if given else [])]))
    return ChatRequest(
        model=draw(texts),
        messages=tuple(draw(st.lists(messages, min_size=1, max_size=3))),
        tools=() if choice == "none" else given,
        sampling=draw(sampling),
        stream=draw(st.booleans()),
        include_usage=draw(st.booleans()),
        tool_choice=choice,
        json_schema=draw(st.none() | schemas),
        logprobs=draw(st.booleans()),
        extra=draw(st.just({}) | schemas.map(lambda raw: {"novel": raw})),
    )


def written(request: ChatRequest, *, terse: bool = True, ascii_only: bool = False) -> bytes:
    """The request as a client writes it. `terse` clients leave out what they can, and use the other spelling of the rest."""
    body = {**request.extra, **_settings(request, terse), "messages": [_message(message, terse) for message in request.messages]}
    data = msgspec.json.encode({name: value for name, value in body.items() if value is not None or not terse})
    return json.dumps(json.loads(data), separators=(",", ":")).encode() if ascii_only else data


def _settings(request: ChatRequest, terse: bool) -> dict[str, object]:
    wanted, schema, choice = request.sampling, request.json_schema, request.tool_choice
    stop = wanted.stop[0] if terse and len(wanted.stop) == 1 else list(wanted.stop)
    json_format = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    named = {"type": "function", "function": {"name": choice}}
    return {
        "model": request.model,
        "tools": [_tool(tool) for tool in request.tools],
        "tool_choice": choice if choice in ("auto", "none", "required") else named,
        "response_format": json_format if schema is not None else None if terse else {"type": "text"},
        "logprobs": request.logprobs or None,
        "stream": request.stream,
        "stream_options": {"include_usage": True, "include_obfuscation": False} if request.include_usage else None,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "top_k": wanted.top_k,
        "max_tokens" if terse else "max_completion_tokens": wanted.max_tokens,
        "seed": wanted.seed,
        "stop": stop or None,
        "n": None if terse and wanted.n == 1 else wanted.n,
    }


def _message(message: Message, terse: bool) -> dict[str, object]:
    calls = [_call(index, call, terse) for index, call in enumerate(message.tool_calls)]
    body = {
        "role": "developer" if message.role == "system" and terse else message.role,
        "content": _content(message.content, terse),
        "reasoning" if terse else "reasoning_content": message.reasoning or None,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id or None,
    }
    return {name: value for name, value in body.items() if value is not None or not terse}


def _content(content: tuple[Part, ...], terse: bool) -> object:
    match content:
        case ():
            return None if terse else []
        case (TextPart(text=text),) if terse and text:
            return text
        case _:
            return [_part(part, terse) for part in content]


def _part(part: Part, terse: bool) -> dict[str, object]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    url = part.url or f"data:{part.media_type};base64,{part.data}"
    return {"type": "image_url", "image_url": {"url": url} if terse else {"url": url, "detail": "high"}}


def _call(index: int, call: ToolCall, terse: bool) -> dict[str, object]:
    body: dict[str, object] = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return body if terse else {"index": index, **body}


def _tool(tool: Tool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


# Replies

answers = st.builds(
    Message,
    st.just("assistant"),
    st.builds(lambda text: (TextPart(text),) if text else (), texts),
    texts,
    st.lists(tool_calls, max_size=3).map(tuple),
)
logprobs = st.lists(st.builds(TokenLogprob, texts, st.floats(-100, 0)), max_size=3).map(tuple)
choices = st.builds(Choice, answers, st.sampled_from(["stop", "length", "tool_calls"]), logprobs=logprobs)


def reply_with(*given: Choice) -> Reply:
    return Reply("c0aaaaaaaa", "policy", 17, given, Usage(3, 5))


def parse(body: bytes | dict[str, Any], **fields: Any) -> ChatRequest:
    return DIALECT.parse(TARGET, body if isinstance(body, bytes) else json.dumps({**body, **fields}).encode())


def asked(**fields: Any) -> ChatRequest:
    """A request of one short message with these fields."""
    return parse({"model": "policy", "messages": [HELLO], **fields})


def parsed_messages(*wire: dict[str, Any]) -> tuple[Message, ...]:
    return parse({"messages": wire}).messages
