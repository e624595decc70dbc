"""OpenAI Chat: what is read and written stays the same, and whatever is malformed is refused as such."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from polar.chat import ChatRequest, Delta, Message, ReasoningDelta, Reply, TextDelta, TextPart, ToolCall, Usage
from polar.dialects.openai_chat import OpenAIChat
from polar.errors import InvalidRequest
from polar.trajectory.export import message_json

PATH = "/v1/chat/completions"
DIALECT = OpenAIChat()
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
tool_calls = st.builds(ToolCall, texts, texts, texts)
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.lists(st.builds(TextPart, texts), max_size=3).map(tuple),
    texts,
    st.lists(tool_calls, max_size=2).map(tuple),
    texts,
)
replies = st.builds(
    Message,
    st.just("assistant"),
    st.builds(lambda text: (TextPart(text),) if text else (), texts),
    texts,
    st.lists(tool_calls, max_size=3).map(tuple),
)
finishes = st.sampled_from(["stop", "length", "tool_calls"])


def parse(body: bytes | dict[str, Any], **extra: Any) -> ChatRequest:
    return DIALECT.parse(PATH, body if isinstance(body, bytes) else json.dumps({**body, **extra}).encode())


def parsed_messages(wire: list[dict[str, object]], ascii_only: bool = True) -> tuple[Message, ...]:
    return parse(json.dumps({"messages": wire}, ensure_ascii=ascii_only).encode()).messages


def flat(message: Message) -> Message:
    """The message as one part of text."""
    return msgspec.structs.replace(message, content=(TextPart(message.text),) if message.text else ())


def reply_to(message: Message, finish: Any = "stop") -> Reply:
    return Reply("c0aaaaaaaa", "policy", 17, message, finish, Usage(3, 5))


# There and back


@given(messages, st.booleans())
def test_a_message_survives_writing_and_reading(message: Message, ascii_only: bool) -> None:
    (read,) = parsed_messages([message_json(message)], ascii_only)
    assert read == flat(message)


@given(messages)
def test_parts_survive(message: Message) -> None:
    wire = {**message_json(message), "content": [{"type": "text", "text": part.text} for part in message.content]}
    assert parsed_messages([wire]) == (message,)


@given(replies, finishes)
def test_a_whole_reply_is_read_by_the_sdk_and_comes_back_as_the_same_message(message: Message, finish: str) -> None:
    body = DIALECT.reply(reply_to(message, finish))
    completion = ChatCompletion.model_validate_json(body, strict=True)
    assert (completion.id, completion.model, completion.created) == ("chatcmpl-c0aaaaaaaa", "policy", 17)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (3, 5, 8)
    assert completion.choices[0].finish_reason == finish
    sent_back = completion.choices[0].message.model_dump(exclude_none=True)
    assert parsed_messages([sent_back]) == (message,)
    assert parsed_messages([json.loads(body)["choices"][0]["message"]]) == (message,)


def streamed(message: Message, finish: str, cuts: list[int], include_usage: bool) -> bytes:
    """The reply as the gateway streams it, its text and reasoning cut into deltas at `cuts`."""
    options = {"include_usage": include_usage}
    request = parse({"messages": [HELLO], "model": "policy", "stream": True, "stream_options": options})
    writer = DIALECT.events(request, "c0aaaaaaaa", 17)
    deltas: list[Delta] = [ReasoningDelta(piece) for piece in pieces(message.reasoning, cuts)]
    deltas += [TextDelta(piece) for piece in pieces(message.text, cuts)]
    events = [writer.start()]
    for delta in deltas:
        events += [writer.keep_alive(), writer.delta(delta)]
    return b"".join([*events, writer.finish(reply_to(message, finish))])


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@given(replies, finishes, st.lists(st.integers(0, 20), max_size=3), st.booleans())
def test_joined_events_equal_the_whole_reply(message: Message, finish: str, cuts: list[int], include_usage: bool) -> None:
    stream = streamed(message, finish, cuts, include_usage)
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "), strict=True) for event in events]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for choice in choices)
    reasoning = "".join(getattr(choice.delta, "reasoning_content", "") for choice in choices)
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == list(range(len(message.tool_calls)))
    made = tuple(ToolCall(c.id or "", c.function.name or "", c.function.arguments or "") for c in calls if c.function)
    assert (text, reasoning, made) == (message.text, message.reasoning, message.tool_calls)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [finish]
    assert choices[-1].finish_reason == finish
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == ([8] if include_usage else [])


@given(replies)
def test_events_are_lines_of_ascii(message: Message) -> None:
    """Some clients break lines at U+2028, some at a lone carriage return."""
    for event in streamed(message, "stop", [1, 3], True).split(b"\n\n")[:-1]:
        assert event.isascii()
        assert event.startswith(b"data: ")
        assert len(event.splitlines()) == 1


@given(texts, texts)
def test_an_error_is_an_openai_error(code: str, message: str) -> None:
    request = parse({"messages": [HELLO], "stream": True})
    event = DIALECT.events(request, "c0", 1).error(500, code, message)
    for status, body in ((400, DIALECT.error(400, code, message)), (500, event.removeprefix(b"data: "))):
        error = json.loads(body)["error"]
        assert (error["code"], error["message"]) == (code, message)
        assert error["type"] == ("server_error" if status == 500 else "invalid_request_error")
    assert event.isascii()
    assert event.endswith(b"\n\n")


# What is read


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_no_content(content: object) -> None:
    assert parsed_messages([{"role": "assistant", "content": content}, {"role": "assistant"}]) == (Message("assistant"),) * 2


def test_nulls_stand_for_what_was_not_said() -> None:
    sparse = {"role": "assistant", "content": "x", "tool_calls": None, "reasoning_content": None, "refusal": None, "audio": None}
    fields = "tools stream stream_options temperature top_p max_tokens max_completion_tokens seed n stop tool_choice".split()
    request = parse({"messages": [sparse], **dict.fromkeys(fields)})
    assert request.messages == (Message("assistant", (TextPart("x"),)),)
    assert msgspec.structs.replace(request, extra={}) == ChatRequest("", request.messages)


def test_a_schema_is_kept_byte_for_byte() -> None:
    schema = b'{ "b":1.0,"a" :[1e3, 12345678901234567890123], "u":"\\u00e9"}'
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"t","parameters":%s}}]}'
    (tool,) = parse(body % schema).tools
    assert bytes(tool.parameters) == schema


def test_half_a_pair_changes_nothing_but_itself() -> None:
    """JavaScript cuts strings inside a pair. A schema next to it stays byte for byte, or every history would fork there."""
    tool = b'{"type":"function","function":{"name":"t","parameters":{ "a":1}}}'
    body = b'{"messages":[{"role":"user","content":"%s"}],  "tools":[' + tool + b"]}"
    for sent, read in [
        (rb"\ud83d", "\ufffd"),
        (rb"\ude00", "\ufffd"),
        (rb"a\uD83Db", "a\ufffdb"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\\ud83d", "\\ud83d"),
        (rb"\\\ud83d", "\\\ufffd"),
        (b"\xed\xa0\xbd", "\ufffd"),
        (b"\xed\x9f\xbf", "\ud7ff"),
    ]:
        request = parse(body % sent)
        assert request.messages[0].text == read
        assert bytes(request.tools[0].parameters) == b'{ "a":1}'


def test_unknown_fields_are_kept_raw_and_known_ones_are_not_repeated() -> None:
    extra = parse(b'{"messages":[{"role":"user","content":"x"}],"seed":1,"novel":{"a" : [1.0]},"n":1}').extra
    assert {name: bytes(raw) for name, raw in extra.items()} == {"novel": b'{"a" : [1.0]}', "n": b"1"}


def test_the_last_of_two_equal_fields_counts_as_in_every_json_reader() -> None:
    assert parse(b'{"messages":[],"messages":[{"role":"user","content":"a","content":"b"}]}').messages[0].text == "b"


def test_hidden_tools_are_no_tools() -> None:
    tools = [{"type": "function", "function": {"name": "t"}}]
    assert parse({"messages": [HELLO], "tools": tools, "tool_choice": "none"}).tools == ()
    assert len(parse({"messages": [HELLO], "tools": tools, "tool_choice": "auto"}).tools) == 1


# What is refused

REFUSED: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"\xff", "not valid JSON"),
    (b"null", "Expected `object`"),
    (b"{}", "missing required field `messages`"),
    (b'{"messages":null}', "Expected `array`"),
    (b'{"messages":{}}', "Expected `array`"),
    (b'{"messages":[]}', "at least one message"),
    (b'{"messages":[1]}', "Expected `object`"),
    (b'{"messages":[{"content":"x"}]}', "missing required field `role`"),
    (b'{"messages":[{"role":"wizard"}]}', r"messages\[0\].role"),
    (b'{"messages":[{"role":"user","content":1}]}', r"\$.messages\[0\].content"),
    (b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', "'image_url' is not served"),
    (b'{"messages":[{"role":"user","content":"x"}]', "not valid JSON"),
    (b'{"messages":[{"role":"user","content":"x"}]}x', "not valid JSON"),
    (b'{"messages":[{"role":"user","content":"\xff"}]}', "not valid JSON"),
    (b'{"messages":[{"role":"user","content":"\\ud83"}]}', "not valid JSON"),
    (b'{"messages":[{"role":"user","content":NaN}]}', "not valid JSON"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    (b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a"}]}]}', "missing required field `function`"),
    (b'{"messages":[{"role":"assistant","tool_calls":[{"type":"custom","function":{"name":"a"}}]}]}', "custom"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_a_malformed_body_is_refused_and_says_what_is_wrong(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(body)


@pytest.mark.parametrize(
    "fields",
    [
        b'"seed":1180591620717411303424',  # 2**70: an integer that could not be stored
        b'"max_tokens":1180591620717411303424',
        b'"top_k":-1180591620717411303424',
        b'"max_completion_tokens":0',
        b'"temperature":1e999',
        b'"temperature":NaN',
        b'"top_p":"1"',
        b'"seed":1.5',
        b'"stream":"yes"',
        b'"n":2',
        b'"n":1e999',
        b'"stop":"\xff"',
        b'"stop":["x"]',
        b'"logit_bias":{"1":2}',
        b'"response_format":{"type":"json_object"}',
        b'"tool_choice":{"type":"function"}',
        b'"tools":[{"type":"web_search"}]',
        b'"tools":[{"type":"function","function":{"name":"t","parameters":"\xff"}}]',
        b'"novel":"\xff"',
        b'"stop":' + b"[" * 400 + b"]" * 400,
        b'"novel":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
def test_a_field_that_is_not_served_or_not_readable_is_refused(fields: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(b'{"messages":[{"role":"user","content":"x"}],' + fields + b"}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([2**70, -(2**70), 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
known_fields = st.sampled_from(
    "messages model tools stream stream_options temperature top_p top_k max_tokens max_completion_tokens seed n stop logprobs "
    "logit_bias response_format tool_choice functions audio modalities novel".split()
)
optional_fields = "content reasoning reasoning_content tool_calls tool_call_id name function_call".split()
part_of_a_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "developer"]) | json_values},
    optional=dict.fromkeys(optional_fields, json_values),
)
VALID = json.dumps(
    {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "é\u2028"},
            {"role": "user", "content": [{"type": "text", "text": "\U0001f600"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "b", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "result"},
        ],
        "tools": [{"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}}],
        "stream": True,
        "stop": None,
    }
).encode()


def check_parse(body: bytes) -> None:
    """Refused as malformed, or read as what can be stored as it is."""
    try:
        request = parse(body)
    except InvalidRequest:
        return
    for value in (request.messages, request.tools, request.sampling, request.model):
        msgspec.json.decode(msgspec.json.encode(value))
    msgspec.msgpack.encode((request.messages, request.sampling, request.model, [bytes(raw) for raw in request.extra.values()]))
    assert all(bytes(raw).decode() is not None for raw in request.extra.values())


@settings(max_examples=150)
@given(st.dictionaries(known_fields, json_values, max_size=4), st.lists(part_of_a_message, min_size=1, max_size=2))
@example({"tools": [{"type": "function", "function": {"name": ""}}]}, [HELLO])
def test_any_json_is_read_or_refused(fields: dict[str, Any], wire: list[dict[str, Any]]) -> None:
    check_parse(json.dumps({"messages": wire, **fields}).encode())
    check_parse(json.dumps(fields).encode())


@settings(max_examples=200)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_any_damage_to_a_body_is_read_or_refused(place: int, inserted: bytes, removed: int) -> None:
    check_parse(VALID[:place] + inserted + VALID[place + removed :])


@given(st.binary(max_size=30))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    check_parse(body)


@pytest.mark.parametrize(
    ("path", "served"),
    [(PATH, True), ("/chat/completions", True), ("/v1/chat/completions/", False), ("", False), ("/v1/x", False)],
)
def test_it_serves_its_own_path(path: str, served: bool) -> None:
    assert DIALECT.serves(path) is served
