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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import uvicorn
from msgspec import Struct, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from polar.engines.keys import guards, key_from_environment
from polar.engines.script import Policy, Scripted, ScriptedCall

__all__ = ["Control", "Logged", "Scripted", "ScriptedCall", "ScriptedEngine", "read_log", "scripted_server"]

REQUEST_PREFIX = "generate-tokens-"


class Logged(Struct):
    """The truth about one generation.

    Attributes:
        ids, logprobs, versions: of each sampled token, in order; equally long. Values are exact in float32.
        finish: `stop`, `length` or `abort`; empty while it runs, and when it died.
        aborted_at: unix seconds at which the abort, or the end of the connection, was noticed.
        freed_at: unix seconds at which the generation was over.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    finish: str = ""
    aborted_at: float | None = None
    freed_at: float | None = None


class Control(Struct, frozen=True):
    """A request to another route than generate: path with query, and body as sent."""

    path: str
    body: str


class _Sampling(Struct):
    max_tokens: int = 16
    prompt_logprobs: int | None = None


class _Asked(Struct):
    token_ids: list[int]
    sampling_params: _Sampling
    request_id: str = field(default_factory=lambda: uuid4().hex)
    stream: bool = False


class ScriptedEngine:
    """A scripted policy and its log; serve it with `scripted_server`.

    Args:
        tokenizer: byte-level BPE with the ChatML tokens.
        reply: the script, called once per generation.
        model_dir: what `/v1/models` names as the tokenizer's directory.
        log_file: each generation is appended here as a line of JSON, before its end goes out; see `read_log`.
        key: what its routes ask for; empty leaves them open. As a process it takes `$POLAR_ENGINE_KEY`.
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
    ) -> None:
        self.log: list[Logged] = []
        self.controls: list[Control] = []
        self.version = "default"
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.app = Starlette(routes=self._routes(), middleware=guards(key))
        self._policy = Policy(tokenizer)
        self._reply = reply
        self._model_dir = model_dir
        self._max_model_len = max_model_len
        self._log_file = log_file
        self._active: dict[int, _Generation] = {}

    def stop_all(self) -> None:
        """Abort what runs."""
        for generation in self._active.values():
            generation.stop()

    def free(self, entry: Logged) -> None:
        """Close an entry of the log: its generation is over."""
        self._active.pop(id(entry), None)
        entry.freed_at = time.time()
        if self._log_file is not None:
            with self._log_file.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")

    def _routes(self) -> list[Route]:
        return [
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", self._abort, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused),
            Route("/update_weight_version", self._update_weight_version, methods=["POST"]),
            Route("/collective_rpc", self._collective_rpc, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
        ]

    async def _generate(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=_Asked)
        except msgspec.DecodeError as error:
            return _error(400, str(error))
        if (length := len(asked.token_ids)) >= self._max_model_len:
            return _error(400, f"This model's maximum context length is {self._max_model_len} tokens, the prompt has {length}")
        if asked.sampling_params.prompt_logprobs is not None:
            return _json(self._policy.score(asked.token_ids))
        call = self._policy.read(asked.request_id, asked.token_ids)
        script = self._reply(call)
        entry = Logged(asked.request_id, call.prompt_ids)
        self.log.append(entry)
        if script.fault == "http_500":
            self.free(entry)
            return _error(500, "scripted fault")
        ids, finish = self._policy.plan(script, asked.request_id, asked.sampling_params.max_tokens)
        generation = _Generation(self, entry, script, ids, self._policy.logprobs(call.prompt_ids, ids), finish)
        self._active[id(entry)] = generation
        return _Reply(generation, asked.stream)

    async def _abort(self, request: Request) -> Response:
        ids = set((await self._record(request))["request_ids"])
        for generation in self._active.values():
            if REQUEST_PREFIX + generation.entry.request_id in ids:
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
        return _json({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _pause(self, request: Request) -> Response:
        await self._record(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in ("keep", "abort"):
            return _error(400, f"the scripted engine pauses with mode keep or abort, not {mode}")
        self.resumed.clear()
        if mode == "abort":
            self.stop_all()
        return _json({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        await self._record(request)
        self.resumed.set()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return _json({"is_paused": not self.resumed.is_set()})

    async def _update_weight_version(self, request: Request) -> Response:
        self.version = (await self._record(request))["new_version"]
        return _json({"success": True, "new_version": self.version})

    async def _collective_rpc(self, request: Request) -> Response:
        await self._record(request)
        return _json({"results": [None]})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        await self._record(request)
        return _json({"success": True})

    async def _record(self, request: Request) -> Any:
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        self.controls.append(Control(request.url.path + query, body.decode()))
        return msgspec.json.decode(body) if body else None


class _Generation:
    """One generation that runs: samples what was planned, and stops when told."""

    def __init__(
        self, engine: ScriptedEngine, entry: Logged, script: Scripted, ids: list[int], logprobs: list[float], finish: str
    ) -> None:
        self.entry = entry
        self._engine = engine
        self._script = script
        self._ids = ids
        self._logprobs = logprobs
        self._finish = finish
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Abort, unless it is over."""
        if self.entry.freed_at is None and not self._stopped.is_set():
            self.entry.aborted_at = time.time()
            self._stopped.set()

    async def choices(self) -> AsyncIterator[dict[str, Any]]:
        """Choices of the event stream in order; the last has the finish reason, unless the script dies."""
        sent, total, held = 0, len(self._ids), self._script.hold_before_end != 0.0
        while len(self.entry.ids) < total:
            count = min(self._script.tokens_per_chunk, total - len(self.entry.ids))
            await self._wait(count * self._script.delay_per_token)
            if self._stopped.is_set():
                break
            self._sample(count)
            if self._script.fault == "die" and len(self.entry.ids) * 2 >= total:
                self._engine.free(self.entry)
                return
            if held or len(self.entry.ids) < total:
                yield self.choice(sent)
                sent = len(self.entry.ids)
        await self._hold()
        self.entry.finish = "abort" if self._stopped.is_set() else self._finish
        self._engine.free(self.entry)
        yield self.choice(sent)

    def choice(self, start: int) -> dict[str, Any]:
        """vLLM's choice for the sampled tokens from `start` on."""
        entries: list[dict[str, Any]] = []
        for token, logprob in zip(self.entry.ids[start:], self.entry.logprobs[start:], strict=True):
            value = {"token_id": token, "logprob": logprob, "rank": 1}
            entries.append(value | {"top_logprobs": [value]})
        return {
            "index": 0,
            "finish_reason": self.entry.finish or None,
            "stop_reason": None,
            "token_ids": self.entry.ids[start:],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": self._spans() if self.entry.finish else None,
            "logprobs": {"content": self._spoilt(entries) if start == 0 else entries},
        }

    def usage(self) -> dict[str, int]:
        completion = len(self.entry.ids) + (self._script.fault == "usage_off_by_one")
        prompt = len(self.entry.prompt_ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _sample(self, count: int) -> None:
        start = len(self.entry.ids)
        self.entry.ids += self._ids[start : start + count]
        self.entry.logprobs += self._logprobs[start : start + count]
        self.entry.versions += [self._engine.version] * count

    def _spans(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, tokens in groupby(self.entry.versions):
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": version, "start": start, "end": start + len(list(tokens))})
        if self._script.fault == "version_gap":
            spans[0]["start"] += 1
        return spans

    def _spoilt(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        match self._script.fault:
            case "missing_logprob":
                return entries[1:]
            case "nan_logprob":
                return [entries[0] | {"logprob": None}, *entries[1:]]
            case "sentinel_logprob":
                return [entries[0] | {"logprob": -9999.0}, *entries[1:]]
            case _:
                return entries

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(0)  # sockets get their turn, so that a hang-up is seen between any two chunks
        if seconds:
            await self._until(None, seconds)
        if not self._engine.resumed.is_set():
            await self._until(self._engine.resumed, None)

    async def _hold(self) -> None:
        hold = self._script.hold_before_end
        if isinstance(hold, asyncio.Event):
            await self._until(hold, None)
        elif hold:
            await self._until(None, hold)

    async def _until(self, event: asyncio.Event | None, seconds: float | None) -> None:
        """Return when stopped, when `event` is set, or after `seconds`."""
        waits = {asyncio.ensure_future(each.wait()) for each in (self._stopped, event) if each is not None}
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class _Reply(Response):
    """Sends a generation as vLLM does, and stops it when the client hangs up."""

    def __init__(self, generation: _Generation, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._send_all = self._send_stream if stream else self._send_whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            await self._send_all(send)
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.stop()

    async def _send_stream(self, send: Send) -> None:
        await send(_start(b"text/event-stream"))
        about = {"request_id": REQUEST_PREFIX + self._generation.entry.request_id, "output_mode": "tokens"}
        async for choice in self._generation.choices():
            await send(_event(about | {"usage": None, "choices": [choice]}))
        if self._generation.entry.finish:  # else it died: a response that is not completed breaks the connection
            await send(_event(about | {"usage": self._generation.usage(), "choices": []}))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send_whole(self, send: Send) -> None:
        async for _ in self._generation.choices():
            pass
        if self._generation.entry.finish:
            body = {
                "request_id": REQUEST_PREFIX + self._generation.entry.request_id,
                "model": "scripted",
                "usage": self._generation.usage(),
                "prompt_logprobs": None,
                "choices": [self._generation.choice(0)],
            }
            await send(_start(b"application/json"))
            await send({"type": "http.response.body", "body": msgspec.json.encode(body), "more_body": False})


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


def _start(content_type: bytes) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


def _event(body: dict[str, Any]) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + msgspec.json.encode(body) + b"\n\n", "more_body": True}


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}, status)


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
