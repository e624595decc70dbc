"""Anthropic Messages: what is read and written stays the same, what no policy is given is noted, nothing breaks it."""

import contextlib
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from anthropic.types import Message as SdkMessage
from anthropic.types import ModelInfo, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from polar.chat import (
    ChatRequest,
    Choice,
    Delta,
    FinishReason,
    ImagePart,
    Message,
    ReasoningDelta,
    Reply,
    RequestedSampling,
    TextDelta,
    TextPart,
    ToolCall,
    Usage,
)
from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.protocol import Fault, FaultKind, ModelCard, Route, Target
from polar.errors import InvalidRequest
from polar.ids import signature, tool_call_id
from polar.tokens.lineage import link

Json = dict[str, Any]
DIALECT = AnthropicMessages()
TARGET = Target("POST", "/v1/messages", "beta=true", {"anthropic-version": "2023-06-01"})
CALL = "c0aaaaaaaa"
HELLO: Json = {"role": "user", "content": "x"}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CACHED = {"cache_control": {"type": "ephemeral"}}

# Text as a client can send it: any character, alone or in the company that breaks naive parsers.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\u2028\u2029", "\x00", "\ufeff", "data: x\n\n", "\r\n\r\n", "\U0001f600", '"\\', "\\ud83d", "</tool_call>", "INVALID_JSON"]
)
said = texts.filter(bool)
values = st.recursive(st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
inputs = st.dictionaries(texts, values, max_size=3).map(lambda value: json.dumps(value, separators=(",", ":")))
images = st.builds(ImagePart, st.just("image/png"), st.just("aGk=")) | st.builds(ImagePart, url=st.just("https://x/y.png"))
parts = st.lists(st.builds(TextPart, said) | images, max_size=3).map(tuple)
calls = st.lists(st.builds(ToolCall, texts, texts, inputs), max_size=2).map(tuple)
signatures = st.sampled_from([(), (signature("c3bbbbbbbb", 0),)])
assistants = st.builds(Message, st.just("assistant"), parts, texts, calls, minted=signatures)
results = st.builds(Message, st.just("tool"), parts, tool_call_id=texts, is_error=st.booleans())
systems = st.builds(Message, st.just("system"), st.lists(st.builds(TextPart, said), min_size=1, max_size=3).map(tuple))
histories = st.lists(st.builds(Message, st.just("user"), parts) | assistants | results | systems, min_size=1, max_size=6)

arguments = inputs | st.sampled_from(['{"a":  1.50, "b": [1e2]}', "", "[1]", '{"a":', '{"a": NaN}', '"x"', "null", "[" * 2000])
reply_calls = st.lists(st.tuples(said, arguments), max_size=3).map(
    lambda made: tuple(ToolCall(tool_call_id(CALL, 0, index), *call) for index, call in enumerate(made))
)
reply_messages = st.builds(
    Message, st.just("assistant"), texts.map(lambda text: (TextPart(text),) if text else ()), texts, reply_calls
)
finishes: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length", "tool_calls"])


class Style:
    """How a client writes a history: what it may choose, hypothesis chooses."""

    def __init__(self, draw: st.DataObject | None) -> None:
        self._draw = draw

    def __call__(self) -> bool:
        return self._draw is not None and self._draw.draw(st.booleans())

    def block(self, block: Json) -> Json:
        return block | CACHED if self() else block

    def content(self, message: Message) -> str | list[Json]:
        if len(message.content) == 1 and isinstance(message.content[0], TextPart) and self():
            return message.content[0].text
        return [self.block(part_block(part)) for part in message.content]


def part_block(part: TextPart | ImagePart) -> Json:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    base64 = {"type": "base64", "media_type": part.media_type, "data": part.data}
    return {"type": "image", "source": {"type": "url", "url": part.url} if part.url else base64}


def blocks_of(message: Message, style: Style) -> str | list[Json]:
    if message.role == "tool":
        result = {"tool_use_id": message.tool_call_id, "type": "tool_result", "content": style.content(message)}
        return [style.block(result | ({"is_error": True} if message.is_error else {}))]
    if message.role != "assistant":
        return style.content(message)
    thinking = {"type": "thinking", "thinking": message.reasoning, "signature": "".join(message.minted) or "foreign"}
    return [
        *([thinking] if message.reasoning or message.minted else []),
        *(style.block(part_block(part)) for part in message.content),
        *(
            style.block({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
            for call in message.tool_calls
        ),
    ]


def written(messages: list[Message], style: Style) -> Json:
    """A history as clients write it: results and the text beside them may stand in one user message."""
    body: Json = {"messages": []}
    if messages[0].role == "system" and messages[1:]:
        body["system"] = style.content(messages[0])
        messages = messages[1:]
    for before, message in pairwise([None, *messages]):
        assert message is not None
        content = blocks_of(message, style)
        last = body["messages"][-1]["content"] if before else []
        joins = before and {before.role, message.role} in ({"tool"}, {"tool", "user"})
        if joins and last and content and isinstance(content, list) and isinstance(last, list) and style():
            last += content
        else:
            body["messages"].append({"role": "user" if message.role == "tool" else message.role, "content": content})
    return body


def parse(body: bytes | Json, **extra: Any) -> ChatRequest:
    return DIALECT.parse(TARGET, body if isinstance(body, bytes) else json.dumps({**body, **extra}).encode())


def spelled(message: Message) -> Message:
    """The message with its arguments in the spelling of `inputs`."""
    made = [
        ToolCall(call.id, call.name, json.dumps(json.loads(call.arguments), separators=(",", ":"))) for call in message.tool_calls
    ]
    return msgspec.structs.replace(message, tool_calls=tuple(made))


def user(*blocks: Json, **extra: Any) -> ChatRequest:
    return parse({"messages": [{"role": "user", "content": list(blocks)}]}, **extra)


def reply_to(message: Message, finish: FinishReason = "stop", stop: str = "") -> Reply:
    return Reply(CALL, "policy", 17, (Choice(message, finish, stop),), Usage(3, 5))


def streamed(reply: Reply, cuts: list[int]) -> list[tuple[str, Json]]:
    """The reply as the gateway streams it, its text and reasoning cut into deltas at `cuts`: event names and data."""
    writer = DIALECT.events(parse({"messages": [HELLO], "model": "policy", "stream": True}), CALL, 17)
    message = reply.message
    deltas: list[Delta] = [ReasoningDelta(piece) for piece in pieces(message.reasoning, cuts)]
    deltas += [TextDelta(piece) for piece in pieces(message.text, cuts)]
    sent = [writer.start()]
    for delta in deltas:
        sent += [writer.keep_alive(), writer.delta(delta)]
    *events, rest = b"".join([*sent, writer.finish(reply)]).split(b"\n\n")
    assert rest == b""
    read = []
    for event in events:
        assert event.isascii()
        name, data = event.splitlines()
        read.append((name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))))
    return read


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def joined(events: list[tuple[str, Json]]) -> Json:
    """What a client makes of a stream; each event is one that the SDK's types allow."""
    message: Json = {}
    inputs: dict[int, str] = {}
    for name, event in events:
        assert name == event["type"]
        if name == "ping":
            continue
        EVENT.validate_python(event)
        if name == "message_start":
            message = event["message"]
        elif name == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif name == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1, "only the last block is open"
            kind, text = next(item for item in event["delta"].items() if item[0] != "type")
            if kind == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + text
            else:
                message["content"][-1][kind] += text
        elif name == "content_block_stop" and event["index"] in inputs:
            message["content"][-1]["input"] = json.loads(inputs[event["index"]])
        elif name == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert events[-1][0] == "message_stop"
    return message


# There and back


@given(histories, st.data(), st.booleans())
def test_a_history_survives_writing_and_reading(history: list[Message], data: st.DataObject, ascii_only: bool) -> None:
    wire = json.dumps(written(history, Style(data)), ensure_ascii=ascii_only).encode()
    assert [spelled(message) for message in parse(wire).messages] == history


@given(histories, st.data())
def test_cache_control_and_strings_for_blocks_change_nothing_but_a_note(history: list[Message], data: st.DataObject) -> None:
    plain, other = parse(written(history, Style(None))), written(history, Style(data))
    marked = parse(other)
    assert msgspec.structs.replace(marked, normalised=()) == plain
    assert marked.normalised == (("cache_control",) if "cache_control" in json.dumps(other) else ())


@given(reply_messages, finishes)
def test_a_whole_reply_is_read_by_the_sdk_and_comes_back_as_the_same_message(message: Message, finish: FinishReason) -> None:
    read = SdkMessage.model_validate_json(DIALECT.reply(parse({"messages": [HELLO]}), reply_to(message, finish)))
    assert (read.id, read.model, read.role) == ("msg_c0aaaaaaaa", "policy", "assistant")
    assert (read.usage.input_tokens, read.usage.output_tokens) == (3, 5)
    sent_back = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in read.content]}
    (echo,) = parse({"messages": [sent_back]}).messages
    minted = (signature(CALL, 0),) if message.reasoning else ()
    assert (echo.content, echo.reasoning, echo.minted) == (message.content, message.reasoning, minted)
    assert [call.id for call in echo.tool_calls] == [call.id for call in message.tool_calls]
    assert link("", echo) == link("", message)


