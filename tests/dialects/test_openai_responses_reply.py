"""OpenAI Responses, replies and routes: the real SDK's types, and a stream that says what the whole reply says."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from polar.chat import (
    ChatRequest,
    Choice,
    Delta,
    Message,
    ReasoningDelta,
    Reply,
    TextDelta,
    TextPart,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from polar.dialects.protocol import Fault, Route, Target
from polar.ids import parse_minted, tool_call_id
from polar.tokens.lineage import meaning
from tests.dialects.openai_responses_client import CUSTOM, DIALECT, events, items_read, parse, replies, tool_lists, unminted

CALL = "c3d0000003"
PATCH = Tool("patch", "", CUSTOM, "", True)
SPAWN = Tool("team__spawn", "", Raw(b"{}"), "team")
stream_event: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def asked(*tools: Tool, **fields: Any) -> ChatRequest:
    return ChatRequest("policy", (Message("user", (TextPart("Hi"),)),), tools, **fields)


def answer(message: Message, finish: Any = "stop", **fields: Any) -> Reply:
    return Reply(CALL, "policy", 1_800_000_000, (Choice(message, finish, **fields),), Usage(7, 5))


def calling(name: str, arguments: str) -> Reply:
    return answer(Message("assistant", tool_calls=(ToolCall(tool_call_id(CALL, 0, 0), name, arguments),)), "tool_calls")


def whole(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(DIALECT.reply(request, reply))
    return body


def streamed(request: ChatRequest, reply: Reply, cuts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Every event of a stream whose text is cut at `cuts`."""
    writer = DIALECT.events(request, reply.call_id, reply.created)
    deltas: list[Delta] = [ReasoningDelta(piece) for piece in cut(reply.message.reasoning, cuts)]
    deltas += [TextDelta(piece) for piece in cut(reply.message.text, cuts)]
    written = [writer.start(), *(writer.delta(delta) + writer.keep_alive() for delta in deltas), writer.finish(reply)]
    return events(b"".join(written))


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[start:end] for start, end in pairwise(places)]


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[ChatRequest, Reply]:
    tools = draw(tool_lists)
    return asked(*tools), draw(replies(tools))


# There and back


@settings(max_examples=100)
@given(exchanges())
def test_a_reply_comes_back_as_it_was(exchange: tuple[ChatRequest, Reply]) -> None:
    request, reply = exchange
    (message,) = items_read(*whole(request, reply)["output"])
    assert unminted(message) == reply.message
    assert {parse_minted(value) for value in message.minted} == {(reply.call_id, 0)}


@settings(max_examples=100)
@given(exchanges(), st.lists(st.integers(1, 8), max_size=3))
def test_a_stream_says_what_the_whole_reply_says(exchange: tuple[ChatRequest, Reply], cuts: list[int]) -> None:
    request, reply = exchange
    told, body = streamed(request, reply, cuts), whole(request, reply)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1] == {"type": f"response.{body['status']}", "sequence_number": len(told) - 1, "response": body}
    assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == body["output"]
    assert joined(told) == [said(item) for item in body["output"]]


def joined(told: list[dict[str, Any]]) -> list[str]:
    """What the deltas of each item say; each must lie within its item, and be repeated where it ends."""
    items: list[str] = []
    item_id, done = "", ""
    for event in told[2:-1]:
        assert event["output_index"] == len(items) - (event["type"] != "response.output_item.added")
        if event["type"] == "response.output_item.added":
            item_id, done = event["item"]["id"], ""
            items.append("")
        elif event["type"].endswith(".delta"):
            items[-1] += event["delta"]
        elif event["type"].endswith(("text.done", "arguments.done", "input.done")):
            done = next(event[field] for field in ("text", "arguments", "input") if field in event)
        elif event["type"] == "response.output_item.done":
            assert (event["item"]["id"], said(event["item"]), done) == (item_id, items[-1], items[-1])
        assert event.get("item_id", item_id) == item_id
    return items


def said(item: dict[str, Any]) -> str:
    """What an output item says, as one text."""
    parts = item.get("summary") or item.get("content") or [{"text": item.get("arguments", item.get("input"))}]
    return "".join(part["text"] for part in parts)


@settings(max_examples=50)
@given(exchanges())
def test_the_real_sdk_s_types_accept_all_of_it(exchange: tuple[ChatRequest, Reply]) -> None:
    request, reply = exchange
    response = Response.model_validate(whole(request, reply), strict=True)
    assert response.output_text == reply.message.text
    for event in streamed(request, reply):
        stream_event.validate_python(event)


# How a reply looks


def test_the_events_of_a_reply_in_their_order() -> None:
    said = Message("assistant", (TextPart("Two."),), "So.", (ToolCall(tool_call_id(CALL, 0, 0), "ls", "{}"),))
    told = [event["type"].removeprefix("response.") for event in streamed(asked(), answer(said, "tool_calls"), [2])]
    assert told == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_nothing_that_can_be_acted_on_leaves_before_the_end() -> None:
    """Codex runs a tool as soon as its item is done, and takes a message that is done for the last word."""
    writer = DIALECT.events(asked(), CALL, 1)
    early = events(writer.start() + writer.delta(ReasoningDelta("So.")) + writer.delta(TextDelta("Two.")))
    done = [event["item"]["type"] for event in early if event["type"] == "response.output_item.done"]
    assert done == ["reasoning"]


