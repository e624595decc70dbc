"""vLLM's `/v1/chat/completions`: messages in; ids of prompt and reply, log-probabilities and the parsed reply out."""

from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from msgspec import Raw, Struct

from polar.chat import ChatRequest
from polar.engines.chat_wire import write_tool_choice, write_tools
from polar.engines.protocol import ResolvedSampling
from polar.engines.vllm_wire import StreamOptions, StructuredOutputs, structured
from polar.specs import Int32Array

CHAT = "/v1/chat/completions"
REMEMBERED_IDS = 10_000_000  # over all sessions: 40 MB


class ChatBody(Struct, omit_defaults=True):
    """Fields without a default are sent always: each would otherwise be taken from the model's files (L04)."""

    messages: Raw
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    request_id: str
    logprobs: bool
    return_token_ids: bool
    stop_token_ids: tuple[int, ...] = ()
    tools: list[dict[str, object]] = []
    tool_choice: object = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: Raw | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None


def chat_body(
    request_id: str,
    request: ChatRequest,
    messages: Raw,
    sampling: ResolvedSampling,
    salt: str | None,
    model: str | None = None,
) -> bytes:
    """One choice for a request with its `messages` as JSON, streamed if somebody reads along; `model` names an adapter."""
    body = ChatBody(
        messages=messages,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        request_id=request_id,
        logprobs=True,
        return_token_ids=True,
        stop_token_ids=sampling.stop_token_ids,
        tools=write_tools(request.tools),
        tool_choice=write_tool_choice(request.tool_choice) if request.tools else None,
        structured_outputs=structured(sampling),
        chat_template_kwargs=request.extra.get("chat_template_kwargs"),
        cache_salt=salt,
        stream=request.stream,
        stream_options=StreamOptions() if request.stream else None,
        model=model,
    )
    return msgspec.json.encode(body)


class CountBody(Struct, omit_defaults=True):
    """Of `/tokenize`, with messages: what a chat request would be rendered to."""

    messages: Raw
    tools: list[dict[str, object]] = []
    chat_template_kwargs: Raw | None = None


def count_body(request: ChatRequest, messages: Raw) -> bytes:
    """As in `chat_body`, for the count of the prompt alone."""
    return msgspec.json.encode(CountBody(messages, write_tools(request.tools), request.extra.get("chat_template_kwargs")))


@dataclass(frozen=True)
class _Seen:
    """The prompt of a session's last call: length and xxh3-128 of its ids' text, and the ids."""

    length: int
    digest: bytes
    ids: Int32Array


class PromptMemory:
    """Reads the ids of prompts. Where one begins with its session's last, which it mostly does, only the rest is parsed.

    Args:
        capacity: ids that are remembered, over all sessions; who was not heard of for the longest time is forgotten first.
    """

    def __init__(self, capacity: int = REMEMBERED_IDS) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._held = 0

    def read(self, session_id: str, text: bytes) -> Int32Array:
        """The ids that `text` lists with commas; int32[n], read-only.

        Raises:
            DecodeError: it is something else.
        """
        hasher = xxhash.xxh3_128()
        known, rest = self._known(session_id, text, hasher), text
        if known is not None:
            rest = text[known.length + 1 :]
        hasher.update(text if known is None else memoryview(text)[known.length :])
        fresh = _parse(rest)
        ids = fresh if known is None else np.concatenate([known.ids, fresh])
        ids.flags.writeable = False
        self._remember(session_id, _Seen(len(text), hasher.digest(), ids))
        return ids

    def _known(self, session_id: str, text: bytes, hasher: "xxhash.xxh3_128") -> _Seen | None:
        """The last prompt, if `text` begins with it; then `hasher` has taken as much."""
        seen = self._seen.get(session_id)
        if seen is None or text[seen.length : seen.length + 1] not in (b",", b"") or len(text) < seen.length:
            return None
        hasher.update(memoryview(text)[: seen.length])
        if hasher.digest() == seen.digest:
            return seen
        hasher.reset()
        return None

    def _remember(self, session_id: str, seen: _Seen) -> None:
        self._forget(session_id)
        self._seen[session_id] = seen
        self._held += len(seen.ids)
        while self._held > self._capacity:
            self._forget(next(iter(self._seen)))

    def _forget(self, session_id: str) -> None:
        if (seen := self._seen.pop(session_id, None)) is not None:
            self._held -= len(seen.ids)


def _parse(text: bytes) -> Int32Array:
    """numpy reads it twice as fast as a JSON decoder with a conversion behind it."""
    try:
        ids = np.fromstring(text, np.int32, sep=",") if text else np.zeros(0, np.int32)
    except ValueError:
        ids = np.zeros(0, np.int32)
    if len(ids) != text.count(b",") + bool(text) or (len(ids) and ids.min() < 0):
        raise msgspec.DecodeError(f"expected token ids with commas between them, got {text[:50].decode(errors='replace')!r}")
    return ids
