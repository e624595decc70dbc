"""The client of SGLang's chat route, against a small server that speaks as SGLang 0.5.23 does by its source.

SGLang needs a GPU and does not run here: what these tests promise holds as far as that source was read rightly.
"""

import asyncio
import math
from contextlib import aclosing
from typing import Any

import pytest
from msgspec import Raw

from polar.chat import ChatRequest, Message, ReasoningDelta, TextDelta, TextPart, Tool, ToolCall, Usage
from polar.engines.protocol import Chatted, CountsPrompts, ResolvedSampling
from polar.engines.sglang import SglangEngine
from polar.errors import EngineError, EngineRefusal
from polar.specs import VersionSpan
from polar.tokens.rendering import ParsedReply
from tests.engines.sglang_server import STOP, SglangLike, Token
from tests.engines.test_sglang import TOKENS, WHOLE, client_of

SAMPLING = ResolvedSampling(max_tokens=64, temperature=0.5, top_p=0.9)
SPANS = [{"version": "default", "start": 0, "end": 4}]
BASH = Tool("bash", "Run a command.", Raw(b'{"type":"object"}'))
CALLED: dict[str, Any] = {"type": "tool_calls", "matched": None}  # as SGLang rewrites it once it has read calls


def like(tokens: list[Token] = TOKENS, **more: Any) -> SglangLike:
    return SglangLike(tokens, **{"versions": ["default"], "spans": SPANS, **more})


def asking(*messages: Message, **more: Any) -> ChatRequest:
    return ChatRequest("any", messages or (Message("user", (TextPart("hi"),)),), **more)


async def chatted(engine: SglangEngine, request: ChatRequest | None = None, sampling: ResolvedSampling = SAMPLING) -> Chatted:
    (piece,) = [piece async for piece in engine.chat("r1", request or asking(), sampling, session_id="s")]
    return piece


async def of(server: SglangLike, request: ChatRequest | None = None) -> Chatted:
    async with client_of(server) as engine:
        return await chatted(engine, request)


class TestReply:
    @pytest.mark.parametrize("streamed", [True, False])
    async def test_ids_of_prompt_and_reply_come_with_log_probabilities_and_versions(self, streamed: bool) -> None:
        spans = [{"version": "default", "start": 0, "end": 3}, {"version": "7", "start": 3, "end": 4}]
        piece = await of(like(spans=spans), asking(stream=streamed))
        assert (list(piece.tokens.ids), list(piece.tokens.logprobs)) == WHOLE
        assert piece.prompt_ids is not None
        assert piece.prompt_ids.tolist() == [5, 6]
        assert (piece.tokens.finish, piece.tokens.usage) == ("stop", Usage(2, 4))
        assert piece.tokens.versions == (VersionSpan(0, 3, 0), VersionSpan(3, 4, 7))

    async def test_reasoning_text_and_calls_come_as_sglang_read_them(self) -> None:
        call = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
        said = {"content": "Listing.", "reasoning_content": "Look.", "tool_calls": [call]}
        piece = await of(like(said=said, finish=CALLED), asking(tools=(BASH,)))
        assert piece.deltas == (ReasoningDelta("Look."), TextDelta("Listing."))
        assert piece.parsed == ParsedReply("Listing.", "Look.", (("bash", '{"a": 1}'),))
        assert piece.tokens.finish == "stop"

    async def test_a_later_prompt_is_told_as_it_is(self) -> None:
        server = like()
        async with client_of(server) as engine:
            told = []
            for server.prompt in ([5, 6], [5, 6, 7], [9], []):
                piece = await chatted(engine)
                assert piece.prompt_ids is not None
                told.append(piece.prompt_ids.tolist())
        assert told == [[5, 6], [5, 6, 7], [9], []]

    async def test_a_full_reply(self) -> None:
        piece = await of(like(TOKENS[:2], finish={"type": "length", "length": 2}))
        assert (piece.tokens.finish, piece.tokens.ids) == ("length", (504, 7042))

    async def test_a_null_logprob_is_nan_for_the_detector(self) -> None:
        assert math.isnan((await of(like([(504, None), TOKENS[-1]]))).tokens.logprobs[0])


