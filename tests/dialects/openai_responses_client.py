"""A client of OpenAI Responses in miniature: it writes requests, keeps a reply's items, and reads streams."""

import json
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import Raw

from polar.chat import ChatRequest, Choice, FinishReason, Message, Reply, RequestedSampling, TextPart, Tool, ToolCall, Usage
from polar.dialects.openai_responses import OpenAIResponses
from polar.dialects.protocol import Target
from polar.ids import item_id, signature, tool_call_id

DIALECT = OpenAIResponses()
TARGET = Target("POST", "/v1/responses")
CUSTOM = Raw(b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}')

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
names = st.text("abcdefgh", min_size=1, max_size=6)


def parse(body: dict[str, Any] | bytes) -> ChatRequest:
    return DIALECT.parse(TARGET, body if isinstance(body, bytes) else json.dumps(body).encode())


def items_read(*items: Any) -> tuple[Message, ...]:
    return parse({"input": list(items)}).messages


def unminted(message: Message) -> Message:
    return msgspec.structs.replace(message, minted=())


# What a policy may say


def functions(namespace: str = "") -> st.SearchStrategy[Tool]:
    schemas = st.sampled_from([b"{}", b'{ "type":"object","b":1.0,"a":[]}'])
    return st.builds(
        lambda name, text, schema: Tool(f"{namespace}__{name}" if namespace else name, text, Raw(schema), namespace),
        names,
        texts,
        schemas,
    )


customs = st.builds(lambda name, text: Tool(name, text.lstrip("\n"), CUSTOM, "", True), names, texts)
tool_lists = st.lists(functions() | functions("team") | customs, max_size=4, unique_by=lambda tool: tool.name).map(tuple)


@st.composite
def calls(draw: st.DrawFn, tools: tuple[Tool, ...], call_id: str) -> tuple[ToolCall, ...]:
    """Calls of known and of invented tools; arguments may be no JSON."""
    known = {tool.name: tool for tool in tools}
    made = []
    for index in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([*known, "nobody"]))
        custom = name in known and known[name].custom
        arguments = msgspec.json.encode({"input": draw(texts)}).decode() if custom else draw(texts | st.just('{ "a":  1}'))
        made.append(ToolCall(tool_call_id(call_id, 0, index), name, arguments))
    return tuple(made)


@st.composite
def replies(draw: st.DrawFn, tools: tuple[Tool, ...], call_id: str = "c0z0000000") -> Reply:
    said = draw(calls(tools, call_id))
    text, reasoning = draw(texts), draw(texts)
    message = Message("assistant", (TextPart(text),) if text else (), reasoning, said)
    finish: FinishReason = draw(st.sampled_from(["length", "tool_calls" if said else "stop"]))
    return Reply(call_id, "policy", 1_800_000_000, (Choice(message, finish),), Usage(7, 5))


# What a client writes


@st.composite
def turns(draw: st.DrawFn, tools: tuple[Tool, ...], ordinal: int) -> list[Message]:
    """A reply as it comes back with its identifiers, or without those of its items, and what answers its calls."""
    reply = draw(replies(tools, f"c{ordinal}z0000000"))
    message = reply.message
    minted: tuple[str, ...] = ()
    if not message.content and not message.reasoning and not message.tool_calls:
        message = msgspec.structs.replace(message, reasoning="So.")
    if draw(st.booleans()):
        minted = _item_ids(reply.call_id, message, {tool.name for tool in tools if tool.custom})
    answers = [Message("tool", (TextPart(draw(words)),), tool_call_id=call.id) for call in message.tool_calls]
    return [msgspec.structs.replace(message, minted=minted), *answers]


def _item_ids(call_id: str, message: Message, custom: set[str]) -> tuple[str, ...]:
    thought = (signature(call_id, 0), item_id("rs", call_id, 0, 0)) if message.reasoning else ()
    spoken = (item_id("msg", call_id, 0, 0),) if message.content else ()
    prefixes = ["ctc" if call.name in custom else "fc" for call in message.tool_calls]
    return (*thought, *spoken, *(item_id(prefix, call_id, 0, index) for index, prefix in enumerate(prefixes)))