@given(reply_messages, finishes, st.lists(st.integers(0, 20), max_size=3))
def test_joined_events_equal_the_whole_reply(message: Message, finish: FinishReason, cuts: list[int]) -> None:
    reply = reply_to(message, finish)
    assert joined(streamed(reply, cuts)) == json.loads(DIALECT.reply(parse({"messages": [HELLO]}), reply))


def test_the_order_in_which_a_harness_writes_arguments_back_does_not_matter() -> None:
    wrote = Message("assistant", tool_calls=(ToolCall("a", "Bash", '{ "timeout" :  60000 , "command":"ls \\u00e9"}'),))
    block = {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls é", "timeout": 60000}}
    (echo,) = parse({"messages": [{"role": "assistant", "content": [block]}]}).messages
    assert link("", echo) == link("", wrote)


def test_arguments_are_compact_and_else_as_they_came() -> None:
    sent = rb'{"type":"tool_use","id":"a","name":"t","input":{ "b" : 1.50, "a":[1e3, 12345678901234567890123], "u":"\u00e9 x" }}'
    (message,) = parse(b'{"messages":[{"role":"assistant","content":[' + sent + b"]}]}").messages
    assert message.tool_calls[0].arguments == r'{"b":1.50,"a":[1e3,12345678901234567890123],"u":"\u00e9 x"}'


def test_arguments_that_are_no_object_are_wrapped_as_anthropic_says_and_unwrapped_under_our_id_only() -> None:
    message = Message("assistant", tool_calls=(ToolCall(tool_call_id(CALL, 0, 0), "t", '{"a":'),))
    (block,) = json.loads(DIALECT.reply(parse({"messages": [HELLO]}), reply_to(message)))["content"]
    assert block["input"] == {"INVALID_JSON": '{"a":'}
    for call_id, arguments in ((block["id"], '{"a":'), ("toolu_1", r'{"INVALID_JSON":"{\"a\":"}')):
        (echo,) = parse({"messages": [{"role": "assistant", "content": [block | {"id": call_id}]}]}).messages
        assert echo.tool_calls[0].arguments == arguments


# What is written


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [("stop", "", "end_turn"), ("length", "", "max_tokens"), ("tool_calls", "", "tool_use"), ("stop", "END", "stop_sequence")],
)
def test_the_stop_reason_says_why_the_reply_ended(finish: FinishReason, stop: str, reason: str) -> None:
    message = joined(streamed(reply_to(Message("assistant", (TextPart("x"),)), finish, stop), []))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop or None)


