"""Gemini: what is read and written stays the same, and whatever is malformed is refused as such."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from polar.chat import (
    ChatRequest,
    Delta,
    FinishReason,
    ImagePart,
    Message,
    ReasoningDelta,
    TextDelta,
    TextPart,
    ToolCall,
)
from polar.dialects.protocol import EVENT_STREAM, JSON, Fault, ModelCard, Route, Target
from polar.ids import tool_call_id
from tests.dialects.gemini_client import (
    CALL,
    DIALECT,
    HELLO,
    OURS,
    THOUGHTS,
    as_sent,
    kept_by_gemini_cli,
    kept_by_pi,
    messages_of,
    model,
    parse,
    reply_to,
    snake,
    stream_of,
    written,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\u2028\u2029", "\x00", "\ufeff", "data: x\n\n", "\r\n\r\n", "\U0001f600", '"\\', "\\ud83d", '{"output":1}']
)
said = texts.filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(texts, values, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False))
images = st.builds(ImagePart, st.just("image/png"), st.just("iVBORw0KGgo=")) | st.just(
    ImagePart("image/jpeg", url="gs://b/i.jpg")
)
finishes = st.sampled_from(["stop", "length", "tool_calls"])


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Rounds of question, reply, and the results of its calls."""
    messages = [Message("system", (TextPart(draw(said)),))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        content = draw(st.lists(st.builds(TextPart, said) | images, min_size=1, max_size=3))
        messages.append(Message("user", tuple(content)))
        names = draw(st.lists(st.sampled_from(["bash", "read", "é"]), max_size=3))
        calls = [ToolCall(f"gemini_{3 * turn + 1}_{index}", name, _respelled(draw(objects))) for index, name in enumerate(names)]
        text = draw(texts)
        messages.append(Message("assistant", (TextPart(text),) if text else (), draw(texts), tuple(calls)))
        messages += [Message("tool", (TextPart(draw(said)),), tool_call_id=one.id, is_error=draw(st.booleans())) for one in calls]
        messages += [] if calls else [Message("user", (TextPart("go on"),))]
    return messages


def _respelled(arguments: str) -> str:
    """As `json.dumps` of the test's body writes them."""
    return json.dumps(json.loads(arguments))


replies = st.builds(
    lambda text, reasoning, calls: Message(
        "assistant",
        (TextPart(text),) if text else (),
        reasoning,
        tuple(ToolCall(tool_call_id(CALL, 0, index), name, arguments) for index, (name, arguments) in enumerate(calls)),
    ),
    texts,
    texts,
    st.lists(st.tuples(st.sampled_from(["bash", "read", "é"]), objects | texts), max_size=3),
)


def asked(sse: bool, thoughts: bool = True) -> ChatRequest:
    body = {"contents": [HELLO], "generationConfig": THOUGHTS if thoughts else {}}
    return parse(body, "streamGenerateContent", "alt=sse" if sse else "")


def streamed(message: Message, cuts: list[int], *, sse: bool, finish: FinishReason = "stop", thoughts: bool = True) -> bytes:
    writer = DIALECT.events(asked(sse, thoughts), CALL, 17)
    deltas: list[Delta] = [ReasoningDelta(piece) for piece in pieces(message.reasoning, cuts)]
    deltas += [TextDelta(piece) for piece in pieces(message.text, cuts)]
    events = [writer.start()]
    for delta in deltas:
        events += [writer.keep_alive(), writer.delta(delta)]
    return b"".join([*events, writer.keep_alive(), writer.finish(reply_to(message, finish))])


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def same_meaning(message: Message) -> Message:
    """The message with its arguments in one spelling, where they are JSON objects."""
    return msgspec.structs.replace(message, tool_calls=tuple(map(_spelled, message.tool_calls)))


def _spelled(one: ToolCall) -> ToolCall:
    try:
        arguments = json.dumps(msgspec.json.decode(one.arguments, type=dict[str, object]))
    except msgspec.DecodeError:
        arguments = one.arguments
    return ToolCall(one.id, one.name, arguments)


# There and back


@given(histories(), st.sampled_from([as_sent, snake]), st.booleans())
def test_a_history_survives_writing_and_reading(history: list[Message], spell: Any, ascii_only: bool) -> None:
    body = json.dumps(written(history, spell), ensure_ascii=ascii_only).encode()
    read = parse(body).messages
    assert [same_meaning(message) for message in read] == [same_meaning(message) for message in history]


@given(histories())
def test_responses_without_ids_answer_the_calls_of_their_names_in_order(history: list[Message]) -> None:
    read = parse(written(history, ids=False)).messages
    for message in read:
        if message.role == "assistant":
            waiting = {one.id for one in message.tool_calls}
            assert len(waiting) == len(message.tool_calls)
        elif message.role == "tool":
            waiting.remove(message.tool_call_id)
    assert [message.text for message in read] == [message.text for message in history]
    assert parse(written(history, ids=False)).messages == read


@given(replies, finishes)
def test_a_whole_reply_is_read_by_the_sdk_and_comes_back_as_the_same_message(message: Message, finish: FinishReason) -> None:
    body = DIALECT.reply(asked(False), reply_to(message, finish))
    assert body.isascii()
    reply = types.GenerateContentResponse.model_validate_json(body)
    assert (reply.response_id, reply.model_version) == (f"resp_{CALL}", "policy")
    assert reply.usage_metadata is not None
    counts = reply.usage_metadata
    assert (counts.prompt_token_count, counts.candidates_token_count, counts.total_token_count) == (3, 5, 8)
    assert reply.candidates is not None
    assert reply.candidates[0].finish_reason is not None
    assert reply.candidates[0].finish_reason.value == ("MAX_TOKENS" if finish == "length" else "STOP")
    _, back = messages_of(HELLO, json.loads(body)["candidates"][0]["content"])
    assert same_meaning(back) == same_meaning(msgspec.structs.replace(message, minted=(OURS,)))


@given(replies, finishes, st.lists(st.integers(0, 20), max_size=3), st.booleans())
def test_a_joined_stream_equals_the_whole_reply(message: Message, finish: FinishReason, cuts: list[int], sse: bool) -> None:
    chunks = stream_of(streamed(message, cuts, sse=sse, finish=finish), sse)
    whole = json.loads(DIALECT.reply(asked(sse), reply_to(message, finish)))
    assert {key: chunks[-1][key] for key in ("usageMetadata", "responseId")} == {
        key: whole[key] for key in ("usageMetadata", "responseId")
    }
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["candidates"][0]["finishReason"] == whole["candidates"][0]["finishReason"]
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    joined, said_whole = messages_of(HELLO, model(*parts)), messages_of(HELLO, whole["candidates"][0]["content"])
    assert joined == said_whole


@given(replies, st.lists(st.integers(0, 20), max_size=3))
def test_what_harnesses_keep_of_a_stream_is_the_reply_under_its_own_name(message: Message, cuts: list[int]) -> None:
    chunks = stream_of(streamed(message, cuts, sse=True), True)
    as_chunks = [chunk["candidates"][0]["content"] for chunk in chunks]  # the SDKs' chats keep each chunk as a content
    for contents in ([kept_by_gemini_cli(chunks)], [kept_by_pi(chunks)], as_chunks):
        _, back = messages_of(HELLO, *contents)
        unthought = msgspec.structs.replace(back, reasoning=message.reasoning)
        assert same_meaning(unthought) == same_meaning(msgspec.structs.replace(message, minted=(OURS,)))


@given(replies)
def test_thoughts_are_shown_only_to_those_who_asked(message: Message) -> None:
    chunks = stream_of(streamed(message, [2], sse=True, thoughts=False), True)
    whole = json.loads(DIALECT.reply(asked(True, thoughts=False), reply_to(message)))
    for chunk in (*chunks, whole):
        assert not any(part.get("thought") for part in chunk["candidates"][0]["content"]["parts"])


def test_a_stream_without_alt_is_one_array_of_json_and_one_with_it_is_events() -> None:
    writer = DIALECT.events(asked(False), CALL, 17)
    assert writer.content_type == JSON
    data = writer.start() + writer.keep_alive() + writer.finish(reply_to(Message("assistant")))
    assert data.startswith(b"[\n{")
    assert data.endswith(b"}\n]\n")
    assert DIALECT.events(asked(True), CALL, 17).content_type == EVENT_STREAM


def test_two_replies_that_follow_each_other_stay_two() -> None:
    other = "cG9sYXIvYzFiYmJiYmJiYi8w"
    one, two = {"text": "a", "thoughtSignature": OURS}, {"text": "b", "thoughtSignature": other}
    assert [message.text for message in messages_of(HELLO, model(one), model({"text": "a"}), model(two))] == ["x", "aa", "b"]


@pytest.mark.parametrize("spelled", [OURS, OURS.rstrip("="), OURS.replace("+", "-").replace("/", "_")])
def test_our_signature_is_known_in_every_base64(spelled: str) -> None:
    assert messages_of(HELLO, model({"text": "a", "thoughtSignature": spelled}))[1].minted == (OURS,)


@pytest.mark.parametrize("foreign", ["skip_thought_signature_validator", "U0lHAAAA", "é", ""])
def test_a_signature_of_others_names_nothing(foreign: str) -> None:
    assert messages_of(HELLO, model({"text": "a", "thoughtSignature": foreign}))[1].minted == ()


# Routes, errors, models


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1beta/models/m:generateContent", Route("generate", "m")),
        ("POST", "/v1/models/m:generateContent", Route("generate", "m")),
        ("POST", "/v1alpha/models/org/m:free:streamGenerateContent", Route("generate", "org/m:free")),
        ("POST", "/v1beta/models/m:countTokens", Route("count_tokens", "m")),
        ("POST", "/v1beta1/projects/p/locations/l/publishers/google/models/m:generateContent", Route("generate", "m")),
        ("POST", "/v1beta/models/m:embedContent", None),
        ("GET", "/v1beta/models/m:generateContent", Route("models", "m:generateContent")),
        ("GET", "/v1beta/models", Route("models")),
        ("GET", "/v1beta/models/m", Route("models", "m")),
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", None),
    ],
)
def test_it_serves_its_own_routes(method: str, path: str, route: Route | None) -> None:
    assert DIALECT.route(Target(method, path)) == route


