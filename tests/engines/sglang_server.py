"""A server that speaks as SGLang 0.5.23 does, by its source: SGLang itself needs a GPU, so what is not in here is not tested."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Token = tuple[int, float | None]
STOP: dict[str, Any] = {"type": "stop", "matched": 2}


@dataclass
class SglangLike:
    """Answers every generation with the same tokens.

    Attributes:
        incremental: events bring what is new (`--incremental-streaming-output`), otherwise all until now.
        cumulative_logprobs: log-probabilities are always all until now, as older versions have them.
        versions: `weight_version` of each event; None for an event without.
        spans: `weight_versions` with the finish; None for a server without them.
        hold: a generation waits for it before its last event.
        said: `message` of the chat route's reply.
        prompt: ids that the chat route renders every history to.
        room: tokens that its prompt leaves for a reply.
        tool_call_parser: what the server was started with.
        requests: path and body of each request.
    """

    tokens: Sequence[Token]
    incremental: bool = False
    cumulative_logprobs: bool = False
    finish: dict[str, Any] = field(default_factory=lambda: dict(STOP))
    versions: Sequence[str] = ("default",)
    spans: list[dict[str, Any]] | None = None
    prompt_tokens: int | None = 2
    hidden: int = 0  # tokens whose ids are counted and not sent
    key: str = ""
    status: int = 200
    hold: asyncio.Event | None = None
    said: dict[str, Any] = field(default_factory=lambda: {"content": "Hi there.", "reasoning_content": None})
    prompt: Sequence[int] = (5, 6)
    room: int = 4094
    tool_call_parser: str | None = "qwen25"
    requests: list[tuple[str, Any]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        text = await request.text()
        body: Any = json.loads(text) if text else None
        self.requests.append((request.path, body))
        if self.status != 200:
            return web.json_response({"error": {"message": "not today", "type": "any"}}, status=self.status)
        if request.path == "/generate" and body.get("stream"):
            return await self._stream(request)
        if request.path == "/v1/chat/completions":
            return await self._chat(body)
        if request.path == "/abort_request":
            self.aborted.set()
        return web.json_response(self._told(request.path, body))

    def _told(self, path: str, body: Any) -> Any:
        match path:
            case "/model_info":
                return {
                    "model_path": "/models/m",
                    "tokenizer_path": "/models/t",
                    "weight_version": "default",
                    "is_generation": True,
                }
            case "/server_info":
                return {"model_path": "/models/m", "tool_call_parser": self.tool_call_parser, "version": "0.5.23"}
            case "/v1/models":
                card = {"id": "m", "object": "model", "owned_by": "sglang", "root": "m", "parent": None, "max_model_len": 4096}
                return {"object": "list", "data": [{**card, "id": "lora", "parent": "m", "max_model_len": None}, card]}
            case "/tokenize":
                return {"tokens": [5, 6], "count": 2, "max_model_len": 4096}
            case "/generate":
                entries = [[None, body["input_ids"][0], None], *([-float(token), token, None] for token in body["input_ids"][1:])]
                return {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": entries, "completion_tokens": 0}}
        return {"success": True, "message": "done"}

    async def _chat(self, body: Any) -> web.Response:
        if body.get("stream") and body.get("return_token_ids"):
            return _refusal("return_token_ids is not supported with streaming on /v1/chat/completions.")
        if body.get("max_tokens") is not None and body["max_tokens"] > self.room:
            return _refusal("Requested token count exceeds the model's maximum context length of 4096 tokens. You requested …")
        if self.hold is not None:
            await self.hold.wait()
        return web.json_response(self._reply(), dumps=lambda reply: json.dumps(reply, separators=(",", ":")))

    def _reply(self) -> dict[str, Any]:
        event = self._event(len(self.tokens), last=True)
        meta = event["meta_info"]
        choice = {
            "index": 0,
            "message": {"role": "assistant", **self.said},
            "logprobs": {"content": [{"token": "", "bytes": [], "logprob": p, "top_logprobs": []} for _, p in self.tokens]},
            "finish_reason": meta["finish_reason"]["type"],
            "matched_stop": meta["finish_reason"].get("matched"),
            "prompt_token_ids": list(self.prompt),
            "response_token_ids": event["output_ids"],
            "meta_info": meta,
        }
        usage = {"prompt_tokens": self.prompt_tokens or 0, "total_tokens": 0, "completion_tokens": meta["completion_tokens"]}
        return {
            "id": meta["id"],
            "object": "chat.completion",
            "created": 0,
            "model": "default",
            "choices": [choice],
            "usage": usage,
            "metadata": {"weight_version": meta["weight_version"]},
        }

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for size in range(1, len(self.tokens) + 1):
            last = size == len(self.tokens)
            if last and self.hold is not None:
                await self.hold.wait()
            await response.write(b"data: " + json.dumps(self._event(size, last)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, size: int, last: bool) -> dict[str, Any]:
        start = size - 1 if self.incremental else 0
        entries = [[value, token, None] for token, value in self.tokens[:size]]
        meta: dict[str, Any] = {
            "id": "r1.",
            "finish_reason": self.finish if last else None,
            "weight_version": self.versions[min(size, len(self.versions)) - 1],
            "num_retractions": 0,
            "output_token_logprobs": entries if self.cumulative_logprobs else entries[start:],
            "completion_tokens": size + self.hidden,
            "cached_tokens": 0,
        }
        if self.prompt_tokens is not None:
            meta["prompt_tokens"] = self.prompt_tokens
        if last and self.spans is not None:
            meta["weight_versions"] = self.spans
        return {"text": "…", "output_ids": [token for token, _ in self.tokens[start:size]], "meta_info": meta}


def _refusal(message: str) -> web.Response:
    """In SGLang's form, which lacks OpenAI's `error` around it."""
    body = {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}
    return web.json_response(body, status=400)


@asynccontextmanager
async def sglang_server(server: SglangLike) -> AsyncIterator[str]:
    """Serve on loopback; yields the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
