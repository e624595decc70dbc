"""A policy that answers from a script, behind vLLM's routes: for tests, and for checking a harness without a model.

It samples as no tokenizer encodes: each text is cut at random into pieces of the vocabulary, so that whatever re-encodes
text downstream shows. It logs every prompt it got and every token it sampled; what Polar recorded must equal that log.
As a process: `python -m polar.engines.scripted --model-dir DIR --script module:function --log FILE --port PORT`.
"""

import argparse
import asyncio
import importlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from polar.engines.keys import guards, key_from_environment
from polar.engines.script import Policy, Scripted, ScriptedCall, prove
from polar.engines.scripted_chat import ChatTemplate
from polar.engines.scripted_generation import Generation, Logged
from polar.engines.scripted_replies import ChatTelling, CompletionTelling, GenerationReply, TokenTelling
from polar.engines.scripted_requests import Asked, Chat, Complete, Generate, Refused, answer, read, refusal
from polar.engines.self_test import PREFIX as SELF_TEST
from polar.errors import UsageError

__all__ = ["Control", "Logged", "Scripted", "ScriptedCall", "ScriptedEngine", "read_log", "scripted_server"]


class Control(Struct, frozen=True):
    """A request to a route that does not generate: path with query, and body as sent."""

    path: str
    body: str


