"""vLLM's token routes over one `Generator`: HTTP in, HTTP out, no rules of its own."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Lifespan
from tokenizers import Tokenizer

from polar.engines.embedded import wire
from polar.engines.embedded.generation import Generation, Generator
from polar.engines.embedded.sampling import Sample
from polar.engines.keys import guards
from polar.errors import EngineError, RequestError

REQUEST_PREFIX = "generate-tokens-"  # vLLM's; aborts name requests with it

T = TypeVar("T")


class Api:
    """The routes. `name` is what requests call the model, `key` what they must bring; empty asks for none."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, name: str, directory: Path, key: str) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._name = name
        self._directory = directory
        self._key = key
        self._started = int(time.time())

    def app(self, lifespan: Lifespan[Starlette]) -> Starlette:
        """The application; every error has vLLM's shape."""
        handlers = {RequestError: _on_refusal, EngineError: _on_engine_error, HTTPException: _on_http_error}
        return Starlette(routes=self._routes(), middleware=guards(self._key), lifespan=lifespan, exception_handlers=handlers)

    def _routes(self) -> list[Route]:
        return [
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", self.abort_requests, methods=["POST"]),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/collective_rpc", self.collective_rpc, methods=["POST"]),
            Route("/update_weight_version", self.update_weight_version, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    async def generate(self, request: Request) -> Response:
        """Generate from token ids, in one reply or as a stream."""
        asked = await _body(request, wire.GenerateRequest)
        self._check_model(asked.model)
        params = asked.sampling_params
        if asked.stream and params.prompt_logprobs is not None:
            raise wire.Refused("prompt_logprobs are not available when stream is true", param="sampling_params.prompt_logprobs")
        request_id = REQUEST_PREFIX + (asked.request_id or token_hex(8))
        generation = self._generator.submit(request_id, asked.token_ids, params)
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return StreamingResponse(self._events(generation, usage), media_type="text/event-stream")
        return _json(await self._reply(request, generation))

    async def abort_requests(self, request: Request) -> Response:
        """End generations with what they have; unknown ids are no error."""
        for request_id in (await _body(request, wire.AbortRequest)).request_ids:
            self._generator.abort(request_id)
        return Response()

    async def pause(self, request: Request) -> Response:
        """Stop sampling, in one of vLLM's three modes."""
        try:
            mode = msgspec.convert(request.query_params.get("mode", "abort"), wire.PauseMode)
        except msgspec.ValidationError:
            raise wire.Refused("mode is none of keep, wait, abort", param="mode") from None
        await self._generator.pause(mode)
        return _json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Sample again."""
        await self._generator.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Whether sampling is stopped."""
        return _json({"is_paused": self._generator.paused})

    async def collective_rpc(self, request: Request) -> Response:
        """`reload_weights` from a directory; takes its place between two steps even without a pause."""
        rpc = await _body(request, wire.RpcRequest)
        await self._generator.reload_weights(Path(rpc.kwargs.weights_path))
        return _json({"results": [None]})

    async def update_weight_version(self, request: Request) -> Response:
        """Name the weights that sample from now on."""
        self._generator.update_version((await _body(request, wire.VersionRequest)).new_version)
        return _json({"success": True})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes; running requests are computed again."""
        await self._generator.reset_prefix_cache()
        return _json({"success": True})

    async def tokenize(self, request: Request) -> Response:
        """Text to ids, control tokens and all."""
        asked = await _body(request, wire.TokenizeRequest)
        self._check_model(asked.model)
        ids = self._tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens).ids
        return _json(wire.Tokenized(len(ids), self._generator.max_model_len, ids))

    async def models(self, request: Request) -> Response:
        """The one model; `root` is its directory, where clients find the tokenizer."""
        model = {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "polar",
            "root": str(self._directory),
            "parent": None,
            "max_model_len": self._generator.max_model_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """200 while it generates, or could."""
        reason = self._generator.broken()
        return Response() if reason is None else _error(reason, 503)

    async def metrics(self, request: Request) -> Response:
        """Counters in Prometheus text."""
        lines = [
            f"# TYPE vllm:{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
            f'vllm:{name}{{model_name="{self._name}"}} {value}\n'
            for name, value in self._generator.metrics().items()
        ]
        return Response("".join(lines), media_type="text/plain; version=0.0.4")

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._name:
            message = f"The model `{model}` does not exist; this engine serves `{self._name}`."
            raise wire.Refused(message, param="model", status=404)

    async def _reply(self, request: Request, generation: Generation) -> wire.Reply:
        watch = asyncio.create_task(self._abort_on_hangup(request, generation))
        try:
            prompt_logprobs = await self._score(generation)
            async for _ in generation.steps():
                pass
        finally:
            watch.cancel()
            self._generator.abandon(generation)
        return wire.Reply(
            request_id=generation.request_id,
            model=self._name,
            created=int(time.time()),
            usage=wire.Usage(*_counts(generation)),
            choices=[_choice(generation, generation.samples)],
            prompt_logprobs=prompt_logprobs,
        )

    async def _score(self, generation: Generation) -> list[dict[str, wire.PromptLogprob] | None] | None:
        if generation.draw.params.prompt_logprobs is None:
            return None
        ids = generation.prompt
        scored = await self._generator.score(ids)
        return [None, *({str(token): logprob} for token, logprob in zip(ids[1:], scored, strict=True))]

    async def _events(self, generation: Generation, usage: bool) -> AsyncIterator[bytes]:
        """A chunk per step, then the usage. A client that hangs up closes this, which ends the generation."""
        try:
            async for samples in generation.steps():
                yield _event(wire.Chunk(request_id=generation.request_id, choices=[_choice(generation, samples)]))
            if usage:
                counted = wire.StreamUsage(*_counts(generation))
                yield _event(wire.Chunk(request_id=generation.request_id, choices=[], usage=counted))
        except EngineError as error:
            yield _event(_error_body(str(error), 500))
        finally:
            self._generator.abandon(generation)
        yield b"data: [DONE]\n\n"

    async def _abort_on_hangup(self, request: Request, generation: Generation) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._generator.abandon(generation)


def _choice(generation: Generation, samples: Sequence[Sample]) -> wire.Choice:
    wants_logprobs = generation.draw.params.logprobs is not None
    last = generation.samples[-1].token_id if generation.finish == "stop" else None
    done = generation.finish is not None
    return wire.Choice(
        token_ids=[sample.token_id for sample in samples],
        logprobs=wire.Logprobs([wire.token_logprob(*sample[:3]) for sample in samples]) if wants_logprobs else None,
        finish_reason=generation.finish,
        stop_reason=last if last in generation.draw.params.stop_token_ids else None,
        weight_versions=wire.version_spans([sample.version for sample in generation.samples]) if done else None,
    )


def _counts(generation: Generation) -> tuple[int, int, int]:
    prompt, completion = len(generation.prompt), generation.ready
    return prompt, prompt + completion, completion


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.ValidationError as fault:
        raise wire.Refused(str(fault), param=_blamed(str(fault))) from fault
    except msgspec.DecodeError as fault:
        raise wire.Refused(f"the body is not JSON: {fault}") from fault


def _blamed(message: str) -> str | None:
    """The parameter that one of msgspec's messages is about: "… unknown field `n` - at `$.sampling_params`"."""
    _, _, place = message.partition(" - at `$")
    names = [place.strip(".`"), *re.findall(r"(?:unknown|required) field `(\w+)`", message)]
    return ".".join(filter(None, names)) or None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error_body(message: str, status: int, param: str | None = None) -> wire.ErrorBody:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status) or HTTPStatus(status).phrase
    return wire.ErrorBody(wire.Error(message, kind, param, status))


def _error(message: str, status: int, param: str | None = None) -> Response:
    return Response(msgspec.json.encode(_error_body(message, status, param)), status, media_type="application/json")


async def _on_refusal(request: Request, error: Exception) -> Response:
    return _error(str(error), getattr(error, "status", 400), getattr(error, "param", None))


async def _on_engine_error(request: Request, error: Exception) -> Response:
    return _error(str(error), 500)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.detail, error.status_code)
