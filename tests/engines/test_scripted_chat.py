"""The scripted engine's chat mode, as vLLM's: its own template on the way in, Hermes on the way out, drift in between."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server
from polar.engines.scripted_chat import ChatTemplate, Speech
from polar.errors import UsageError

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@asynccontextmanager
async def serving(tokenizer: Tokenizer, text: str, **options: Any) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(text), **options)
    async with scripted_server(engine) as url:
        yield url, engine


def said(*pieces: str, tools: bool = True) -> list[dict[str, object]]:
    speech = Speech(tools)
    return [speech.hear(piece, over=place == len(pieces) - 1) for place, piece in enumerate(pieces)]


class TestSpeech:
    def test_text_is_told_at_once_unless_it_may_begin_a_call(self) -> None:
        assert said("Hi <", "b> <tool", "_box>") == [{"content": "Hi "}, {"content": "<b> "}, {"content": "<tool_box>"}]

    def test_a_call_is_told_when_it_is_closed(self) -> None:
        first, second, third = said("ok\n<tool_call>", '\n{"name":"a","arguments":{"x":1}}', "\n</tool_call>")
        assert (first, second) == ({"content": "ok\n"}, {})
        assert third["tool_calls"] == [
            {"index": 0, "id": "call_0", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
        ]

    def test_a_call_that_is_no_json_is_text_in_the_end(self) -> None:
        assert said("a <tool_call>", "{'name'}</tool_call>") == [
            {"content": "a "},
            {"content": "<tool_call>{'name'}</tool_call>"},
        ]

    def test_without_tools_all_is_text(self) -> None:
        assert said("<tool_call>", tools=False) == [{"content": "<tool_call>"}]

    def test_reasoning_is_the_first_word_or_none(self) -> None:
        assert said("<th", "ink>Hm", ".</think>\n\nYes <think>") == [
            {},
            {"reasoning": "Hm"},
            {"reasoning": ".", "content": "\n\nYes <think>"},
        ]


class TestTemplate:
    def test_chatml_with_tools_results_and_reasoning(self) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"b":1,  "a":"é"}'}}
        text = ChatTemplate(None).render(
            [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                HI,
                {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
                {"role": "tool", "content": "one"},
                {"role": "tool", "content": "two"},
            ],
            [BASH],
        )
        assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
        assert json.dumps(BASH) in text
        assert text.endswith(
            "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n"
            '<tool_call>\n{"name": "bash", "arguments": {"b": 1, "a": "é"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_without_tools_and_system_there_is_nothing_before_the_first_word(self) -> None:
        assert ChatTemplate(None).render([HI], None) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_the_directorys_own_template_if_it_knows_tools(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("{{ tools | length }} tools, {{ messages | length }} messages")
        assert ChatTemplate(tmp_path).render([HI], [BASH]) == "1 tools, 1 messages"
        (tmp_path / "chat_template.jinja").write_text("knows none")
        assert ChatTemplate(tmp_path).render([HI], [BASH]).startswith("<|im_start|>system\n# Tools")

    def test_an_image_is_refused(self) -> None:
        with pytest.raises(UsageError, match="cannot render"):
            ChatTemplate(None).render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "bash"}}])
async def test_the_openai_sdk_reads_calls_streamed_and_whole(tokenizer: Tokenizer, choice: Any) -> None:
    text = 'Listing.\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    async with serving(tokenizer, text) as (url, _), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        asked: dict[str, Any] = {"model": "any", "messages": [HI], "tools": [BASH], "tool_choice": choice}
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(model="any", messages=[HI], tools=[BASH]) as events:  # type: ignore[list-item]
            streamed = await events.get_final_completion()
    for reply in (whole.choices[0], streamed.choices[0]):
        assert reply.message.content == "Listing.\n"
        assert reply.message.tool_calls
        (call,) = reply.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("bash", '{"command": "ls"}')
    assert whole.choices[0].finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
    assert streamed.choices[0].finish_reason == "tool_calls"


async def test_ids_logprobs_and_usage_are_shown_to_who_asks(tokenizer: Tokenizer) -> None:
    asked = {"messages": [HI], "return_token_ids": True, "logprobs": True, "request_id": "r1"}
    async with serving(tokenizer, "Größe") as (url, engine), aiohttp.ClientSession(f"{url}/v1/") as http:
        async with http.post("chat/completions", json={"messages": [HI]}) as response:
            silent = await response.json()
        async with http.post("chat/completions", json=asked) as response:
            shown = await response.json()
    (choice,) = shown["choices"]
    assert choice["token_ids"] == engine.log[1].ids
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == engine.log[1].logprobs
    assert shown["prompt_token_ids"] == list(engine.log[1].prompt_ids)
    assert shown["usage"]["completion_tokens"] == len(engine.log[1].ids)
    assert shown["id"] == "chatcmpl-r1"
    assert silent["prompt_token_ids"] is silent["choices"][0]["token_ids"] is silent["choices"][0]["logprobs"] is None


async def test_tokenize_templates_messages_and_takes_bare_prompts(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, "ok") as (url, engine), aiohttp.ClientSession(url) as http:
        async with http.post("/tokenize", json={"messages": [HI], "tools": [BASH]}) as response:
            templated = await response.json()
        async with http.post("/tokenize", json={"prompt": "<|im_start|>user", "add_special_tokens": True}) as response:
            bare = await response.json()
        await (await http.post("/v1/chat/completions", json={"messages": [HI], "tools": [BASH]})).read()
    assert templated["tokens"] == list(engine.log[0].prompt_ids)
    assert templated["count"] == len(templated["tokens"])
    assert bare["tokens"] == [1, 4093]


async def test_a_reply_ends_where_the_context_does(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, "word " * 50, max_model_len=20) as (url, engine), aiohttp.ClientSession(url) as http:
        async with http.post("/v1/chat/completions", json={"messages": [HI], "max_tokens": 1000}) as response:
            reply = await response.json()
        async with http.post("/v1/chat/completions", json={"messages": [HI] * 10}) as response:
            assert response.status == 400
            refused = await response.json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 20 == len(engine.log[0].prompt_ids) + len(engine.log[0].ids)
    assert refused["error"]["message"].startswith("This model's maximum context length is 20 tokens")