def test_a_reply_that_says_nothing_has_an_empty_message() -> None:
    reply = answer(Message("assistant"))
    (item,) = whole(asked(), reply)["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
    assert unminted(items_read(item)[0]) == reply.message


def test_a_reply_that_was_cut_is_incomplete() -> None:
    reply = answer(Message("assistant", (TextPart("Tw"),)), "length")
    body = whole(asked(), reply)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert streamed(asked(), reply)[-1]["type"] == "response.incomplete"


def test_a_call_in_a_namespace_has_its_bare_name() -> None:
    (item,) = whole(asked(SPAWN), calling("team__spawn", "{}"))["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "spawn", "team")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{ "input":  "*** \\u00e9\\n"}', "*** é\n"),
        ('{"input": "x", "y": 1}', '{"input": "x", "y": 1}'),
        ('{"input": 1}', '{"input": 1}'),
        ("*** é", "*** é"),
        ('{"input": "\\ud83d"}', '{"input": "\\ud83d"}'),
    ],
)
def test_a_custom_tool_gets_its_text_bare_or_else_all_that_was_written(arguments: str, text: str) -> None:
    reply = calling("patch", arguments)
    (item,) = whole(asked(PATCH), reply)["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", text)
    named = [event["type"] for event in streamed(asked(PATCH), reply)]
    assert {"response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"} <= set(named)


@pytest.mark.parametrize("arguments", ['{"a": ', "", '{"a": NaN}', "\u2028", '{ "a":1 , "a":2}'])
def test_arguments_go_out_as_the_policy_wrote_them(arguments: str) -> None:
    (item,) = whole(asked(), calling("ls", arguments))["output"]
    assert item["arguments"] == arguments


def test_log_probabilities_are_given_where_they_are_included() -> None:
    request = parse({"input": "Hi", "include": ["message.output_text.logprobs"]})
    reply = answer(Message("assistant", (TextPart("é"),)), logprobs=(TokenLogprob("é", -0.5),))
    part = whole(request, reply)["output"][0]["content"][0]
    assert part["logprobs"] == [{"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}]
    (done,) = (event for event in streamed(request, reply) if event["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]
    assert whole(asked(), reply)["output"][0]["content"][0]["logprobs"] == []


def test_a_stream_is_ascii_and_its_keep_alive_says_nothing() -> None:
    writer = DIALECT.events(asked(), CALL, 1)
    assert writer.keep_alive() == b": keep-alive\n\n"
    assert writer.delta(TextDelta("\u2028")).isascii()


@pytest.mark.parametrize(
    ("fault", "status", "code", "in_stream"),
    [
        (Fault("context_length", "x", "long", 9, 8), 400, "context_length_exceeded", "context_length_exceeded"),
        (Fault("unavailable", "engine_error", "down"), 503, "engine_error", "server_error"),
        (Fault("internal", "T08", "T08: ids missing"), 500, "T08", "server_error"),
        (Fault("not_found", "unknown_url", "no"), 404, "unknown_url", "server_error"),
    ],
)
def test_a_fault_is_an_error_and_never_a_clean_end(fault: Fault, status: int, code: str, in_stream: str) -> None:
    came, body = DIALECT.fault(fault)
    assert (came, json.loads(body)["error"]["code"]) == (status, code)
    writer = DIALECT.events(asked(), CALL, 1)
    (event,) = events(writer.error(fault))
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": in_stream, "message": fault.message}


def test_a_reply_names_what_it_follows() -> None:
    request = msgspec.structs.replace(asked(), previous="c1a0000001")
    assert whole(request, answer(Message("assistant")))["previous_response_id"] == "resp_c1a0000001"


# Routes


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_replies_and_token_counts_are_served_and_the_rest_is_answered_in_this_shape(prefix: str) -> None:
    served = {"/responses": Route("generate"), "/responses/input_tokens": Route("count_tokens")}
    for path, route in served.items():
        assert DIALECT.route(Target("POST", prefix + path)) == route
        assert DIALECT.route(Target("GET", prefix + path)) is None
        assert DIALECT.claims(Target("GET", prefix + path))
    assert DIALECT.route(Target("POST", prefix + "/responses/compact")) is None
    assert DIALECT.claims(Target("POST", prefix + "/responses/compact"))
    assert not DIALECT.claims(Target("POST", prefix + "/chat/completions"))
    assert json.loads(DIALECT.token_count(7)) == {"object": "response.input_tokens", "input_tokens": 7}


@pytest.mark.parametrize("arguments", ['{"a": 1}', "no JSON", '{"input": 1}', '{"input": "x", "more": 1}', '{"input": "x"}'])
def test_what_the_policy_wrote_for_a_custom_tool_comes_back_as_it_was(arguments: str) -> None:
    reply = calling("patch", arguments)
    (read,) = items_read(*whole(asked(PATCH), reply)["output"])
    assert meaning(read.tool_calls[0].arguments) == meaning(arguments)
