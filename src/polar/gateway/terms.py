"""The terms of a call: what its request asks, how it is known again, and what the policy is given of it."""

from collections.abc import Mapping, Sequence

import msgspec
import xxhash

from polar.chat import ChatRequest, ImagePart, Message
from polar.engines.protocol import ResolvedSampling
from polar.specs import SamplingSpec
from polar.tokens.history import Plan
from polar.tokens.lineage import tools_root
from polar.tokens.records import Call


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
        json_schema=request.json_schema if constrains and not request.tools else None,
    )


def unserved(request: ChatRequest, sampling: ResolvedSampling | None) -> tuple[str, ...]:
    """Names of what was asked and the policy was not given: the dialect's, and what engine and renderer cannot do."""
    names = list(request.unserved)
    if request.tool_choice not in ("auto", "none"):
        names.append("tool_choice")
    if request.json_schema is not None and (sampling is None or sampling.json_schema is None):
        names.append("response_format")
    if any(isinstance(part, ImagePart) for message in request.messages for part in message.content):
        names.append("image")
    return tuple(dict.fromkeys(names))


def addressed(request: ChatRequest) -> list[tuple[str, bytes]]:
    """A request's messages, then its tools, as the content-addressed table holds them: (hash, JSON).

    A message's address is the xxh3_128 of its JSON in hex, the tools' is the root of their lineage.
    """
    bodies = [msgspec.json.encode(message) for message in request.messages]
    return [
        *((xxhash.xxh3_128_hexdigest(body), body) for body in bodies),
        (tools_root(request.tools), msgspec.json.encode(request.tools)),
    ]


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
