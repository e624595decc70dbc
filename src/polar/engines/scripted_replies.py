"""How the scripted engine tells a generation on each of vLLM's routes, streamed or whole."""

import asyncio
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from polar.engines.script import Policy
from polar.engines.scripted_chat import Speech
from polar.engines.scripted_generation import Generation

Body = dict[str, object]


class Telling(Protocol):
    """A generation in the words of one route."""

    def opening(self) -> Body | None:
        """The event before the first token, if there is one."""
        ...

    def piece(self, start: int) -> Body:
        """The event of the tokens sampled from `start` on."""
        ...

    def closing(self) -> Body | None:
        """The event after the last token: usage, where it was asked for."""
        ...

    def whole(self) -> Body:
        """All in one body."""
        ...


class TokenTelling:
    """`/inference/v1/generate`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._about: Body = {"request_id": generation.wire_id}

    def opening(self) -> None:
        return None

    def piece(self, start: int) -> Body:
        return self._about | {"output_mode": "tokens", "usage": None, "choices": [self._choice(start)]}

    def closing(self) -> Body:
        return self._about | {"output_mode": "tokens", "usage": self._generation.usage(), "choices": []}

    def whole(self) -> Body:
        usage = self._generation.usage()
        return self._about | {"model": "scripted", "usage": usage, "prompt_logprobs": None, "choices": [self._choice(0)]}

    def _choice(self, start: int) -> Body:
        generation = self._generation
        entries = [{"token_id": token, "logprob": value, "rank": 1} for token, value in generation.logprobs(start)]
        return {
            "index": 0,
            "finish_reason": generation.entry.finish or None,
            "stop_reason": None,
            "token_ids": generation.entry.ids[start:],
            "routed_experts": generation.routed_experts(),
            "sampling_mask": generation.sampling_mask(start),
            "weight_versions": generation.spans() if generation.entry.finish else None,
            "logprobs": {"content": [entry | {"top_logprobs": [entry]} for entry in entries]},
        }


class CompletionTelling:
    """`/v1/completions` with ids in."""

    def __init__(self, generation: Generation, policy: Policy) -> None:
        self._generation = generation
        self._policy = policy
        self._about: Body = {"id": generation.wire_id.rsplit("-", 1)[0], "object": "text_completion", "model": "scripted"}

    def opening(self) -> None:
        return None

    def piece(self, start: int) -> Body:
        return self._about | {"choices": [self._choice(start)]}

    def closing(self) -> Body:
        return self._about | {"choices": [], "usage": self._generation.usage()}

    def whole(self) -> Body:
        return self._about | {"choices": [self._choice(0)], "usage": self._generation.usage()}

    def _choice(self, start: int) -> Body:
        entry = self._generation.entry
        logprobs = self._generation.logprobs(start)
        choice: Body = {
            "index": 0,
            "text": self._policy.text(entry.ids[start:]),
            "logprobs": {
                "token_logprobs": [value for _, value in logprobs],
                "tokens": [self._policy.spelling(token) for token, _ in logprobs],
            },
            "finish_reason": entry.finish or None,
            "stop_reason": None,
            "token_ids": entry.ids[start:],
        }
        return choice if start else choice | {"prompt_token_ids": entry.prompt_ids}


class ChatTelling:
    """`/v1/chat/completions`, with ids and log-probabilities where they were asked for.

    Args:
        named: the tool choice names a tool; vLLM's finish reason is then `stop`.
    """

    def __init__(
        self, generation: Generation, policy: Policy, *, tools: bool, named: bool, ids: bool, logprobs: bool, usage: bool
    ) -> None:
        self._generation = generation
        self._policy = policy
        self._speech = Speech(tools)
        self._unread: list[int] = []
        self._named = named
        self._shows_ids = ids
        self._shows_logprobs = logprobs
        self._shows_usage = usage
        self._about: Body = {"id": generation.wire_id, "created": 0, "model": "scripted"}

    def opening(self) -> Body:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._event([choice]) | ({"prompt_token_ids": self._generation.entry.prompt_ids} if self._shows_ids else {})

    def piece(self, start: int) -> Body:
        delta = self._hear(start)
        return self._event([{"index": 0, "delta": delta} | self._tokens(start)])

    def closing(self) -> Body | None:
        return self._event([]) | {"usage": self._generation.usage()} if self._shows_usage else None

    def whole(self) -> Body:
        message = {"role": "assistant", "content": None, "reasoning": None} | self._hear(0)
        return self._about | {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message} | self._tokens(0)],
            "usage": self._generation.usage(),
            "prompt_token_ids": self._generation.entry.prompt_ids if self._shows_ids else None,
        }

    def _event(self, choices: list[Body]) -> Body:
        return self._about | {"object": "chat.completion.chunk", "choices": choices}

    def _hear(self, start: int) -> Body:
        entry = self._generation.entry
        self._unread += entry.ids[start:]
        text = self._policy.text(self._unread)
        if text.endswith("\ufffd") and not entry.finish:
            text = ""  # a part of a character waits for the rest
        else:
            self._unread.clear()
        return self._speech.hear(text, over=bool(entry.finish))

    def _tokens(self, start: int) -> Body:
        entry = self._generation.entry
        content: list[Body] = [
            {"token": self._policy.spelling(token), "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in self._generation.logprobs(start)
        ]
        return {
            "logprobs": {"content": content} if self._shows_logprobs else None,
            "finish_reason": self._finish(entry.finish),
            "stop_reason": None,
            "token_ids": entry.ids[start:] if self._shows_ids else None,
        }

    def _finish(self, finish: str) -> str | None:
        called = finish == "stop" and self._speech.called and not self._named
        return "tool_calls" if called else finish or None


class GenerationReply(Response):
    """Sends a generation as it is told, and stops it when the client hangs up."""

    def __init__(self, generation: Generation, telling: Telling, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._telling = telling
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
        if (opening := self._telling.opening()) is not None:
            await send(_event(opening))
        async for start in self._generation.pieces():
            await send(_event(self._telling.piece(start)))
        if self._generation.entry.finish:  # else it died: a response that is not completed breaks the connection
            if (closing := self._telling.closing()) is not None:
                await send(_event(closing))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send_whole(self, send: Send) -> None:
        async for _ in self._generation.pieces():
            pass
        await send(_start(b"application/json"))
        if self._generation.entry.finish:
            body = msgspec.json.encode(self._telling.whole())
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _start(content_type: bytes) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


def _event(body: Body) -> Message:
    return {"type": "http.response.body", "body": b"data: " + msgspec.json.encode(body) + b"\n\n", "more_body": True}