def test_an_empty_reply_has_one_empty_block_of_text() -> None:
    """Scripts read the first block without asking whether there is any."""
    message = joined(streamed(reply_to(Message("assistant")), []))
    assert message["content"] == [{"type": "text", "text": ""}]
    assert parse({"messages": [message]}).messages == (Message("assistant"),)


def test_blocks_open_at_their_first_delta_and_thinking_is_signed_before_it_ends() -> None:
    message = Message("assistant", (TextPart("ab"),), "th", (ToolCall("i", "t", "{}"),))
    events = streamed(reply_to(message, "tool_calls"), [1])
    order = [event["delta"]["type"] if "index" in event and "delta" in event else name for name, event in events]
    assert [name for name in order if name != "ping"] == [
        *("message_start", "content_block_start", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop", "message_delta", "message_stop"),
    ]


def test_nothing_that_can_be_acted_on_leaves_before_the_end() -> None:
    writer = DIALECT.events(parse({"messages": [HELLO]}), CALL, 17)
    early = writer.start() + writer.delta(ReasoningDelta("t")) + writer.delta(TextDelta("x")) + writer.keep_alive()
    assert not any(name in early for name in (b"tool_use", b"message_delta", b"message_stop"))


def test_thinking_that_goes_on_after_text_is_a_block_of_its_own() -> None:
    writer = DIALECT.events(parse({"messages": [HELLO]}), CALL, 17)
    deltas: list[Delta] = [ReasoningDelta("a"), TextDelta("b"), ReasoningDelta("c")]
    sent = b"".join(map(writer.delta, deltas))
    starts = [json.loads(event.partition(b"data: ")[2]) for event in sent.split(b"\n\n") if b"content_block_start" in event]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "thinking"),
    ]
    assert sent.count(b"signature_delta") == 1


