"""The terms of a call: what its request asks, how it is known again, and what the policy is given of it."""

import re
from collections.abc import Mapping, Sequence, Set

import msgspec
import xxhash

from polar.chat import ChatRequest, ImagePart, Message
from polar.engines.protocol import ResolvedSampling
from polar.errors import ContextLengthExceeded
from polar.recent import Recent
from polar.specs import SamplingSpec
from polar.tokens.history import Plan
from polar.tokens.lineage import tools_root
from polar.tokens.records import Call

ADDRESSED = 16_000_000  # bytes of messages whose addresses are remembered, in each of two generations
_TOO_LONG = re.compile(r"context (length|size|window)|context_length|context_size", re.IGNORECASE)
_TOKENS = re.compile(r"(\d{1,9}) (?:\w+ )?tokens")


def resolve(
    task: SamplingSpec, request: ChatRequest, room: int, stop_ids: tuple[int, ...], *, constrains: bool = False
) -> ResolvedSampling:
    """Sampling belongs to the trainer (D18); `max_tokens` is the least of harness, task and room (tokens).

    A schema binds the whole reply, so it is followed only where the request has no tools.
    """
    limits = [limit for limit in (request.sampling.max_tokens, task.max_tokens, room) if limit is not None]
    return ResolvedSampling(
        max_tokens=min(limits),
        temperature=task.temperature,
        top_p=task.top_p,
        top_k=task.top_k,
        stop_token_ids=stop_ids,
        json_schema=request.json_schema if constrains and not request.tools and not task.regex else None,
        regex=task.regex,
    )


def own_terms(request: ChatRequest) -> SamplingSpec:
    """What the harness asks for, where no trainer has a say: of a model that is not the policy."""
    asked, free = request.sampling, SamplingSpec()
    return SamplingSpec(
        temperature=free.temperature if asked.temperature is None else asked.temperature,
        top_p=free.top_p if asked.top_p is None else asked.top_p,
        top_k=free.top_k if asked.top_k is None else asked.top_k,
    )


def has_images(request: ChatRequest) -> bool:
    """Whether there is an image anywhere in the messages."""
    return ImagePart in {type(part) for message in request.messages for part in message.content}


def forces_tool(request: ChatRequest) -> bool:
    """Whether the reply has to be a tool call."""
    return request.tool_choice not in ("auto", "none")


def unserved(request: ChatRequest, sampling: ResolvedSampling | None, *, by_engine: bool = False) -> tuple[str, ...]:
    """Names of what was asked and the model was not given: the dialect's, and what engine and renderer cannot do.

    Args:
        by_engine: the engine gets the messages (chat mode), and with them images and the choice of a tool.
    """
    names = list(request.unserved)
    if forces_tool(request) and not by_engine:
        names.append("tool_choice")
    if request.json_schema is not None and (sampling is None or sampling.json_schema is None):
        names.append("response_format")
    if not by_engine and has_images(request):
        names.append("image")
    return tuple(dict.fromkeys(names))


class Addresses:
    """Where the content-addressed table holds messages and tools, as JSON.

    A message's address is the xxh3_128 of its JSON in hex, the tools' is the root of their lineage.
    """

    def __init__(self) -> None:
        self._known: Recent[Message, str] = Recent(ADDRESSED)

    def of(self, request: ChatRequest) -> tuple[str, ...]:
        """Addresses of a request's messages, then that of its tools."""
        known = self._known
        return (*[known.get(message) or self._address(message) for message in request.messages], tools_root(request.tools))

    def _address(self, message: Message) -> str:
        if (known := self._known.older(message)) is not None:
            return known
        body = msgspec.json.encode(message)
        return self._known.keep(message, xxhash.xxh3_128_hexdigest(body), len(body))


def unseen(request: ChatRequest, addresses: Sequence[str], stored: Set[str]) -> dict[str, bytes]:
    """The JSON of those messages and tools of a request that are not `stored`, by address."""
    things = (*request.messages, request.tools)
    news = set(addresses).difference(stored)
    return {address: msgspec.json.encode(things[addresses.index(address)]) for address in news}


def numbers(sampling: ResolvedSampling | None) -> dict[str, float]:
    """Resolved sampling as the call's record has it."""
    if sampling is None:
        return {}
    return {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}


def respelled(plan: Plan | None, messages: Sequence[Message], calls: Mapping[str, Call]) -> tuple[str, ...]:
    """T02, T03: how the reply that a prompt continues came back differently from what was sent."""
    if plan is None or plan.continuation.reply is None or (parent := calls.get(plan.parent_call)) is None:
        return ()
    came = messages[plan.continuation.known - 1]
    sent = parent.choices[plan.continuation.reply.choice].message
    differing = {
        "arguments_respelled": [call.arguments for call in came.tool_calls] != [call.arguments for call in sent.tool_calls],
        "reasoning_changed": came.reasoning != sent.reasoning,
        "text_trimmed": came.text != sent.text,
    }
    return tuple(name for name, differs in differing.items() if differs)


def overflow(refusal: str, limit: int) -> ContextLengthExceeded | None:
    """T10 as an engine that renders says it: a refusal that speaks of the context; None for any other.

    Args:
        limit: tokens of prompt and reply together. The prompt is said to have the most that the refusal speaks of.
    """
    if not _TOO_LONG.search(refusal):
        return None
    return ContextLengthExceeded(max([limit + 1, *(int(number) for number in _TOKENS.findall(refusal))]), limit)
