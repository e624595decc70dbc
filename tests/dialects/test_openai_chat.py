"""OpenAI Chat, requests: what a client writes is what the pivot holds, and whatever is malformed is refused as such."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar.chat import ChatRequest, ImagePart, Message, RequestedSampling, TextPart, ToolCall
from polar.errors import InvalidRequest
from polar.trajectory.export import message_json
from tests.dialects.openai_chat_client import HELLO, asked, messages, parse, parsed_messages, requests, written

TOOL = {"type": "function", "function": {"name": "t"}}


def flat(message: Message) -> Message:
    """The message with its texts as one, unless it has an image."""
    if any(isinstance(part, ImagePart) for part in message.content):
        return message
    return msgspec.structs.replace(message, content=(TextPart(message.text),) if message.text else ())


# There and back


@settings(max_examples=150)
@given(requests(), st.booleans(), st.booleans())
def test_a_request_survives_writing_and_reading(request: ChatRequest, terse: bool, ascii_only: bool) -> None:
    body = written(request, terse=terse, ascii_only=ascii_only)
    assert parse(body) == request
    assert parse(written(parse(body), terse=not terse)) == request


@given(messages)
def test_an_exported_message_is_one_that_the_dialect_reads(message: Message) -> None:
    assert parsed_messages(message_json(message)) == (flat(message),)


# What is read


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_no_content(content: object) -> None:
    assert parsed_messages({"role": "assistant", "content": content}, {"role": "assistant"}) == (Message("assistant"),) * 2


def test_nulls_stand_for_what_was_not_said() -> None:
    optional = "tool_calls tool_call_id name reasoning_content reasoning refusal audio function_call annotations".split()
    fields = """tools tool_choice response_format stream stream_options temperature top_p top_k max_tokens max_completion_tokens
    seed n stop logprobs top_logprobs frequency_penalty presence_penalty logit_bias reasoning_effort verbosity service_tier
    parallel_tool_calls functions function_call audio modalities""".split()
    request = parse({"messages": [{"role": "assistant", "content": "x", **dict.fromkeys(optional)}], **dict.fromkeys(fields)})
    assert request.messages == (Message("assistant", (TextPart("x"),)),)
    assert msgspec.structs.replace(request, extra={}) == ChatRequest("", request.messages)


def test_histories_as_harnesses_send_them_back() -> None:
    """OpenHands makes a list of the text, Vibe adds an index, Qwen Code answers tools in lists, others forget ids."""
    call: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    read = (
        Message("assistant", (TextPart("Hi"),), "", (ToolCall("a", "ls", "{}"),)),
        Message("tool", (TextPart("out"),), "", (), "a"),
    )
    listed = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    for content in ("Hi", listed, [{"type": "refusal", "refusal": "Hi"}]):
        for extra in ({}, {"index": 0}, {"provider_specific_fields": None}):
            asking = {"role": "assistant", "content": content, "tool_calls": [{**call, **extra}], "annotations": []}
            for result in ("out", [{"type": "text", "text": "out"}]):
                assert parsed_messages(asking, {"role": "tool", "tool_call_id": "a", "content": result}) == read
    nameless = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "ls", "arguments": None}}]}
    assert parsed_messages(nameless, {"role": "tool", "content": ""}) == (
        Message("assistant", tool_calls=(ToolCall("", "ls", ""),)),
        Message("tool"),
    )


def test_a_message_that_is_only_a_refusal_says_it() -> None:
    assert parsed_messages({"role": "assistant", "content": None, "refusal": "No."}) == (
        Message("assistant", (TextPart("No."),)),
    )


@pytest.mark.parametrize("role", ["user", "tool", "system", "assistant"])
@pytest.mark.parametrize(
    ("url", "image"),
    [
        ("data:image/png;base64,iVBORw0KGgo=", ImagePart(media_type="image/png", data="iVBORw0KGgo=")),
        ("DATA:image/JPEG;name=a;base64,_-8", ImagePart(media_type="image/JPEG", data="_-8")),
        ("https://example.org/a.png?b=c,d", ImagePart(url="https://example.org/a.png?b=c,d")),
        ("file:///tmp/a.png", ImagePart(url="file:///tmp/a.png")),
    ],
)
def test_an_image_is_read_in_any_message(role: str, url: str, image: ImagePart) -> None:
    for wire in (url, {"url": url}, {"url": url, "detail": "low"}):
        (message,) = parsed_messages({"role": role, "content": [{"type": "image_url", "image_url": wire}]})
        assert message.content == (image,)


def test_a_schema_is_kept_byte_for_byte() -> None:
    schema = b'{ "b":1.0,"a" :[1e3, 12345678901234567890123], "u":"\\u00e9"}'
    tool = b'{"type":"function","function":{"name":"t","parameters":%s}}' % schema
    wanted = b'{"type":"json_schema","json_schema":{"name":"s","schema": %s }}' % schema
    body = b'{"messages":[{"role":"user","content":"x"}],"tools":[%s],"response_format":%s}'
    request = parse(body % (tool, wanted))
    assert bytes(request.tools[0].parameters) == schema
    assert request.json_schema is not None
    assert bytes(request.json_schema) == schema


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
    request = parse(b'{"messages":[{"role":"user","content":"x"}],"seed":1,"novel":{"a" : [1.0]},"n":1,"store":false}')
    assert {name: bytes(raw) for name, raw in request.extra.items()} == {"novel": b'{"a" : [1.0]}', "store": b"false"}
    assert request.unserved == ()


def test_the_last_of_two_equal_fields_counts_as_in_every_json_reader() -> None:
    assert parse(b'{"messages":[],"messages":[{"role":"user","content":"a","content":"b"}]}').messages[0].text == "b"


@pytest.mark.parametrize(("stop", "read"), [("\n", ("\n",)), (["a"] * 16, ("a",) * 16), ([], ()), (None, ())])
def test_stop_is_one_text_or_several(stop: object, read: tuple[str, ...]) -> None:
    assert asked(stop=stop).sampling == RequestedSampling(stop=read)


def test_the_lower_of_both_limits_counts() -> None:
    assert asked(max_tokens=7, max_completion_tokens=5).sampling.max_tokens == 5


def test_a_tool_may_be_left_to_the_policy_hidden_required_or_named() -> None:
    named = {"type": "function", "function": {"name": "t"}}
    for wire, read in [(None, "auto"), ("auto", "auto"), ("none", "none"), ("required", "required"), (named, "t")]:
        request = asked(tools=[TOOL], tool_choice=wire)
        assert (request.tool_choice, len(request.tools)) == (read, 0 if read == "none" else 1)
    assert asked(tool_choice="auto").tools == ()


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, b'{"type":"object"}'),
        ({"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": 1}}}, b'{"a": 1}'),
    ],
)
def test_a_response_format_is_a_schema(wanted: dict[str, object], schema: bytes | None) -> None:
    read = asked(response_format=wanted).json_schema
    assert (None if read is None else bytes(read)) == schema


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("parallel_tool_calls", False, True),
        ("top_logprobs", 5, 0),
        ("frequency_penalty", 0.5, 0.0),
        ("presence_penalty", -1, 0),
        ("repetition_penalty", 1.1, 1.0),
        ("min_p", 0.1, 0),
        ("logit_bias", {"17": -100}, {}),
        ("reasoning_effort", "high", None),
        ("verbosity", "low", "medium"),
        ("service_tier", "flex", "auto"),
        ("web_search_options", {}, None),
    ],
)
def test_what_the_policy_is_not_given_is_kept_and_named(name: str, value: object, default: object) -> None:
    request = asked(**{name: value})
    assert request.unserved == (name,)
    assert json.loads(bytes(request.extra[name])) == value
    assert asked(**{name: default}).unserved == ()


def test_names_of_speakers_and_strict_tools_are_unserved() -> None:
    strict = {"type": "function", "function": {"name": "t", "strict": True}}
    assert asked(messages=[{**HELLO, "name": "ann"}, {**HELLO, "name": "bob"}], tools=[strict]).unserved == ("name", "strict")


# What is refused

USER = b'{"messages":[{"role":"user","content":%s}]}'
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
    (b'{"messages":[{"role":"wizard"}]}', r"messages\[0\].role: expected one of .*, got 'wizard'"),
    (b'{"messages":[{"role":"function","name":"f","content":"x"}]}', r"messages\[0\].role"),
    (b'{"messages":[{"role":"assistant","function_call":{"name":"f"}}]}', r"messages\[0\].function_call is not served"),
    (b'{"messages":[{"role":"assistant","audio":{"id":"a"}}]}', r"messages\[0\].audio is not served"),
    (USER % b"1", r"messages\[0\].*\$\.content"),
    (USER % b'[{"type":"image_url"}]', r"messages\[0\].content\[0\].image_url: expected"),
    (USER % b'[{"type":"image_url","image_url":{}}]', "missing required field `url`"),
    (USER % b'[{"type":"image_url","image_url":""}]', "expected the URL of an image"),
    (
        USER % b'[{"type":"image_url","image_url":"data:image/png,abc"}]',
        "expected data:image/…;base64,…, got 'data:image/png,abc'",
    ),
    (USER % b'[{"type":"image_url","image_url":"data:image/png;base64,"}]', "expected data:image"),
    (USER % b'[{"type":"image_url","image_url":"data:image/png;base64,A A"}]', "expected data:image"),
    (USER % b'[{"type":"image_url","image_url":"data:text/html;base64,AAAA"}]', "expected data:image"),
    (USER % b'[{"type":"input_audio","input_audio":{"data":"","format":"wav"}}]', "'input_audio' is not served"),
    (USER % b'[{"type":"text","text":"x"},{"type":"file","file":{"file_id":"f"}}]', r"content\[1\]: .*'file' is not served"),
    (b'{"messages":[{"role":"user","content":"x"}]', "not valid JSON"),
    (b'{"messages":[{"role":"user","content":"x"}]}x', "not valid JSON"),
    (USER % b'"\xff"', "not valid JSON"),
    (USER % b'"\\ud83"', "not valid JSON"),
    (USER % b"NaN", "not valid JSON"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    (b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a"}]}]}', "missing required field `function`"),
    (b'{"messages":[{"role":"assistant","tool_calls":[{"type":"custom","function":{"name":"a"}}]}]}', "custom"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_a_malformed_body_is_refused_and_says_what_is_wrong(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(body)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (b'"seed":1180591620717411303424', "seed"),  # 2**70: an integer that could not be stored
        (b'"max_tokens":1180591620717411303424', "max_tokens"),
        (b'"top_k":-1180591620717411303424', "top_k"),
        (b'"max_completion_tokens":0', "max_completion_tokens"),
        (b'"temperature":1e999', "Number out of range"),
        (b'"temperature":NaN', "not valid JSON"),
        (b'"top_p":"1"', "top_p"),
        (b'"seed":1.5', "seed"),
        (b'"stream":"yes"', "stream"),
        (b'"n":0', "n"),
        (b'"n":17', "`int` <= 16"),
        (b'"n":true', "n"),
        (b'"n":1e999', "Number out of range"),
        (b'"stop":"\xff"', "not valid JSON"),
        (b'"stop":""', "stop"),
        (b'"stop":["x",""]', "stop"),
        (b'"stop":[' + b",".join([b'"x"'] * 17) + b"]", "length <= 16"),
        (b'"stop":[1]', "stop"),
        (b'"logprobs":"yes"', "logprobs"),
        (b'"response_format":{"type":"grammar"}', "response_format: expected text, json_object, or json_schema .* got 'grammar'"),
        (b'"response_format":{"type":"json_schema"}', "response_format: expected"),
        (b'"response_format":{"type":"json_schema","json_schema":{"name":"n"}}', "json_schema.schema: expected a JSON schema"),
        (b'"response_format":{"type":"json_schema","json_schema":{"schema":[1]}}', r"expected a JSON schema, got \[1\]"),
        (b'"response_format":"json"', "response_format"),
        (b'"tool_choice":"some"', "tool_choice: expected one of auto, none, required or a function, got 'some'"),
        (b'"tool_choice":"required"', "tool_choice: 'required' needs at least one tool"),
        (b'"tool_choice":{"type":"function"}', "tool_choice: .*'function' is not served; expected 'function' with a name"),
        (b'"tool_choice":{"type":"allowed_tools"}', "tool_choice: .*'allowed_tools' is not served"),
        (b'"tool_choice":{"type":"function","function":{"name":"u"}}', "tool_choice: expected the name of one of the tools"),
        (b'"functions":[{"name":"f"}]', "functions: .* is not served"),
        (b'"function_call":{"name":"f"}', "function_call: .* is not served"),
        (b'"modalities":["text","audio"]', "modalities: .* is not served"),
        (b'"audio":{"voice":"a","format":"mp3"}', "audio: .* is not served"),
        (b'"tools":[{"type":"web_search"}]', r"tools\[0\]: a tool of type 'web_search' is not served"),
        (b'"tools":[{"type":"function"}]', "expected 'function' with a function"),
        (
            b'"tools":[{"type":"function","function":{"name":"t","parameters":7}}]',
            r"tools\[0\].function.parameters: expected .*got 7",
        ),
        (b'"tools":[{"type":"function","function":{"name":"t","parameters":"\xff"}}]', "not valid JSON"),
        (b'"novel":"\xff"', "not valid JSON"),
        (b'"stop":' + b"[" * 400 + b"]" * 400, "stop"),
        (b'"logit_bias":' + b"[" * 100_000 + b"]" * 100_000, "maximum recursion depth"),
        (b'"novel":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "maximum recursion depth"),
    ],
)
def test_a_field_that_is_not_served_or_not_readable_is_refused(field: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(b'{"messages":[{"role":"user","content":"x"}],' + field + b"}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([2**70, -(2**70), 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
known_fields = st.sampled_from(
    "messages model tools stream stream_options temperature top_p top_k max_tokens max_completion_tokens seed n stop logprobs "
    "top_logprobs logit_bias response_format tool_choice functions audio modalities parallel_tool_calls novel".split()
)
optional_fields = "content reasoning reasoning_content refusal tool_calls tool_call_id name function_call audio".split()
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
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "b", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "result"},
        ],
        "tools": [{"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "b"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object"}}},
        "stream": True,
        "stop": ["x"],
    }
).encode()


def check_parse(body: bytes) -> None:
    """Refused as malformed, or read as what can be stored as it is."""
    try:
        request = parse(body)
    except InvalidRequest:
        return
    for value in (request.messages, request.tools, request.sampling, request.model, request.json_schema, request.unserved):
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


def test_the_valid_body_is_read() -> None:
    assert len(parse(VALID).messages) == 5