FAULTS: list[tuple[FaultKind, int, str]] = [
    ("invalid", 400, "invalid_request_error"),
    ("context_length", 400, "invalid_request_error"),
    ("unauthorized", 401, "authentication_error"),
    ("not_found", 404, "not_found_error"),
    ("frozen", 409, "invalid_request_error"),
    ("unavailable", 503, "api_error"),
    ("internal", 500, "api_error"),
]


@pytest.mark.parametrize(("kind", "status", "type"), FAULTS)
def test_an_error_has_the_shape_of_the_api_whole_and_in_a_stream(kind: FaultKind, status: int, type: str) -> None:
    fault = Fault(kind, "code", "why \u2028", 900, 800)
    given_status, body = DIALECT.fault(fault)
    message = "prompt is too long: 900 tokens > 800 maximum" if kind == "context_length" else "why \u2028"
    assert (given_status, json.loads(body)) == (status, {"type": "error", "error": {"type": type, "message": message}})
    event = DIALECT.events(parse({"messages": [HELLO]}), CALL, 1).error(fault)
    assert event.isascii()
    name, data = event.split(b"\n", 1)
    assert (name, json.loads(data.removeprefix(b"data: "))) == (b"event: error", json.loads(body))


def test_models_are_listed_as_the_api_does() -> None:
    cards = [ModelCard("policy", 4096, 1_700_000_000), ModelCard("b", 1, 0)]
    listed = json.loads(DIALECT.models(Route("models"), cards))
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "policy", "b")
    assert listed["data"][0] == json.loads(DIALECT.models(Route("models", "policy"), cards[:1]))
    assert listed["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert ModelInfo.model_validate(listed["data"][0]).id == "policy"
    assert DIALECT.token_count(7) == b'{"input_tokens":7}'


# What is read: a request as Claude Code writes it, in our own words


def claude_code() -> Json:
    """The third request of a session: attribution, blocks for the system prompt, system messages, results in parallel."""
    return {
        "model": "some-model",
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.0.0.abc;"},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "\nYou work with files.", **CACHED},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<system-reminder>\nbe brief\n"}, {"type": "text", "text": "List."}],
            },
            {"role": "system", "content": "# Environment\nLinux"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": " hm\n", "signature": signature(CALL, 0)},
                    {"type": "text", "text": " Two at once. \n"},
                    {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "call_2", "name": "Bash", "input": {"command": "pwd"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"tool_use_id": "call_1", "type": "tool_result", "content": "a.txt", "is_error": False},
                    {
                        "tool_use_id": "call_2",
                        "type": "tool_result",
                        "content": [{"type": "text", "text": "no"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "Answer with text only.", **CACHED},
                ],
            },
        ],
        "tools": [
            {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object", "properties": {}}},
            {
                "name": "DeferredToolPlaceholder",
                "description": "More.",
                "input_schema": {"type": "object"},
                "defer_loading": True,
                **CACHED,
            },
        ],
        "metadata": {"user_id": "{}"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def test_a_request_of_claude_code_is_read_whole() -> None:
    request = parse(claude_code())
    assert request.messages == (
        Message("system", tuple(TextPart(block["text"]) for block in claude_code()["system"])),
        Message("user", (TextPart("<system-reminder>\nbe brief\n"), TextPart("List."))),
        Message("system", (TextPart("# Environment\nLinux"),)),
        Message(
            "assistant",
            (TextPart(" Two at once. \n"),),
            " hm\n",
            (ToolCall("call_1", "Bash", '{"command":"ls"}'), ToolCall("call_2", "Bash", '{"command":"pwd"}')),
            minted=(signature(CALL, 0),),
        ),
        Message("tool", (TextPart("a.txt"),), tool_call_id="call_1"),
        Message("tool", (TextPart("no"),), tool_call_id="call_2", is_error=True),
        Message("user", (TextPart("Answer with text only."),)),
    )
    assert [tool.name for tool in request.tools] == ["Bash", "DeferredToolPlaceholder"]
    assert (request.stream, request.sampling) == (True, RequestedSampling(max_tokens=32000))
    assert set(request.unserved) == {"defer_loading", "effort"}
    assert request.normalised == ("cache_control",)
    assert set(request.extra) == {"metadata", "thinking", "context_management", "output_config"}


def test_a_schema_is_kept_byte_for_byte() -> None:
    schema = b'{ "b":1.0,"a" :[1e3, 12345678901234567890123], "u":"\\u00e9"}'
    (tool,) = parse(b'{"messages":[{"role":"user","content":"x"}],"tools":[{"name":"t","input_schema":%s}]}' % schema).tools
    assert bytes(tool.parameters) == schema


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], [{"type": "server_tool_use", "id": 1}]])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_no_content_is_no_content(content: object, role: Any) -> None:
    assert parse({"messages": [{"role": role, "content": content}], "system": ""}).messages == (Message(role),)