class ScriptedEngine:
    """A scripted policy and its log; serve it with `scripted_server`.

    Args:
        tokenizer: byte-level BPE with the ChatML tokens.
        reply: the script, called once per generation.
        model_dir: what `/v1/models` names as the tokenizer's directory; its chat template is used, if it knows tools.
        log_file: each generation is appended here as a line of JSON, before its end goes out; see `read_log`.
        key: what its routes ask for; empty leaves them open. As a process it takes `$POLAR_ENGINE_KEY`.
        probe: what the self-test's calls are answered with; they are none of the script's, and in no log.
        without: routes that it does not serve, as an older or another server.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply: Callable[[ScriptedCall], Scripted],
        *,
        model_dir: Path | None = None,
        max_model_len: int = 32_768,
        log_file: Path | None = None,
        key: str = "",
        probe: Callable[[ScriptedCall], Scripted] = prove,
        without: tuple[str, ...] = (),
    ) -> None:
        self.log: list[Logged] = []
        self.controls: list[Control] = []
        self.version = "default"
        self.resumed = asyncio.Event()
        self.resumed.set()
        routes = [route for route in self._routes() if route.path not in without]
        self.app = Starlette(routes=routes, middleware=guards(key), exception_handlers={Refused: refusal})
        self._policy = Policy(tokenizer)
        self._template = ChatTemplate(model_dir)
        self._reply = reply
        self._probe = probe
        self._model_dir = model_dir
        self._max_model_len = max_model_len
        self._log_file = log_file
        self._active: set[Generation] = set()

    def stop_all(self) -> None:
        """Abort what runs."""
        for generation in self._active:
            generation.stop()

    def free(self, generation: Generation) -> None:
        """Close an entry of the log: its generation is over."""
        self._active.discard(generation)
        self._close(generation.entry)

    def _routes(self) -> list[Route]:
        def post(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, answer, methods=["POST"])

        return [
            post("/inference/v1/generate", self._generate),
            post("/inference/v1/abort_requests", self._abort),
            post("/abort_requests", self._abort),
            post("/v1/completions", self._complete),
            post("/v1/chat/completions", self._chat),
            post("/tokenize", self._tokenize),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            post("/pause", self._pause),
            post("/resume", self._resume),
            Route("/is_paused", self._is_paused),
            Route("/weight_info", self._weight_info),
            post("/update_weight_version", self._update_weight_version),
            post("/collective_rpc", self._collective_rpc),
            post("/reset_prefix_cache", self._reset_prefix_cache),
            post("/v1/load_lora_adapter", self._take_adapter),
            post("/v1/unload_lora_adapter", self._take_adapter),
        ]

    async def _generate(self, request: Request) -> Response:
        asked = await read(request, Generate)
        if asked.sampling_params.prompt_logprobs is not None:
            return answer({"prompt_logprobs": self._score(asked.token_ids), "choices": []})
        asked.stop_token_ids = asked.sampling_params.stop_token_ids
        name = f"generate-tokens-{asked.request_id}"
        generation = self._begin(name, asked, asked.token_ids, asked.sampling_params.max_tokens)
        generation.entry.experts_from = asked.sampling_params.routed_experts_prompt_start
        return GenerationReply(generation, TokenTelling(generation), asked.stream)

    async def _complete(self, request: Request) -> Response:
        asked = await read(request, Complete)
        if asked.prompt_logprobs is not None:
            return answer({"choices": [{"index": 0, "text": "", "prompt_logprobs": self._score(asked.prompt)}]})
        generation = self._begin(f"cmpl-{asked.request_id}-0", asked, asked.prompt, asked.max_tokens)
        return GenerationReply(generation, CompletionTelling(generation, self._policy), asked.stream)

    async def _chat(self, request: Request) -> Response:
        asked = await read(request, Chat)
        prompt = self._templated(asked)
        limit = min(asked.max_tokens or self._max_model_len, self._max_model_len - len(prompt))
        generation = self._begin(f"chatcmpl-{asked.request_id}", asked, prompt, limit)
        telling = ChatTelling(
            generation,
            self._policy,
            tools=bool(asked.tools) and asked.tool_choice != "none",
            named=isinstance(asked.tool_choice, dict),
            ids=asked.return_token_ids,
            logprobs=asked.logprobs,
            usage=asked.stream_options is not None and asked.stream_options.include_usage,
        )
        return GenerationReply(generation, telling, asked.stream)

    async def _tokenize(self, request: Request) -> Response:
        asked = await read(request, Chat)
        tokens = self._templated(asked) if asked.messages else self._policy.encode(asked.prompt, asked.add_special_tokens)
        return answer({"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens, "token_strs": None})

    def _templated(self, asked: Chat) -> list[int]:
        try:
            return self._policy.encode(self._template.render(asked.messages, asked.tools))
        except UsageError as error:
            raise Refused(400, str(error)) from error

    def _score(self, ids: list[int]) -> list[dict[str, Any] | None]:
        self._check_length(ids)
        return self._policy.score(ids)

    def _begin(self, wire_id: str, asked: Asked, prompt: list[int], limit: int) -> Generation:
        self._check_length(prompt)
        call = self._policy.read(asked.request_id, prompt)
        probed = asked.request_id.startswith(SELF_TEST)
        script = self._probe(call) if probed else self._reply(call)
        entry = Logged(asked.request_id, call.prompt_ids, cache_salt=asked.cache_salt, model=asked.model)
        if not probed:
            self.log.append(entry)
        if script.fault == "http_500":
            self._close(entry)
            raise Refused(500, "scripted fault")
        ids, finish = self._policy.plan(script, asked.request_id, limit, asked.stop_token_ids)
        generation = Generation(self, wire_id, entry, script, ids, self._policy.logprobs(call.prompt_ids, ids), finish)
        self._active.add(generation)
        return generation

    def _check_length(self, prompt: list[int]) -> None:
        if (length := len(prompt)) >= self._max_model_len:
            raise Refused(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. However, your request has {length} input "
                "tokens. Please reduce the length of the input messages.",
            )

    def _close(self, entry: Logged) -> None:
        entry.freed_at = time.time()
        if self._log_file is not None and not entry.request_id.startswith(SELF_TEST):
            with self._log_file.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")

    async def _abort(self, request: Request) -> Response:
        ids = set((await self._record(request))["request_ids"])
        for generation in tuple(self._active):
            if generation.wire_id in ids:
                generation.stop()
        return Response()

    async def _models(self, request: Request) -> Response:
        model = {
            "id": "scripted",
            "object": "model",
            "owned_by": "polar",
            "root": str(self._model_dir or ""),
            "parent": None,
            "max_model_len": self._max_model_len,
        }
        return answer({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _pause(self, request: Request) -> Response:
        await self._record(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in ("keep", "abort"):
            raise Refused(400, f"the scripted engine pauses with mode keep or abort, not {mode}")
        self.resumed.clear()
        if mode == "abort":
            self.stop_all()
        return answer({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        await self._record(request)
        self.resumed.set()
        return answer({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return answer({"is_paused": not self.resumed.is_set()})

    async def _weight_info(self, request: Request) -> Response:
        return answer({"weight_version": self.version})

    async def _update_weight_version(self, request: Request) -> Response:
        self.version = (await self._record(request))["new_version"]
        return answer({"success": True, "new_version": self.version})

    async def _collective_rpc(self, request: Request) -> Response:
        await self._record(request)
        return answer({"results": [None]})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        await self._record(request)
        return answer({"success": True})

    async def _take_adapter(self, request: Request) -> Response:
        await self._record(request)
        return Response("Success")

    async def _record(self, request: Request) -> Any:
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        self.controls.append(Control(request.url.path + query, body.decode()))
        return msgspec.json.decode(body) if body else None


def read_log(path: Path) -> list[Logged]:
    """What a scripted engine, perhaps in another process, has logged to `path`; generations that still run are not in it."""
    return [msgspec.json.decode(line, type=Logged) for line in path.read_bytes().splitlines()] if path.exists() else []


@asynccontextmanager
async def scripted_server(engine: ScriptedEngine, port: int = 0) -> AsyncIterator[str]:
    """Serve `engine` on loopback in this event loop, so that its log and events need no locks; yields the URL."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        engine.app, lifespan="off", log_config=None, log_level="critical", access_log=False, timeout_graceful_shutdown=1
    )
    config.load()
    # The steps of `Server.serve`, without its signal handlers: signals belong to the program that this loop runs in.
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    ticking = asyncio.ensure_future(server.main_loop())
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        engine.stop_all()
        ticking.cancel()
        await server.shutdown(sockets=[listener])


def _load_script(name: str) -> Callable[[ScriptedCall], Scripted]:
    module, _, function = name.partition(":")
    script: Callable[[ScriptedCall], Scripted] = getattr(importlib.import_module(module), function)
    return script


async def _serve(engine: ScriptedEngine, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with scripted_server(engine, port) as url:
        sys.stdout.write(f"polar engine ready on {url} (scripted)\n")
        sys.stdout.flush()
        await stopped.wait()


def main() -> None:
    """Serve a script until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m polar.engines.scripted", description="Serve a scripted policy.")
    parser.add_argument("--model-dir", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--script", required=True, help="module:function that takes a ScriptedCall and returns a Scripted")
    parser.add_argument("--log", type=Path, required=True, help="file that generations are appended to, a line of JSON each")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    key = key_from_environment()
    engine = ScriptedEngine(tokenizer, _load_script(args.script), model_dir=args.model_dir, log_file=args.log, key=key)
    asyncio.run(_serve(engine, args.port))


if __name__ == "__main__":
    main()