def test_it_claims_what_googles_clients_ask_for() -> None:
    assert DIALECT.claims(Target("POST", "/v1beta/files"))
    assert DIALECT.claims(Target("POST", "/upload", headers={"x-goog-api-key": "k"}))
    assert not DIALECT.claims(Target("POST", "/v1/embeddings"))
    assert DIALECT.route(Target("GET", "/v1/models", headers={"x-goog-api-key": "k"})) == Route("models")


@pytest.mark.parametrize(
    ("fault", "status", "name"),
    [
        (Fault("invalid", "c", "m"), 400, "INVALID_ARGUMENT"),
        (Fault("unauthorized", "c", "m"), 401, "UNAUTHENTICATED"),
        (Fault("not_found", "c", "m"), 404, "NOT_FOUND"),
        (Fault("frozen", "c", "m"), 409, "FAILED_PRECONDITION"),
        (Fault("unavailable", "c", "m"), 503, "UNAVAILABLE"),
        (Fault("internal", "c", "m"), 500, "INTERNAL"),
    ],
)
def test_an_error_is_googles_error(fault: Fault, status: int, name: str) -> None:
    error = {"error": {"code": status, "message": "m", "status": name}}
    assert DIALECT.fault(fault) == (status, json.dumps(error, separators=(",", ":")).encode())
    for sse in (True, False):
        writer = DIALECT.events(asked(sse), CALL, 17)
        stream = writer.start() + writer.delta(TextDelta("a")) + writer.error(fault)
        last = json.loads(stream.split(b"\n\n")[-1]) if sse else json.loads(stream)[-1]
        assert last == error


def test_a_prompt_that_is_too_long_is_told_in_googles_words() -> None:
    status, body = DIALECT.fault(Fault("context_length", "context_length_exceeded", "m", 9, 8))
    assert status == 400
    assert json.loads(body)["error"] == {
        "code": 400,
        "message": "The input token count (9) exceeds the maximum number of tokens allowed (8).",
        "status": "INVALID_ARGUMENT",
    }


def test_models_are_shown_as_google_shows_them() -> None:
    card = ModelCard("m", 4096, 17)
    (one,) = json.loads(DIALECT.models(Route("models"), [card]))["models"]
    assert one == json.loads(DIALECT.models(Route("models", "m"), [card]))
    assert (one["name"], one["inputTokenLimit"], "countTokens" in one["supportedGenerationMethods"]) == ("models/m", 4096, True)