def test_a_tool_result_may_say_nothing_or_hold_an_image() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    cases: list[tuple[Json, tuple[ImagePart, ...]]] = [
        ({}, ()),
        ({"content": []}, ()),
        ({"content": [image]}, (ImagePart("image/png", "aGk="),)),
    ]
    for content, read in cases:
        request = user({"type": "tool_result", "tool_use_id": "a", **content})
        assert request.messages == (Message("tool", read, tool_call_id="a"),)


@pytest.mark.parametrize(
    ("block", "text", "unserved"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "body"}}, "body", ()),
        ({"type": "document", "source": {"type": "content", "content": "body"}}, "body", ()),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}},
            "[document application/pdf]",
            ("block:document",),
        ),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "[image]", ("block:image",)),
        ({"type": "tool_reference", "tool_name": "Read"}, "[tool Read]", ("block:tool_reference",)),
        ({"type": "web_search_tool_result", "tool_use_id": "a", "content": {"type": "x"}}, "", ("block:web_search_tool_result",)),
        ({"type": "container_upload", "file_id": "f"}, "", ("block:container_upload",)),
        ({"type": "not_yet_invented", "text": 7}, "", ("block:not_yet_invented",)),
    ],
)
def test_what_the_policy_is_not_given_is_noted_and_never_refused(block: Json, text: str, unserved: tuple[str, ...]) -> None:
    request = user({"type": "text", "text": "before "}, block, {"type": "text", "text": " after"})
    assert (request.messages[0].text, request.unserved) == (f"before {text} after", unserved)


