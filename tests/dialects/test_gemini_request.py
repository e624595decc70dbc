"""Requests of Gemini: what is read, what is noted by name, and what is refused."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.chat import ImagePart, Message, RequestedSampling, TextPart
from polar.errors import InvalidRequest
from tests.dialects.gemini_client import (
    CALL,
    DIALECT,
    HELLO,
    OURS,
    THOUGHTS,
    call,
    messages_of,
    model,
    parse,
    parse_config,
    reply_to,
    response,
    user,
)

# What is read


def test_parts_stay_in_order_and_texts_stay_parts() -> None:
    content = user({"text": "a"}, {"text": "b"}, response("t", {"output": "r"}, id="1"), {"text": "c"})
    assert messages_of(content) == (
        Message("user", (TextPart("a"), TextPart("b"))),
        Message("tool", (TextPart("r"),), tool_call_id="1"),
        Message("user", (TextPart("c"),)),
    )


@pytest.mark.parametrize(
    ("raw", "text", "is_error"),
    [
        (b'{"output":"a\\n"}', "a\n", False),
        (b'{"output":{"a": 1}}', '{"a": 1}', False),
        (b'{"error":"no"}', "no", True),
        (b'{"result": "r"}', '{"result": "r"}', False),
        (b'{"error":null, "output":1}', '{"error":null, "output":1}', False),
        (b"null", "", False),
        (b"{}", "{}", False),
    ],
)
def test_a_response_is_shown_as_written_or_bare_if_it_is_all_output_or_error(raw: bytes, text: str, is_error: bool) -> None:
    body = b'{"contents":[{"parts":[{"functionResponse":{"name":"t","id":"1","response":%s}}]}]}' % raw
    (message,) = parse(body).messages
    assert (message.text, message.is_error) == (text, is_error)


def test_images_of_a_response_are_its_images() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "_-8"}}
    (message,) = messages_of(user(response("t", {"output": "r"}, id="1", parts=[image])))
    assert message.content == (TextPart("r"), ImagePart("image/png", "/+8="))


def test_other_media_and_server_side_parts_are_left_out_by_name() -> None:
    audio, code = {"inlineData": {"mimeType": "audio/mp3", "data": "AA=="}}, {"executableCode": {"code": "1"}}
    request = parse({"contents": [user(audio, {"text": "a"}), model(code, {"text": "b"})]})
    assert [message.text for message in request.messages] == ["[audio/mp3]a", "b"]
    assert request.unserved == ("part:inlineData", "part:executableCode")


@pytest.mark.parametrize("system", ["be brief", {"parts": [{"text": "be brief"}]}, {"parts": {"text": "be brief"}}])
def test_a_system_instruction_comes_as_text_or_content(system: object) -> None:
    request = parse({"contents": {"parts": {"text": "x"}}, "system_instruction": system})
    assert request.messages == (Message("system", (TextPart("be brief"),)), Message("user", (TextPart("x"),)))


def test_tools_come_in_both_schema_forms() -> None:
    openapi = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "enum": ["A"]},
            "n": {"type": "ARRAY", "items": {"any_of": [{"type": "INTEGER"}, {"$ref": "#/x"}]}, "maxItems": "3"},
        },
        "propertyOrdering": ["n", "type"],
        "required": ["type"],
    }
    declared = b'{"name":"a","description":"A","parameters":%s},{"name":"b","parametersJsonSchema":{ "type" : "OBJECT"}}'
    body = b'{"contents":[{"parts":[{"text":"x"}]}],"tools":[{"functionDeclarations":[%s,{"name":"c"}]},{"googleSearch":{}}]}'
    request = parse(body % (declared % json.dumps(openapi).encode()))
    a, b, c = request.tools
    assert json.loads(bytes(a.parameters)) == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["A", None]},
            "n": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/x"}]}, "maxItems": 3},
        },
        "required": ["type"],
    }
    assert (a.name, a.description, bytes(b.parameters)) == ("a", "A", b'{ "type" : "OBJECT"}')
    assert json.loads(bytes(c.parameters)) == {"type": "object", "properties": {}}
    assert request.unserved == ("tool:googleSearch",)


@pytest.mark.parametrize(
    ("calling", "choice", "unserved"),
    [
        ({}, "auto", ()),
        ({"mode": "AUTO"}, "auto", ()),
        ({"mode": "NONE"}, "none", ()),
        ({"mode": "ANY"}, "required", ()),
        ({"mode": "ANY", "allowedFunctionNames": ["a"]}, "a", ()),
        ({"mode": "ANY", "allowed_function_names": ["a", "b"]}, "required", ("allowedFunctionNames",)),
        ({"mode": "VALIDATED"}, "auto", ("functionCallingConfig.mode",)),
    ],
)
def test_the_calling_mode_is_the_tool_choice(calling: dict[str, Any], choice: str, unserved: tuple[str, ...]) -> None:
    tools = [{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}]
    request = parse({"contents": [HELLO], "tools": tools, "toolConfig": {"functionCallingConfig": calling}})
    assert (request.tool_choice, request.unserved) == (choice, unserved)
    assert len(request.tools) == (0 if choice == "none" else 2)


def test_the_generation_config_is_the_sampling() -> None:
    config = {
        "temperature": 1,
        "topP": 0.5,
        "top_k": 64.0,
        "maxOutputTokens": 9,
        "seed": 3,
        "stopSequences": ["a"],
        "candidateCount": 1,
    }
    assert parse_config(**config).sampling == RequestedSampling(1.0, 0.5, 64, 9, 3, ("a",))
    assert parse_config(**config).unserved == ()


@pytest.mark.parametrize(
    ("config", "schema"),
    [
        ({"responseMimeType": "application/json"}, {}),
        ({"responseMimeType": "application/json", "responseSchema": {"type": "STRING"}}, {"type": "string"}),
        ({"response_mime_type": "application/json", "response_json_schema": {"type": "array"}}, {"type": "array"}),
        ({"responseMimeType": "text/plain"}, None),
        ({}, None),
    ],
)
def test_a_json_reply_has_its_schema(config: dict[str, Any], schema: object) -> None:
    request = parse_config(**config)
    assert (None if request.json_schema is None else json.loads(bytes(request.json_schema))) == schema


def test_what_the_policy_is_not_given_is_named() -> None:
    thinking = {"includeThoughts": True, "thinkingBudget": 8192, "thinkingLevel": "HIGH"}
    config = {"presencePenalty": 0.5, "frequencyPenalty": 0, "responseModalities": ["TEXT"], "thinkingConfig": thinking}
    request = parse(
        {"contents": [HELLO], "generationConfig": config, "safetySettings": [{"category": "X"}], "labels": {"a": "b"}}
    )
    assert request.unserved == ("presencePenalty", "thinkingBudget", "thinkingLevel", "safetySettings")
    assert bytes(request.extra["labels"]) == b'{"a": "b"}'
    assert parse_config(thinkingConfig={"includeThoughts": True, "thinkingBudget": -1}).unserved == ()


def test_tokens_are_counted_of_contents_or_of_a_whole_request() -> None:
    inner = {"model": "models/m", "contents": [HELLO], "systemInstruction": {"parts": [{"text": "s"}]}}
    assert parse({"contents": [HELLO]}, "countTokens").messages == messages_of(HELLO)
    assert len(parse({"generateContentRequest": inner}, "countTokens").messages) == 2
    assert json.loads(DIALECT.token_count(7)) == {"totalTokens": 7}


def test_half_a_surrogate_pair_is_read_as_a_replacement_character() -> None:
    assert parse(rb'{"contents":[{"parts":[{"text":"cut \ud83d"}]}]}').messages[0].text == "cut \ufffd"


# What is refused

REFUSED: list[tuple[bytes, str]] = [
    (b"", "Input data was truncated"),
    (b"[]", "Expected `object`"),
    (b"{}", "contents: expected at least one content"),
    (b'{"contents":[]}', "contents: expected at least one content"),
    (b'{"contents":"x"}', "contents"),
    (b'{"contents":[1]}', r"contents\[0\]: Expected `object`"),
    (b'{"contents":[{"role":"wizard","parts":[]}]}', r"contents\[0\].role: expected one of user, model"),
    (b'{"contents":[{"parts":[{"text":1}]}]}', r"contents\[0\].parts\[0\]: Expected `str"),
    (b'{"contents":[{"role":"model","parts":[{"functionCall":{}}]}]}', r"functionCall: Object missing required field `name`"),
    (
        b'{"contents":[{"role":"model","parts":[{"functionCall":{"name":"a","args":[]}}]}]}',
        r"functionCall.args: Expected `object`",
    ),
    (b'{"contents":[{"parts":[{"functionCall":{"name":"a"}}]}]}', "functionCall: expected in a content of role model"),
    (
        b'{"contents":[{"role":"model","parts":[{"functionResponse":{}}]}]}',
        "functionResponse: expected in a content of role user",
    ),
    (b'{"contents":[{"parts":[{"functionResponse":{"response":"x"}}]}]}', "functionResponse.response: Expected `object`"),
    (b'{"contents":[{"parts":[{"inlineData":{}}]}]}', "inlineData: Object missing required field `data`"),
    (
        b'{"contents":[{"parts":[{"text":"x"}]}],"cachedContent":"cachedContents/1"}',
        "cachedContent: 'cachedContents/1' is not held",
    ),
    (b'{"contents":[{"parts":[{"text":"x"}]}],"generationConfig":{"candidateCount":2}}', "candidateCount: 2 is not served"),
    (b'{"contents":[{"parts":[{"text":"x"}]}],"generationConfig":{"topK":1.5}}', "topK: expected a whole number"),
    (b'{"contents":[{"parts":[{"text":"x"}]}],"generationConfig":{"stopSequences":[""]}}', "stopSequences"),
    (
        b'{"contents":[{"parts":[{"text":"x"}]}],"toolConfig":{"functionCallingConfig":{"mode":"X"}}}',
        "mode: expected one of AUTO",
    ),
    (
        b'{"contents":[{"parts":[{"text":"x"}]}],"toolConfig":{"functionCallingConfig":{"allowedFunctionNames":["q"]}}}',
        "'q' is not one of the tools",
    ),
    (b'{"contents":[{"parts":[{"text":"x"}]}],"tools":[{"functionDeclarations":[{"name":"a","parameters":1}]}]}', "parameters"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_a_malformed_body_is_refused_and_says_what_is_wrong(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(body)


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema = b'{"items":' * 3_000 + b"{}" + b"}" * 3_000
    body = b'{"contents":[{"parts":[{"text":"x"}]}],"tools":[{"functionDeclarations":[{"name":"a","parameters":%s}]}]}'
    with pytest.raises(InvalidRequest):
        parse(body % schema)


VALID = json.dumps(
    {
        "systemInstruction": {"parts": [{"text": "é\u2028"}]},
        "contents": [
            user({"text": "\U0001f600"}, {"inline_data": {"mime_type": "image/png", "data": "AA=="}}),
            model({"text": "t", "thought": True}, {**call("b", {"a": [1.5, None]}), "thoughtSignature": OURS}),
            user(response("b", {"output": "r"})),
        ],
        "tools": [{"functionDeclarations": [{"name": "b", "parameters": {"type": "OBJECT", "nullable": True}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["b"]}},
        "generationConfig": {"topK": 64, "responseMimeType": "application/json", **THOUGHTS},
    }
).encode()


def check_parse(body: bytes) -> None:
    """Refused as malformed, or read as what can be stored, sent and answered."""
    try:
        request = parse(body, "streamGenerateContent", "alt=sse")
    except InvalidRequest:
        return
    for value in (request.messages, request.tools, request.sampling, request.json_schema, request.extra):
        msgspec.json.decode(msgspec.json.encode(value))
    DIALECT.reply(request, reply_to(Message("assistant", (), "r")))
    DIALECT.events(request, CALL, 17)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([2**70, 1e308, "ANY", "model"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
part_names = "text thought thoughtSignature functionCall functionResponse inlineData fileData executableCode thought_signature"
inner_names = (
    "name id args response parts mimeType data fileUri functionDeclarations parameters functionCallingConfig mode type items"
)
odd = st.dictionaries(st.sampled_from(inner_names.split()), json_values | st.lists(json_values, max_size=2), max_size=4)
odd_parts = st.dictionaries(st.sampled_from(part_names.split()), json_values | odd, max_size=3)
odd_contents = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "model", "tool"]) | json_values},
    optional={"parts": st.lists(odd_parts, max_size=3) | json_values},
)
odd_fields = st.dictionaries(
    st.sampled_from(
        "systemInstruction tools toolConfig generationConfig alt thinkingConfig safetySettings generation_config".split()
    ),
    json_values | odd | st.lists(odd, max_size=2),
    max_size=3,
)


@settings(max_examples=100)
@given(st.lists(odd_contents, max_size=2), odd_fields)
def test_any_json_is_read_or_refused(contents: list[Any], fields: dict[str, Any]) -> None:
    check_parse(json.dumps({"contents": contents, **fields}).encode())
    check_parse(json.dumps({"contents": [HELLO], **fields}).encode())


@settings(max_examples=100)
@given(st.integers(0, len(VALID) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_any_damage_to_a_body_is_read_or_refused(place: int, inserted: bytes, removed: int) -> None:
    check_parse(VALID[:place] + inserted + VALID[place + removed :])
