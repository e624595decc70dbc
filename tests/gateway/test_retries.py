"""A retry is known by what it asks for, however it is spelled (D9)."""

import msgspec
import pytest
from msgspec import Raw

from polar.chat import ChatRequest, Message, RequestedSampling, TextPart, Tool
from polar.dialects.protocol import Target
from polar.gateway.retries import request_hash
from polar.gateway.terms import Addresses

TARGET = Target("POST", "/v1/responses")
REQUEST = ChatRequest(
    "policy",
    (Message("user", (TextPart("Hello."),)),),
    (Tool("look", "Looks.", Raw(b'{"type":"object"}')),),
    RequestedSampling(max_tokens=8),
    stream=True,
    extra={"metadata": Raw(b'{"a": 1, "b": {"c": [1, 2], "d": 2}}'), "store": Raw(b"false")},
)


def known(request: ChatRequest, target: Target = TARGET, dialect: str = "openai_responses") -> str:
    return request_hash(dialect, target, request, Addresses().of(request))


@pytest.mark.parametrize(
    "again",
    [
        {"extra": {"store": Raw(b"false"), "metadata": Raw(b'{"b":{"d":2,"c":[1,2]},"a":1}')}},
        {"stream": False},
        {"include_usage": True},
    ],
)
def test_order_spaces_and_the_form_of_the_answer_are_nothing(again: dict[str, object]) -> None:
    assert known(msgspec.structs.replace(REQUEST, **again)) == known(REQUEST)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "other"},
        {"messages": (Message("user", (TextPart("Hello!"),)),)},
        {"messages": (Message("system", (TextPart("Hello."),)),)},
        {"tools": ()},
        {"sampling": RequestedSampling(max_tokens=9)},
        {"tool_choice": "required"},
        {"previous": "c0abc"},
        {"extra": {**REQUEST.extra, "metadata": Raw(b'{"a":1,"b":{"c":[2,1],"d":2}}')}},
        {"extra": {}},
    ],
)
def test_whatever_else_differs_makes_another_request(other: dict[str, object]) -> None:
    assert known(msgspec.structs.replace(REQUEST, **other)) != known(REQUEST)


def test_a_route_and_a_dialect_have_requests_of_their_own() -> None:
    others = {
        known(REQUEST, Target("POST", "/v1/other")),
        known(REQUEST, Target("POST", "/v1/responses", "beta=true")),
        known(REQUEST, dialect="anthropic_messages"),
        known(REQUEST),
    }
    assert len(others) == 4


@pytest.mark.parametrize("raw", [b"[" * 5000 + b"]" * 5000, b"1" * 400, b'"\\ud800"'])
def test_what_cannot_be_put_in_order_is_taken_as_it_is(raw: bytes) -> None:
    request = msgspec.structs.replace(REQUEST, extra={"odd": Raw(raw)})
    assert known(request) == known(request) != known(REQUEST)
