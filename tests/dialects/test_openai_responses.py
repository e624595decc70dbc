"""OpenAI Responses, requests: what a client writes is what the pivot holds; items of one reply are one message."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar.chat import ChatRequest, ImagePart, Message, RequestedSampling, TextPart, Tool, ToolCall
from polar.errors import InvalidRequest
from polar.ids import item_id, response_id, signature, tool_call_id
from tests.dialects.openai_responses_client import CUSTOM, items_read, parse, requests, written

A, B = "c1a0000001", "c2b0000002"
HELLO = {"role": "user", "content": "Hi"}
USER = Message("user", (TextPart("Hi"),))
FUNCTION = {"type": "function", "name": "ls", "parameters": {}}


def call(call_id: str, index: int = 0, **extra: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": tool_call_id(call_id, 0, index), "name": "ls", "arguments": "{}", **extra}


def output(call_id: str, index: int = 0, said: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": tool_call_id(call_id, 0, index), "output": said}


def spoken(text: str, **extra: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **extra}


def thought(text: str, **extra: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **extra}


def asked(call_id: str, *indices: int) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(tool_call_id(call_id, 0, index), "ls", "{}") for index in indices)


def answered(call_id: str, index: int = 0) -> Message:
    return Message("tool", (TextPart("out"),), tool_call_id=tool_call_id(call_id, 0, index))


# There and back


@settings(max_examples=100)
@given(requests(), st.booleans())
def test_a_request_survives_writing_and_reading(request: ChatRequest, interleaved: bool) -> None:
    read = parse(written(request, interleaved=interleaved))
    assert msgspec.structs.replace(read, extra={}) == request
    assert parse(written(read)) == read


# Which items are one message


def test_items_that_follow_each_other_are_one_message() -> None:
    read = items_read(HELLO, thought("So."), spoken("Two."), call(A, 0), call(A, 1), output(A, 0), output(A, 1))
    assert read == (USER, Message("assistant", (TextPart("Two."),), "So.", asked(A, 0, 1)), answered(A, 0), answered(A, 1))


def test_an_output_between_two_calls_of_one_reply_does_not_part_them() -> None:
    together = items_read(HELLO, call(A, 0), call(A, 1), output(A, 0), output(A, 1))
    assert items_read(HELLO, call(A, 0), output(A, 0), call(A, 1), output(A, 1)) == together


def test_without_our_identifiers_an_output_ends_the_reply() -> None:
    first, second = {**call(A), "call_id": "x"}, {**call(A), "call_id": "y"}
    answer = {"type": "function_call_output", "call_id": "x", "output": "out"}
    roles = [message.role for message in items_read(HELLO, first, answer, second)]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_a_user_message_between_two_calls_of_one_reply_parts_them() -> None:
    roles = [message.role for message in items_read(call(A, 0), HELLO, call(A, 1))]
    assert roles == ["assistant", "user", "assistant"]


def test_identifiers_tell_replies_apart_that_follow_each_other() -> None:
    said = [spoken("1", id=item_id("msg", A, 0, 0)), spoken("2", id=item_id("msg", B, 0, 0)), call(B)]
    first, second = items_read(*said)
    assert (first.text, first.minted) == ("1", (item_id("msg", A, 0, 0),))
    assert (second.text, second.tool_calls) == ("2", asked(B, 0))


def test_choices_of_one_call_are_different_replies() -> None:
    assert len(items_read(spoken("1", id=item_id("msg", A, 0, 0)), spoken("2", id=item_id("msg", A, 1, 0)))) == 2


def test_reasoning_that_begins_anew_begins_a_reply() -> None:
    first, second = items_read(thought("a"), spoken("1"), thought("b"), spoken("2"))
    assert (first.reasoning, first.text, second.reasoning, second.text) == ("a", "1", "b", "2")


def test_a_reply_is_named_by_whatever_identifier_is_left_of_it() -> None:
    """Copilot replaces the ids of messages and calls; reasoning and `call_id` stay."""
    replaced = spoken("1", id="msg_89b65dbf-7ae9-918c-676e-4df0c7a789d2"), call(A, id=f"fc_{tool_call_id(A, 0, 0)}")
    sealed = thought("So.", id=item_id("rs", A, 0, 0), encrypted_content=signature(A, 0))
    (message,) = items_read(sealed, *replaced)
    assert message.minted == (signature(A, 0), item_id("rs", A, 0, 0))
    (message,) = items_read(*replaced)
    assert (message.minted, message.tool_calls) == ((), asked(A, 0))


def test_every_identifier_of_ours_is_kept_and_no_other() -> None:
    items = [
        thought("So.", id=item_id("rs", A, 0, 0), encrypted_content=signature(A, 0)),
        spoken("1", id=item_id("msg", A, 0, 0)),
        call(A, id=item_id("fc", A, 0, 0)),
        {**call(A), "call_id": "theirs", "id": "fc_theirs"},
    ]
    (message,) = items_read(*items)
    ours = (signature(A, 0), *(item_id(sort, A, 0, 0) for sort in ("rs", "msg", "fc")))
    assert message.minted == ours


def test_an_empty_message_holds_its_turn() -> None:
    assert items_read(HELLO, spoken("", id=item_id("msg", A, 0, 0)), HELLO)[1].role == "assistant"


# What is read


@pytest.mark.parametrize("wire", ["Hi", [{"role": "user", "content": "Hi"}], [{"type": "message", **HELLO}]])
def test_input_is_a_text_or_items(wire: object) -> None:
    assert parse({"input": wire}).messages == (USER,)


def test_instructions_come_first_and_are_known_as_such() -> None:
    """A request that follows this one leaves them out."""
    request = parse({"instructions": "Be brief.", "input": "Hi"})
    assert request.messages == (Message("system", (TextPart("Be brief."),)), USER)
    assert bytes(request.extra["instructions"]) == b'"Be brief."'
    for nothing in ("", None):
        assert parse({"instructions": nothing, "input": "Hi"}) == parse({"input": "Hi"})


@pytest.mark.parametrize("kind", ["input_text", "output_text", "text"])
@pytest.mark.parametrize("role", ["user", "developer", "system", "assistant"])
def test_text_is_read_in_every_part_of_every_role(role: str, kind: str) -> None:
    (message,) = items_read({"role": role, "content": [{"type": kind, "text": "a"}, {"type": "refusal", "refusal": "b"}]})
    assert message.role == ("system" if role == "developer" else role)
    assert message.content == (TextPart("a"), TextPart("b"))


def test_images_are_read_in_messages_and_outputs() -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    shown = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    seen = (TextPart("see"), ImagePart(media_type="image/png", data="iVBORw0KGgo="))
    messages = items_read({"role": "user", "content": shown}, call(A), output(A, said=shown))
    assert (messages[0].content, messages[2].content) == (seen, seen)


def test_reasoning_is_its_summary_and_its_content() -> None:
    content = [{"type": "reasoning_text", "text": "c"}]
    two = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    assert items_read({"type": "reasoning", "summary": two, "content": content})[0].reasoning == "a\n\nb\n\nc"
    assert items_read({"type": "reasoning", "encrypted_content": "foreign"}, spoken("x"))[0].reasoning == ""


def test_tools_of_every_sort_are_one_flat_list() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    inner = [{"type": "function", "name": "spawn", "description": "d", "parameters": None}, {"type": "custom", "name": "note"}]
    request = parse(
        {
            "input": [HELLO, {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "exec"}]}],
            "tools": [
                FUNCTION,
                {"type": "namespace", "name": "team", "description": "d", "tools": inner},
                {"type": "custom", "name": "patch", "description": "Patch.", "format": grammar},
                {"type": "web_search", "external_web_access": False},
            ],
        }
    )
    function, spawn, note, patch, code = request.tools
    assert (function.name, spawn.name, spawn.namespace, spawn.custom) == ("ls", "team__spawn", "team", False)
    assert (note.name, note.namespace, note.custom, bytes(note.parameters)) == ("team__note", "team", True, bytes(CUSTOM))
    assert patch == Tool("patch", "Patch.\n\nThe input follows this lark grammar:\nstart: /.+/", CUSTOM, "", True)
    assert (code.name, code.custom) == ("exec", True)
    assert request.unserved == ("tool:web_search",)


def test_histories_name_tools_as_the_policy_does() -> None:
    spawned = {"type": "function_call", "namespace": "team", "name": "spawn", "call_id": "a", "arguments": '{ "x":1}'}
    patched = {"type": "custom_tool_call", "name": "patch", "call_id": "b", "input": '*** "é"\n'}
    answer = {"type": "custom_tool_call_output", "call_id": "b", "output": "done"}
    said, result = items_read(spawned, patched, answer)
    spawn, patch = said.tool_calls
    assert spawn == ToolCall("a", "team__spawn", '{ "x":1}')
    assert (patch.name, json.loads(patch.arguments)) == ("patch", {"input": '*** "é"\n'})
    assert result == Message("tool", (TextPart("done"),), tool_call_id="b")


@pytest.mark.parametrize(
    ("wire", "choice", "unserved"),
    [
        (None, "auto", ()),
        ("required", "required", ()),
        ({"type": "function", "name": "ls"}, "ls", ()),
        ({"type": "custom", "name": "ls"}, "ls", ()),
        ({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]}, "required", ("tool_choice:allowed_tools",)),
        ({"type": "web_search"}, "auto", ("tool_choice:web_search",)),
    ],
)
def test_a_choice_of_tools_is_kept_or_named(wire: object, choice: str, unserved: tuple[str, ...]) -> None:
    request = parse({"input": "Hi", "tools": [FUNCTION], "tool_choice": wire})
    assert (request.tool_choice, request.unserved, len(request.tools)) == (choice, unserved, 1)


def test_hidden_tools_are_no_tools() -> None:
    assert parse({"input": "Hi", "tools": [FUNCTION], "tool_choice": "none"}).tools == ()


def test_a_schema_is_kept_byte_for_byte() -> None:
    schema = b'{ "b":1.0,"a" :[1e3, 12345678901234567890123], "u":"\\u00e9"}'
    tool = b'{"type":"function","name":"t","parameters":%s}' % schema
    wanted = b'{"type":"json_schema","name":"s","schema": %s }' % schema
    request = parse(b'{"input":"Hi","tools":[%s],"text":{"format":%s}}' % (tool, wanted))
    assert bytes(request.tools[0].parameters) == schema
    assert request.json_schema is not None
    assert bytes(request.json_schema) == schema


def test_a_format_in_mid_conversation_replaces_the_request_s() -> None:
    update = {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}}
    request = parse({"input": [HELLO, update]})
    assert request.json_schema is not None
    assert bytes(request.json_schema) == b'{"type":"object"}'
    assert request.unserved == ("reasoning.effort",)
    free = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    assert parse({"input": [HELLO, free], "text": update["text"]}).json_schema is None


def test_an_earlier_reply_is_named_by_its_call() -> None:
    request = parse(
        {"input": [{"type": "item_reference", "id": item_id("msg", A, 0, 0)}, HELLO], "previous_response_id": response_id(A)}
    )
    assert (request.previous, request.messages) == (A, (USER,))


def test_nulls_stand_for_what_was_not_said() -> None:
    fields = """model tools tool_choice stream temperature top_p max_output_tokens text previous_response_id instructions
    reasoning include background conversation prompt parallel_tool_calls service_tier truncation top_logprobs""".split()
    request = parse({"input": "Hi", **dict.fromkeys(fields)})
    assert msgspec.structs.replace(request, extra={}) == ChatRequest("", (USER,))


# Requests as harnesses write them


def test_codex() -> None:
    text = {"type": "input_text", "text": "You are a coding agent."}
    request = parse(
        {
            "model": "policy",
            "stream": True,
            "input": [
                {"type": "message", "id": "msg_0a98-cea3", "role": "developer", "content": [text]},
                {"type": "message", "id": "msg_0a98-cea4", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {**thought(" hm\n", id=item_id("rs", A, 0, 0)), "content": None, "encrypted_content": signature(A, 0)},
                spoken(" \n Let me.\u2028 ", status="completed", id=item_id("msg", A, 0, 0)),
                {**call(A, id=item_id("fc", A, 0, 0)), "status": "completed", "namespace": "team"},
                {**output(A), "id": "fco_01a2-c6"},
                {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
                {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
                {"type": "compaction", "encrypted_content": "?"},
            ],
            "tools": [{**FUNCTION, "strict": False}, {"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2",
            "client_metadata": {"thread_id": "01a2"},
        }
    )
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "tool"]
    said = request.messages[2]
    assert (said.reasoning, said.text, said.tool_calls[0].name) == (" hm\n", " \n Let me.\u2028 ", "team__ls")
    assert said.minted == (signature(A, 0), *(item_id(sort, A, 0, 0) for sort in ("rs", "msg", "fc")))
    skipped = ("input:web_search_call", "input:local_shell_call", "input:compaction")
    assert request.unserved == (*skipped, "tool:web_search", "parallel_tool_calls")
    assert (request.stream, request.tool_choice) == (True, "auto")
    kept = {"parallel_tool_calls", "reasoning", "store", "include", "prompt_cache_key", "client_metadata"}
    assert request.extra.keys() == kept


def test_pi() -> None:
    request = parse(
        {
            "model": "policy",
            "input": [
                {"role": "developer", "content": "You code."},
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            ],
            "stream": True,
            "prompt_cache_key": "01a2",
            "store": False,
            "max_output_tokens": 8192,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        }
    )
    assert request.messages == (Message("system", (TextPart("You code."),)), USER)
    assert (request.sampling, request.unserved) == (RequestedSampling(max_tokens=8192), ("reasoning.effort",))


# What is refused

REFUSED: list[tuple[dict[str, Any] | bytes, str]] = [
    (b"", "not valid JSON"),
    (b"[]", "Expected `object`"),
    ({}, "missing required field `input`"),
    ({"input": None}, r"input: Expected `array`"),
    ({"input": []}, "at least one message"),
    ({"input": [{"type": "compaction"}]}, "at least one message"),
    ({"input": [1]}, r"input\[0\].*Expected `object`"),
    ({"input": [{}]}, r"input\[0\]: expected an item with a `type`"),
    ({"input": [HELLO, {"role": "wizard", "content": "x"}]}, r"input\[1\].role: expected one of user.*'wizard'"),
    ({"input": [{"role": "user", "content": 1}]}, r"input\[0\].*content"),
    ({"input": [{"type": "function_call", "name": "ls"}]}, r"input\[0\].*call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, r"the item 'msg_1' is not kept here; send the item itself"),
    ({"input": [{"type": "item_reference", "id": item_id("msg", A, 0, 0)}]}, "send the item itself"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}, r"content\[0\].image_url"),
    ({"input": "Hi", "tools": [{"name": "ls"}]}, r"tools\[0\].*type"),
    ({"input": "Hi", "tools": [{"type": "function", "function": {"name": "ls"}}]}, r"tools\[0\].*name"),
    (
        {"input": "Hi", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
        r"tools\[0\].tools\[0\].*name",
    ),
    ({"input": "Hi", "tools": [{**FUNCTION, "parameters": "x"}]}, r"tools\[0\].parameters: expected a JSON schema"),
    ({"input": "Hi", "tool_choice": "always"}, "tool_choice: expected one of auto, none, required"),
    ({"input": "Hi", "tool_choice": "required"}, "'required' needs at least one tool"),
    ({"input": "Hi", "tool_choice": {"type": "function", "name": "ls"}}, "tool_choice: expected the name of one of the tools"),
    ({"input": "Hi", "text": {"format": {"type": "xml"}}}, "text.format.type: expected text, json_object or json_schema"),
    ({"input": "Hi", "text": {"format": {"type": "json_schema"}}}, "text.format.schema: expected a JSON schema, got None"),
    ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "Hi", "background": True}, "background is not served"),
    ({"input": "Hi", "conversation": "conv_1"}, "conversation is not served"),
    ({"input": "Hi", "prompt": {"id": "pmpt_1"}}, "prompt is not served"),
    ({"input": "Hi", "previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found."),
]


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_a_malformed_body_is_refused_and_says_what_is_wrong(body: dict[str, Any] | bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([2**70, 1e308, "data:image/png;base64,%"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
item_types = st.sampled_from(
    """message reasoning function_call function_call_output custom_tool_call custom_tool_call_output item_reference
    additional_tools configuration_update web_search_call novel""".split()
)
item_fields = """id role content summary encrypted_content call_id name namespace arguments input output tools text reasoning
instructions""".split()
any_items = st.fixed_dictionaries({"type": item_types | json_values}, optional=dict.fromkeys(item_fields, json_values))
any_fields = st.dictionaries(
    st.sampled_from("model input tools tool_choice stream temperature max_output_tokens text include prompt novel".split()),
    json_values,
    max_size=4,
)


@settings(max_examples=50)
@given(any_fields, st.lists(any_items, min_size=1, max_size=2))
@example({"novel": "\ud83d"}, [{"role": "user", "content": "\ud83d"}])
@example({"tools": [{"type": "function", "name": ""}]}, [{"role": "user", "content": [{"type": "x"}]}])
def test_any_json_is_read_or_refused(fields: dict[str, Any], items: list[dict[str, Any]]) -> None:
    for body in ({"input": items, **fields}, fields, {"input": "x", "tools": items}):
        try:
            request = parse(json.dumps(body).encode())
        except InvalidRequest:
            continue
        msgspec.json.decode(msgspec.json.encode((request.messages, request.tools, request.sampling, request.unserved)))


def test_deep_nesting_is_refused() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    for body in (b'{"input":%s}', b'{"input":[{"type":"message","role":"user","content":%s}]}', b'{"input":"x","background":%s}'):
        with pytest.raises(InvalidRequest):
            parse(body % deep)
