"""OpenAI Chat, replies: read by the SDK's own types, sent back as the same message, streamed as they are whole."""

import json
from itertools import pairwise, zip_longest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from polar.chat import Choice, Delta, Message, ReasoningDelta, TextDelta, TextPart, TokenLogprob
from polar.dialects.protocol import Fault, ModelCard, Route, Target
from polar.errors import ContextLengthExceeded
from tests.dialects.openai_chat_client import DIALECT, asked, choices, parsed_messages, reply_with, texts

several = st.lists(choices, min_size=1, max_size=3).map(tuple)
GREETING = Choice(
    Message("assistant", (TextPart("Hi é"),)), "stop", logprobs=(TokenLogprob("Hi", -0.5), TokenLogprob(" é", -2.0))
)


def whole(given: tuple[Choice, ...], *, logprobs: bool) -> ChatCompletion:
    body = DIALECT.reply(asked(logprobs=logprobs, n=len(given)), reply_with(*given))
    return ChatCompletion.model_validate_json(body, strict=True)


def streamed(given: tuple[Choice, ...], cuts: list[int], **fields: Any) -> bytes:
    """The reply as the gateway streams it: text and reasoning cut into deltas at `cuts`, the choices taking turns."""
    writer = DIALECT.events(asked(stream=True, n=len(given), **fields), "c0aaaaaaaa", 17)
    events = [writer.start()]
    for turn in zip_longest(*(deltas(index, choice.message, cuts) for index, choice in enumerate(given))):
        events += [writer.keep_alive(), *(writer.delta(delta) for delta in turn if delta is not None)]
    return b"".join([*events, writer.finish(reply_with(*given))])


def deltas(index: int, message: Message, cuts: list[int]) -> list[Delta]:
    reasoning: list[Delta] = [ReasoningDelta(piece, index) for piece in pieces(message.reasoning, cuts)]
    return reasoning + [TextDelta(piece, index) for piece in pieces(message.text, cuts)]


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def chunks(stream: bytes) -> list[ChatCompletionChunk]:
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "), strict=True) for event in events]


# Whole


@given(several, st.booleans())
def test_a_reply_is_read_by_the_sdk(given: tuple[Choice, ...], logprobs: bool) -> None:
    completion = whole(given, logprobs=logprobs)
    assert (completion.id, completion.model, completion.created) == ("chatcmpl-c0aaaaaaaa", "policy", 17)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (3, 5, 8)
    assert [choice.index for choice in completion.choices] == list(range(len(given)))
    assert [choice.finish_reason for choice in completion.choices] == [choice.finish_reason for choice in given]


@given(several)
def test_a_reply_that_comes_back_is_the_message_that_was_sent(given: tuple[Choice, ...]) -> None:
    body = json.loads(DIALECT.reply(asked(), reply_with(*given)))
    for index, choice in enumerate(whole(given, logprobs=False).choices):
        for exclude_none in (True, False):
            assert parsed_messages(choice.message.model_dump(exclude_none=exclude_none)) == (given[index].message,)
        assert parsed_messages(body["choices"][index]["message"]) == (given[index].message,)


def test_a_message_says_that_nothing_was_refused() -> None:
    message = json.loads(DIALECT.reply(asked(), reply_with(GREETING)))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hi é", "refusal": None}


def test_logprobs_come_only_where_they_are_wanted() -> None:
    (choice,) = whole((GREETING,), logprobs=True).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    entries = [(each.token, each.logprob, each.bytes, each.top_logprobs) for each in choice.logprobs.content]
    assert entries == [("Hi", -0.5, [72, 105], []), (" é", -2.0, [32, 195, 169], [])]
    assert whole((GREETING,), logprobs=False).choices[0].logprobs is None


# Streamed


@given(several, st.lists(st.integers(0, 20), max_size=3), st.booleans(), st.booleans())
def test_joined_chunks_equal_the_whole_reply(
    given: tuple[Choice, ...], cuts: list[int], include_usage: bool, logprobs: bool
) -> None:
    stream = streamed(given, cuts, stream_options={"include_usage": include_usage}, logprobs=logprobs)
    state = ChatCompletionStreamState()
    for chunk in chunks(stream):
        state.handle_chunk(chunk)
    joined = state.current_completion_snapshot
    expected = whole(given, logprobs=logprobs)
    assert joined.usage == (expected.usage if include_usage else None)
    for ours, theirs in zip(joined.choices, expected.choices, strict=True):
        assert (ours.index, ours.finish_reason) == (theirs.index, theirs.finish_reason)
        assert parsed_messages(ours.message.model_dump()) == parsed_messages(theirs.message.model_dump())
        content = [choice.logprobs.content or [] if choice.logprobs else None for choice in (ours, theirs)]
        assert content[0] == content[1]