class TestRequest:
    async def body(self, request: ChatRequest, sampling: ResolvedSampling = SAMPLING) -> Any:
        server = like()
        async with client_of(server) as engine:
            await chatted(engine, request, sampling)
        ((path, body),) = server.requests
        assert path == "/v1/chat/completions"
        assert 0 <= body.pop("seed") < 2**31
        return body

    async def test_nothing_of_a_sampling_is_left_to_the_server(self) -> None:
        assert await self.body(asking(stream=True)) == {
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "rid": "r1.",
            "logprobs": True,
            "return_token_ids": True,
            "return_meta_info": True,
            "max_tokens": 64,
        }

    async def test_messages_tools_and_the_templates_arguments(self) -> None:
        call = ToolCall("call_1", "bash", '{"a": 1}')
        history = (Message("user", (TextPart("hi"),)), Message("assistant", (), "Look.", (call,)))
        extra = {"chat_template_kwargs": Raw(b'{"enable_thinking":false}')}
        body = await self.body(asking(*history, tools=(BASH,), tool_choice="bash", extra=extra))
        assert body["messages"][1]["reasoning_content"] == "Look."
        assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"a": 1}'}
        assert body["tools"][0]["function"]["parameters"] == {"type": "object"}
        assert body["tool_choice"] == {"type": "function", "function": {"name": "bash"}}
        assert body["chat_template_kwargs"] == {"enable_thinking": False}

    @pytest.mark.parametrize(
        ("sampling", "sent"),
        [
            (ResolvedSampling(1, stop_token_ids=(2,)), {"stop_token_ids": [2]}),
            (ResolvedSampling(1, regex="a+"), {"regex": "a+"}),
            (ResolvedSampling(1, top_k=7), {"top_k": 7}),
            (
                ResolvedSampling(1, json_schema=Raw(b"{}")),
                {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": {}}}},
            ),
        ],
    )
    async def test_what_a_reply_is_held_to(self, sampling: ResolvedSampling, sent: dict[str, Any]) -> None:
        assert sent.items() <= (await self.body(asking(), sampling)).items()

    async def test_a_limit_beyond_the_room_leaves_the_room_as_limit(self) -> None:
        server = like(room=63)
        assert (await of(server)).tokens.finish == "stop"
        assert [body.get("max_tokens") for _, body in server.requests] == [64, None]

    async def test_its_prompts_are_counted(self) -> None:
        server = like()
        async with client_of(server) as engine:
            assert isinstance(engine, CountsPrompts)
            assert await engine.count_prompt(asking()) == 2
        assert server.requests == [("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})]


class TestAborts:
    async def test_abort_ends_a_reply_with_what_was_sampled(self) -> None:
        server = like(finish={"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
        server.hold = server.aborted
        async with client_of(server) as engine:
            call = asyncio.ensure_future(chatted(engine))
            while not server.requests:
                await asyncio.sleep(0.005)
            await engine.abort("r1")
            piece = await call
        assert server.requests[1] == ("/abort_request", {"rid": "r1."})
        assert (list(piece.tokens.ids), piece.tokens.finish) == (WHOLE[0], "abort")

    async def test_an_abort_before_the_first_token(self) -> None:
        class Waiting(SglangLike):
            def _event(self, size: int, last: bool) -> dict[str, Any]:
                meta = {"id": "r1.", "weight_version": "default", "completion_tokens": 0, "output_token_logprobs": []}
                return {"output_ids": [], "meta_info": {**meta, "finish_reason": self.finish}}

        piece = await of(Waiting([], finish={"type": "abort", "message": "Abort in waiting queue"}))
        assert (piece.tokens.ids, piece.tokens.finish, piece.tokens.usage) == ((), "abort", None)

    async def test_a_call_that_is_left_aborts_on_the_server(self) -> None:
        server = like(hold=asyncio.Event())
        async with client_of(server) as engine:
            async with aclosing(engine.chat("r1", asking(), SAMPLING)) as pieces:
                waiting = asyncio.ensure_future(anext(pieces))
                while not server.requests:
                    await asyncio.sleep(0.005)
                waiting.cancel()
                await asyncio.wait([waiting])
            async with asyncio.timeout(2):
                await server.aborted.wait()


class TestFaults:
    async def test_logprobs_of_other_tokens_are_refused_by_name(self) -> None:
        class Shifted(SglangLike):
            def _event(self, size: int, last: bool) -> dict[str, Any]:
                event = super()._event(size, last)
                event["output_ids"] = [*event["output_ids"][:-1], 3]
                return event

        with pytest.raises(EngineError, match=r"T08.*3\].*2\]"):
            await of(Shifted(TOKENS, spans=SPANS, finish=CALLED))  # as where logits are NaN: nothing else tells with calls

    async def test_ids_that_are_counted_and_not_sent_are_refused_by_name(self) -> None:
        with pytest.raises(EngineError, match="T08: the engine counts 5 tokens after 0, and sent 4"):
            await of(like(hidden=1))

    @pytest.mark.parametrize("missing", ["prompt_token_ids", "response_token_ids", "meta_info"])
    async def test_a_server_that_shows_no_ids_is_refused_by_name(self, missing: str) -> None:
        class Silent(SglangLike):
            def _reply(self) -> dict[str, Any]:
                reply = super()._reply()
                del reply["choices"][0][missing]
                return reply

        with pytest.raises(EngineError, match="T08: the engine told no ids"):
            await of(Silent(TOKENS, spans=SPANS))

    @pytest.mark.parametrize("matched", ["NaN happened", 7, None])
    async def test_a_stop_at_anything_but_the_last_id_is_refused_by_name(self, matched: object) -> None:
        with pytest.raises(EngineError, match="T06: the engine stopped at .*, and the last id that it sent is 2"):
            await of(like(finish={**STOP, "matched": matched}))

    async def test_a_reply_without_versions_of_its_tokens_is_refused_by_name(self) -> None:
        with pytest.raises(EngineError, match="W01.*update SGLang"):
            await of(like(spans=None))

    async def test_a_refusal_carries_the_servers_message(self) -> None:
        with pytest.raises(EngineRefusal, match="/v1/chat/completions with 400: not today"):
            await of(like(status=400))

    async def test_a_prompt_beyond_the_context_is_a_refusal_that_says_so(self) -> None:
        class Small(SglangLike):
            async def _chat(self, body: Any) -> Any:
                return await super()._chat({**body, "max_tokens": 1})

        server = Small(TOKENS, room=0)
        with pytest.raises(EngineRefusal, match="maximum context length of 4096 tokens"):
            await of(server)
        assert [path for path, _ in server.requests].count("/v1/chat/completions") == 2

    async def test_a_reply_without_a_choice(self) -> None:
        class Empty(SglangLike):
            def _reply(self) -> dict[str, Any]:
                return {**super()._reply(), "choices": []}

        with pytest.raises(EngineError, match="without a finish reason"):
            await of(Empty(TOKENS, spans=SPANS))

    @pytest.mark.parametrize("parser", ["glm47", "inkling", "kimi_k3"])
    async def test_no_chat_mode_where_a_parser_masks_what_is_sampled(self, parser: str) -> None:
        async with client_of(like(tool_call_parser=parser)) as engine:
            info = await engine.info()
        assert (info.token_in, info.chats) == (True, False)

    async def test_the_parser_is_asked_for_once(self) -> None:
        server = like()
        async with client_of(server) as engine:
            assert (await engine.info()).chats
            assert (await engine.info()).chats
        assert [path for path, _ in server.requests].count("/server_info") == 1