def test_redacted_thinking_names_its_call_if_it_is_ours() -> None:
    blocks = [{"type": "redacted_thinking", "data": data} for data in (signature(CALL, 0), "bm90IG91cnM=")]
    request = parse({"messages": [{"role": "assistant", "content": blocks}]})
    assert request.messages == (Message("assistant", minted=(signature(CALL, 0),)),)
    assert request.unserved == ("block:redacted_thinking",)


def test_tools_of_anthropics_servers_are_left_out_by_name() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {
            "type": "custom",
            "name": "own",
            "input_schema": {},
            "eager_input_streaming": True,
            "strict": True,
            "defer_loading": False,
        },
    ]
    request = parse({"messages": [HELLO], "tools": tools})
    assert [tool.name for tool in request.tools] == ["own"]
    assert request.unserved == ("tool:web_search_20250305", "tool:bash_20250124", "tool:mcp_toolset", "strict")


OWN = {"name": "own", "input_schema": {}}


@pytest.mark.parametrize(
    ("choice", "tools", "read", "shown", "unserved"),
    [
        ({"type": "auto"}, [OWN], "auto", 1, ()),
        ({"type": "any"}, [OWN], "required", 1, ()),
        ({"type": "tool", "name": "own"}, [OWN], "own", 1, ()),
        ({"type": "none"}, [OWN], "none", 0, ()),
        ({"type": "auto", "disable_parallel_tool_use": True}, [OWN], "auto", 1, ("parallel_tool_calls",)),
        ({"type": "tool", "name": "gone"}, [OWN], "auto", 1, ("tool_choice",)),
        ({"type": "any"}, [], "auto", 0, ("tool_choice",)),
    ],
)
def test_tool_choice(choice: Json, tools: list[Json], read: str, shown: int, unserved: tuple[str, ...]) -> None:
    request = parse({"messages": [HELLO], "tools": tools, "tool_choice": choice})
    assert (request.tool_choice, len(request.tools), request.unserved) == (read, shown, unserved)


def test_sampling_is_what_was_asked_and_blank_stop_texts_are_left_out() -> None:
    request = parse(
        {"messages": [HELLO]}, temperature=1, top_p=0.5, top_k=4, max_tokens=9, stop_sequences=["END", "\n\n", "", " x"]
    )
    assert request.sampling == RequestedSampling(1.0, 0.5, 4, 9, stop=("END", " x"))
    assert request.unserved == ("stop_sequences",)


@pytest.mark.parametrize(
    ("fields", "unserved"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ("thinking",)),
        ({"thinking": {"type": "disabled"}, "service_tier": "auto", "mcp_servers": [], "container": None}, ()),
        ({"mcp_servers": [{"url": "x"}], "container": "c"}, ("mcp_servers", "container")),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, ("context_management",)),
        ({"output_config": {"effort": "low", "format": None}}, ("effort",)),
    ],
)
def test_other_fields_are_kept_raw_and_noted_where_they_ask_for_something(fields: Json, unserved: tuple[str, ...]) -> None:
    request = parse({"messages": [HELLO]}, **fields)
    assert request.unserved == unserved
    kept = {name: value for name, value in fields.items() if name != "mcp_servers"}  # which come with their tokens
    assert {name: json.loads(bytes(raw)) for name, raw in request.extra.items()} == kept


def test_a_schema_for_the_reply_is_found_in_both_its_places() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        request = parse({"messages": [HELLO]}, **fields)
        assert request.json_schema is not None
        assert json.loads(bytes(request.json_schema)) == form["schema"]
        assert request.unserved == ()


def test_a_history_that_ends_with_the_assistant_is_read_as_it_is() -> None:
    request = parse({"messages": [HELLO, {"role": "assistant", "content": "{"}]})
    assert request.messages[-1] == Message("assistant", (TextPart("{"),))


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    assert parse(rb'{"messages":[{"role":"user","content":"a\ud83d"}]}').messages[0].text == "a\ufffd"