@given(several, st.lists(st.integers(0, 20), max_size=3))
def test_nothing_to_act_on_comes_before_the_end(given: tuple[Choice, ...], cuts: list[int]) -> None:
    """Each choice is opened, says its text, then has its tool calls one by one, then its finish reason, and no more."""
    sent = [choice for chunk in chunks(streamed(given, cuts)) for choice in chunk.choices]
    assert [(choice.index, choice.delta.role) for choice in sent[: len(given)]] == [(i, "assistant") for i in range(len(given))]
    for index, choice in enumerate(given):
        own = [each for each in sent if each.index == index]
        calls = [call for each in own for call in each.delta.tool_calls or []]
        assert [call.index for call in calls] == list(range(len(choice.message.tool_calls)))
        assert [bool(each.delta.tool_calls) for each in own[-len(calls) - 1 :]] == [True] * len(calls) + [False]
        assert [each.finish_reason for each in own if each.finish_reason] == [own[-1].finish_reason] == [choice.finish_reason]


def test_every_event_is_of_one_choice() -> None:
    sent = chunks(streamed((GREETING, GREETING), [], stream_options={"include_usage": True}))
    assert {len(chunk.choices) for chunk in sent[:-1]} == {0, 1}  # none: a keep-alive
    assert (sent[-1].choices, sent[-1].usage is not None) == ([], True)


@given(several)
def test_events_are_lines_of_ascii(given: tuple[Choice, ...]) -> None:
    """Some clients break lines at U+2028, some at a lone carriage return."""
    for event in streamed(given, [1, 3]).split(b"\n\n")[:-1]:
        assert event.isascii()
        assert event.startswith(b"data: ")
        assert len(event.splitlines()) == 1


# Errors, models, routes


@given(texts, texts)
def test_an_error_is_an_openai_error_whole_and_streamed(code: str, message: str) -> None:
    fault = Fault("unavailable", code, message)
    status, body = DIALECT.fault(fault)
    event = DIALECT.events(asked(), "c0", 1).error(fault)
    assert status == 503
    for error in (json.loads(body), json.loads(event.removeprefix(b"data: "))):
        assert error == {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
    assert event.isascii()
    assert event.endswith(b"\n\n")


@pytest.mark.parametrize(
    ("kind", "status"),
    [("invalid", 400), ("unauthorized", 401), ("not_found", 404), ("frozen", 409), ("unavailable", 503), ("internal", 500)],
)
def test_a_fault_has_its_status_and_says_whose_it_is(kind: Any, status: int) -> None:
    code, body = DIALECT.fault(Fault(kind, "c", "m"))
    assert code == status
    assert json.loads(body)["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for() -> None:
    error = ContextLengthExceeded(250, 200)
    status, body = DIALECT.fault(Fault("context_length", error.code, str(error), 250, 200))
    told = json.loads(body)["error"]
    assert (status, told["code"]) == (400, "context_length_exceeded")
    words = "This model's maximum context length is 200 tokens. However, your messages resulted in 250 tokens."
    assert told["message"].startswith(words)


def test_models_are_a_list_or_the_one_that_was_named() -> None:
    card = ModelCard("policy", 4096, 17)
    entry = {"id": "policy", "object": "model", "created": 17, "owned_by": "polar", "max_model_len": 4096}
    assert json.loads(DIALECT.models(Route("models"), [card])) == {"object": "list", "data": [entry]}
    assert json.loads(DIALECT.models(Route("models", "policy"), [card])) == entry


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/chat/completions", Route("generate")),
        ("GET", "/models", Route("models")),
        ("GET", "/models/a/b c", Route("models", "a/b c")),
        ("GET", "/chat/completions", None),
        ("POST", "/chat/completions/", None),
        ("POST", "/models", None),
        ("DELETE", "/models/a", None),
        ("GET", "/models/", None),
        ("POST", "/completions", None),
        ("POST", "", None),
    ],
)
def test_it_serves_its_own_routes_and_answers_for_what_nobody_serves(
    prefix: str, method: str, path: str, route: Route | None
) -> None:
    target = Target(method, prefix + path)
    assert DIALECT.route(target) == route
    assert DIALECT.claims(target)
