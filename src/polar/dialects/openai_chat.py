"""OpenAI Chat Completions: `POST …/chat/completions`, streamed or not, with tools, reasoning, images and several choices."""

from collections.abc import Mapping, Sequence

import msgspec

from polar.chat import ChatRequest, Choice, Delta, ReasoningDelta, Reply, ToolCall
from polar.dialects.bodies import Memory
from polar.dialects.openai_chat_request import read
from polar.dialects.openai_common import error_body, models_body, sse, status, token_bytes
from polar.dialects.protocol import EVENT_STREAM, Fault, ModelCard, Route, Target


class OpenAIChat:
    """The dialect; stateless."""

    name = "openai_chat"

    def route(self, target: Target) -> Route | None:
        path = target.path.removeprefix("/v1")
        if target.method == "POST":
            return Route("generate") if path == "/chat/completions" else None
        if target.method not in ("GET", "HEAD"):
            return None
        if path == "/models":
            return Route("models")
        model = path.removeprefix("/models/")
        return Route("models", model) if model != path and model else None

    def claims(self, target: Target) -> bool:
        return True

    def parse(self, target: Target, body: bytes, memory: Memory | None = None) -> ChatRequest:
        return read(body, memory or Memory())

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        choices = [_choice(request, index, choice) for index, choice in enumerate(reply.choices)]
        return msgspec.json.encode(
            {
                "id": f"chatcmpl-{reply.call_id}",
                "object": "chat.completion",
                "created": reply.created,
                "model": reply.model,
                "choices": choices,
                "usage": _usage(reply),
            }
        )

    def events(self, request: ChatRequest, call_id: str, created: int) -> "ChatEvents":
        return ChatEvents(request, call_id, created)

    def fault(self, fault: Fault) -> tuple[int, bytes]:
        return status(fault), msgspec.json.encode(error_body(fault))

    def token_count(self, tokens: int) -> bytes:
        raise NotImplementedError("Chat Completions has no route that counts tokens")

    def models(self, route: Route, cards: Sequence[ModelCard]) -> bytes:
        return models_body(route, cards)


class ChatEvents:
    """One streamed reply as `chat.completion.chunk` events, each of one choice: some clients read no more of an event."""

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest, call_id: str, created: int) -> None:
        self._request = request
        self._head = {"id": f"chatcmpl-{call_id}", "object": "chat.completion.chunk", "created": created, "model": request.model}

    def start(self) -> bytes:
        opened = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, opened) for index in range(self._request.sampling.n))

    def delta(self, delta: Delta) -> bytes:
        field = "reasoning_content" if isinstance(delta, ReasoningDelta) else "content"
        return self._chunk(delta.choice, {field: delta.text})

    def keep_alive(self) -> bytes:
        return sse(None, {**self._head, "choices": []})

    def finish(self, reply: Reply) -> bytes:
        events = [self._end(index, choice) for index, choice in enumerate(reply.choices)]
        if self._request.include_usage:
            events.append(sse(None, {**self._head, "choices": [], "usage": _usage(reply)}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def error(self, fault: Fault) -> bytes:
        return sse(None, error_body(fault))

    def _end(self, index: int, choice: Choice) -> bytes:
        calls = [{"index": place, **_call(call)} for place, call in enumerate(choice.message.tool_calls)]
        events = [self._chunk(index, {"tool_calls": [call]}) for call in calls]
        last = {"finish_reason": choice.finish_reason, "logprobs": _logprobs(self._request, choice)}
        return b"".join([*events, self._chunk(index, {}, **last)])

    def _chunk(self, index: int, delta: Mapping[str, object], **rest: object) -> bytes:
        return sse(None, {**self._head, "choices": [{"index": index, "delta": delta, "finish_reason": None, **rest}]})


def _choice(request: ChatRequest, index: int, choice: Choice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": choice.message.text or None, "refusal": None}
    if choice.message.reasoning:
        message["reasoning_content"] = choice.message.reasoning
    if choice.message.tool_calls:
        message["tool_calls"] = [_call(call) for call in choice.message.tool_calls]
    logprobs = _logprobs(request, choice)
    return {"index": index, "message": message, "finish_reason": choice.finish_reason, "logprobs": logprobs}


def _logprobs(request: ChatRequest, choice: Choice) -> dict[str, object] | None:
    if not request.logprobs:
        return None
    content = [
        {"token": each.token, "logprob": each.logprob, "bytes": token_bytes(each), "top_logprobs": []} for each in choice.logprobs
    ]
    return {"content": content, "refusal": None}


def _call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
