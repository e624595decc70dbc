"""A history comes again with every request, and is read once: what is remembered says the same as what is read."""

import msgspec
import pytest
from msgspec import structs

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.bodies import Memory
from polar.dialects.gemini import Gemini
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_responses import OpenAIResponses
from polar.dialects.protocol import Dialect, Target

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT = {
    "messages": [
        {"role": "user", "content": "Look.", "name": "somebody"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Dark HALF."},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}],
}
ANTHROPIC = {
    "system": "Be brief.",
    "max_tokens": 10,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Dark."}, {"type": "odd"}]},
    ],
    "tools": [{"name": "look", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}],
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}, {"type": "input_file"}]},
        {"type": "configuration_update", "instructions": "Be brief.", "tools": [{"type": "function", "name": "see"}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Dark."},
        {"type": "odd"},
    ]
}
GEMINI = {
    "contents": [
        {"role": "user", "parts": [{"text": "Look."}, {"odd": 1}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"a": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"output": "Dark."}}}]},
    ]
}
DIALECTS: list[tuple[Dialect, str, object]] = [
    (OpenAIChat(), "/v1/chat/completions", CHAT),
    (AnthropicMessages(), "/v1/messages", ANTHROPIC),
    (OpenAIResponses(), "/v1/responses", RESPONSES),
    (Gemini(), "/v1beta/models/policy:generateContent", GEMINI),
]


NOTES = {
    "openai_chat": {"name", "strict"},
    "anthropic_messages": {"block:odd", "tool:web_search_20250305", "cache_control"},
    "openai_responses": {"part:input_file", "input:odd"},
    "gemini": {"part:odd"},
}


@pytest.mark.parametrize(("dialect", "path", "body"), DIALECTS)
def test_what_is_remembered_says_the_same_and_notes_the_same(dialect: Dialect, path: str, body: object) -> None:
    target, sent, memory = Target("POST", path), encoded(body), Memory()
    alone, first, second = dialect.parse(target, sent), dialect.parse(target, sent, memory), dialect.parse(target, sent, memory)
    assert {*second.unserved, *second.normalised} == NOTES[dialect.name]
    assert first == second == structs.replace(alone, tools=first.tools, extra=first.extra)
    assert [bytes(tool.parameters) for tool in second.tools] == [bytes(tool.parameters) for tool in alone.tools]
    last = alone.messages[-2:]
    assert [message.text for message in second.messages][-len(last) :] == [message.text for message in last]


@pytest.mark.parametrize(("dialect", "path", "body"), DIALECTS)
def test_a_text_that_comes_again_is_not_read_again(dialect: Dialect, path: str, body: object) -> None:
    target, memory = Target("POST", path), Memory()
    first, second = (dialect.parse(target, encoded(body), memory) for _ in range(2))
    for one, other in zip(first.messages, second.messages, strict=True):
        assert all(mine is yours for mine, yours in zip(one.content, other.content, strict=True) if one.role in ("user", "tool"))


def encoded(body: object) -> bytes:
    return msgspec.json.encode(body).replace(b"HALF", rb"\ud83d")