@st.composite
def requests(draw: st.DrawFn) -> ChatRequest:
    """Replies that follow each other directly have different calls, and their identifiers."""
    tools = draw(tool_lists)
    history = [Message("system", (TextPart(draw(words)),)), Message("user", (TextPart(draw(words)),))]
    for ordinal in range(draw(st.integers(0, 3))):
        turn = draw(turns(tools, ordinal))
        last = next(message for message in reversed(history) if message.role != "tool")
        if not (last.minted and turn[0].minted):
            history.append(Message("user", (TextPart(draw(words)),)))
        history += turn
    sampling = RequestedSampling(
        draw(st.none() | st.just(0.5)), draw(st.none() | st.just(0.9)), max_tokens=draw(st.none() | st.just(9))
    )
    choice = draw(st.sampled_from(["auto", *(["required", tools[0].name] if tools else [])]))
    schema = draw(st.none() | st.just(Raw(b'{ "type":"object"}')))
    return ChatRequest("policy", tuple(history), tools, sampling, draw(st.booleans()), False, choice, schema)


def written(request: ChatRequest, *, interleaved: bool = False) -> bytes:
    """`interleaved`: a call's output comes before the reply's next call, where identifiers tell that it is one reply."""
    tools = {tool.name: tool for tool in request.tools}
    body: dict[str, Any] = {"model": request.model, "input": [], "stream": request.stream, "store": False}
    outputs = {message.tool_call_id: message for message in request.messages if message.role == "tool"}
    for message in request.messages:
        if message.role == "assistant":
            for item in assistant_items(message, tools):
                body["input"].append(item)
                if interleaved and message.minted and "call_id" in item:
                    body["input"].append(output_item(outputs.pop(item["call_id"]), tools))
        elif message.role != "tool":
            role = "developer" if message.role == "system" else message.role
            content = [{"type": "input_text", "text": part.text} for part in message.content]
            body["input"].append({"type": "message", "role": role, "content": content})
        elif message.tool_call_id in outputs:
            body["input"].append(output_item(message, tools))
    body["tools"] = tool_list(request.tools)
    sampling = request.sampling
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_output_tokens": sampling.max_tokens}
    body["tool_choice"] = choice(request, tools)
    if request.json_schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": request.json_schema}}
    return msgspec.json.encode(body)


def choice(request: ChatRequest, tools: dict[str, Tool]) -> object:
    if request.tool_choice not in tools:
        return request.tool_choice
    tool = tools[request.tool_choice]
    return {"type": "custom" if tool.custom else "function", **bare(tool.name, tools)}


def bare(name: str, tools: dict[str, Tool]) -> dict[str, Any]:
    space = tools[name].namespace if name in tools else ""
    return {"name": name.removeprefix(f"{space}__"), "namespace": space} if space else {"name": name}


def tool_list(tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Tools in order; each namespaced one in a namespace of its own, as the order of the flat list would else be lost."""
    known, listed = {tool.name: tool for tool in tools}, []
    for tool in tools:
        name = bare(tool.name, known)["name"]
        wire: dict[str, Any] = {"type": "function", "name": name, "description": tool.description, "parameters": tool.parameters}
        if tool.custom:
            wire = {"type": "custom", "name": name, "description": tool.description, "format": {"type": "text"}}
        listed.append({"type": "namespace", "name": tool.namespace, "tools": [wire]} if tool.namespace else wire)
    return listed


def assistant_items(message: Message, tools: dict[str, Tool]) -> list[dict[str, Any]]:
    kept = {value.partition("_")[0]: value for value in message.minted}
    items: list[dict[str, Any]] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        sealed = message.minted[0] if message.minted else "foreign"
        items.append(
            {"type": "reasoning", "id": kept.get("rs"), "summary": summary, "content": None, "encrypted_content": sealed}
        )
    if message.content:
        content = [{"type": "output_text", "text": part.text, "annotations": []} for part in message.content]
        identifier = kept.get("msg", "msg_89b65dbf-7ae9")
        items.append({"type": "message", "id": identifier, "role": "assistant", "status": "completed", "content": content})
    ids = [value for value in message.minted if value.startswith(("fc_", "ctc_"))]
    for index, call in enumerate(message.tool_calls):
        custom = call.name in tools and tools[call.name].custom
        said = {"input": json.loads(call.arguments)["input"]} if custom else {"arguments": call.arguments}
        kind = "custom_tool_call" if custom else "function_call"
        identifier = ids[index] if ids else f"fc_{call.id}x"
        items.append({"type": kind, "id": identifier, "call_id": call.id, **bare(call.name, tools), **said})
    return items


def output_item(message: Message, tools: dict[str, Tool]) -> dict[str, Any]:
    return {"type": "function_call_output", "id": "fco_1", "call_id": message.tool_call_id, "output": message.text}


# What a client reads


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, in order; each names its type twice."""
    read = []
    for event in stream.decode("ascii").removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        read.append(body)
    return read