# What is refused

REFUSED: list[tuple[object, str]] = [
    ([], "object"),
    ({}, "messages"),
    ({"messages": []}, "messages: expected at least one message"),
    ({"messages": [HELLO, {"role": "tool", "content": "x"}]}, r"messages\[1\].role: expected one of user, assistant, system"),
    ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].*content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\].content\[0\]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, r"messages\[0\].content\[0\].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, r"messages\[0\].content\[0\]: .*text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, r"content\[0\]: .*tool_use_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": 1}]}]}]},
        r"messages\[0\].content\[0\].content\[0\]",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "t", "input": [1]}]}]},
        r"messages\[0\].content\[0\].input",
    ),
    ({"messages": [HELLO], "system": [{"type": "text"}]}, r"system\[0\]"),
    ({"messages": [HELLO], "tools": [{"description": "x"}]}, r"tools\[0\]: .*name"),
    ({"messages": [HELLO], "tool_choice": {"type": "all"}}, "tool_choice.type: expected one of auto, any, tool, none"),
    ({"messages": [HELLO], "max_tokens": 0}, "max_tokens"),
    ({"messages": [HELLO], "thinking": "on"}, "thinking"),
    ({"messages": [HELLO], "output_config": {"format": 1}}, "output_config.format"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_what_is_malformed_is_refused_by_the_path_of_its_field(body: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(json.dumps(body).encode())


def check_parse(body: bytes) -> None:
    """Reading ends in a request or in a refusal; any other error fails the test with its traceback."""
    with contextlib.suppress(InvalidRequest):
        parse(body)


VALID = json.dumps(claude_code()).encode()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["text", "tool_use", "", "image"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "source", "content"]), inner),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


PLACES = places(claude_code())[1:]


@settings(max_examples=300)
@given(st.sampled_from(PLACES), json_values)
def test_any_value_in_any_place_is_read_or_refused(place: tuple[Any, ...], value: object) -> None:
    body: Any = claude_code()
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    check_parse(json.dumps(body).encode())


@settings(max_examples=300)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_any_damage_to_a_body_is_read_or_refused(place: int, inserted: bytes, removed: int) -> None:
    check_parse(VALID[:place] + inserted + VALID[place + removed :])


def test_depth_without_end_is_refused() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    for body in (deep, b'{"messages":[{"role":"user","content":%s}]}' % deep, b'{"messages":[],"x":%s}' % deep):
        with pytest.raises(InvalidRequest):
            parse(body)


# Where it is served


@pytest.mark.parametrize(
    ("target", "route"),
    [
        (TARGET, Route("generate")),
        (Target("POST", "/messages"), Route("generate")),
        (Target("POST", "/v1/messages/count_tokens"), Route("count_tokens")),
        (Target("GET", "/v1/models", "", TARGET.headers), Route("models")),
        (Target("GET", "/v1/models/a/b", "", TARGET.headers), Route("models", "a/b")),
        (Target("GET", "/v1/models"), None),
        (Target("GET", "/v1/messages", "", TARGET.headers), None),
        (Target("POST", "/v1/messages/batches"), None),
        (Target("POST", "/v1/chat/completions"), None),
    ],
)
def test_it_serves_its_own_paths_and_models_where_the_header_asks(target: Target, route: Route | None) -> None:
    assert DIALECT.route(target) == route


@pytest.mark.parametrize(
    ("target", "claimed"),
    [
        (Target("POST", "/v1/messages/batches"), True),
        (Target("POST", "/v1/complete"), True),
        (Target("HEAD", "/api/hello"), True),
        (Target("GET", "/v1/files", "", TARGET.headers), True),
        (Target("GET", "/api/v1/models"), False),
        (Target("POST", "/v1/embeddings"), False),
    ],
)
def test_it_claims_unknown_routes_of_its_clients(target: Target, claimed: bool) -> None:
    assert DIALECT.claims(target) is claimed
