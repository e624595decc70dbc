"""OpenAI Responses: `POST …/responses`, streamed or not. Codex speaks nothing else.

What would need a store of ours other than the session's (templates, conversations, background replies) is refused by name.
What is asked and the policy is not given is named in `unserved`. WebSockets and `/responses/compact` are not served.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from polar.chat import ChatRequest, Message, Reply, RequestedSampling, TextPart, Tool
from polar.dialects.bodies import Memory, decode, decode_field, shortened
from polar.dialects.openai_common import error_body, models_body, status
from polar.dialects.openai_responses_config import Dropped, ReasoningConfig, TextConfig
from polar.dialects.openai_responses_events import ResponseEvents
from polar.dialects.openai_responses_input import InputItems
from polar.dialects.openai_responses_output import whole_response
from polar.dialects.openai_responses_tools import WireChoice, read_choice, read_tools
from polar.dialects.protocol import Fault, ModelCard, Route, Target
from polar.errors import InvalidRequest
from polar.ids import parse_response_id

_LOGPROBS = "message.output_text.logprobs"  # what `include` calls them

# Refused, unless it says no more than if it were not there.
_REFUSED: dict[str, tuple[object, ...]] = {"background": (None, False), "conversation": (None,), "prompt": (None,)}
# Unserved, unless it says no more than if it were not there.
_UNSERVED: dict[str, tuple[object, ...]] = {
    "parallel_tool_calls": (None, True),
    "service_tier": (None, "auto", "default"),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
    "max_tool_calls": (None,),
    "context_management": (None, []),
    "moderation": (None,),
}

Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class _Body(Struct):
    """What is read. `instructions` are kept raw as well: they hold for one request only, so that a later one leaves them out."""

    input: Raw
    model: str | None = None
    tools: list[Raw] | None = None
    tool_choice: WireChoice = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Limit | None = None
    text: TextConfig | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None


_CONSUMED = frozenset(_Body.__struct_fields__) - {"instructions", "reasoning", "include"}


class OpenAIResponses:
    """The dialect; stateless."""

    name = "openai_responses"

    def route(self, target: Target) -> Route | None:
        path = target.path.removeprefix("/v1")
        if target.method != "POST":
            return None
        if path == "/responses":
            return Route("generate")
        return Route("count_tokens") if path == "/responses/input_tokens" else None

    def claims(self, target: Target) -> bool:
        return target.path.startswith(("/v1/responses", "/responses"))

    def parse(self, target: Target, body: bytes, memory: Memory | None = None) -> ChatRequest:
        fields, wire = decode(body, _Body, ("input",))
        extra = {name: raw.copy() for name, raw in fields.items() if name not in _CONSUMED}
        if not wire.instructions:
            extra.pop("instructions", None)
        for name in _asked(extra, _REFUSED):
            raise InvalidRequest(f"{name} is not served by this gateway; leave the field out")
        dropped = Dropped()
        items = _items(wire, dropped, memory or Memory(), fields["input"])
        tools = _tools(wire, items, dropped)
        choice = read_choice(wire.tool_choice, tools, dropped)
        if wire.reasoning:
            wire.reasoning.drop(dropped)
        for name in _asked(extra, _UNSERVED):
            dropped.add(name)
        return ChatRequest(
            model=wire.model or "",
            messages=_messages(wire, items),
            tools=() if choice == "none" else tools,
            sampling=RequestedSampling(wire.temperature, wire.top_p, max_tokens=wire.max_output_tokens),
            stream=bool(wire.stream),
            tool_choice=choice,
            json_schema=items.json_schema,
            logprobs=_LOGPROBS in (wire.include or ()),
            previous=_previous(wire.previous_response_id),
            unserved=dropped.names,
            extra=extra,
        )

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        return msgspec.json.encode(whole_response(request, reply))

    def events(self, request: ChatRequest, call_id: str, created: int) -> ResponseEvents:
        return ResponseEvents(request, call_id, created)

    def fault(self, fault: Fault) -> tuple[int, bytes]:
        return status(fault), msgspec.json.encode(error_body(fault))

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, route: Route, cards: Sequence[ModelCard]) -> bytes:
        return models_body(route, cards)


def _asked(extra: dict[str, Raw], harmless: dict[str, tuple[object, ...]]) -> list[str]:
    """Names of the fields that say more than the values listed as harmless."""
    return [name for name, values in harmless.items() if name in extra and _value(name, extra[name]) not in values]


def _value(name: str, raw: Raw) -> object:
    return decode_field(name, raw, object)


def _items(wire: _Body, dropped: Dropped, memory: Memory, said: Raw) -> InputItems:
    schema = wire.text.json_schema(dropped) if wire.text else None
    items = InputItems(dropped, schema, follows=wire.previous_response_id is not None)
    if bytes(said).startswith(b'"'):
        items.text(decode_field("input", said, str))
    else:
        items.read(decode_field("input", said, list[Raw]), memory)
    return items


def _messages(wire: _Body, items: InputItems) -> tuple[Message, ...]:
    said = items.messages
    system = (Message("system", (TextPart(wire.instructions),)),) if wire.instructions else ()
    if not said and not system:
        raise InvalidRequest("input: expected at least one message")
    return (*system, *said)


def _tools(wire: _Body, items: InputItems, dropped: Dropped) -> tuple[Tool, ...]:
    """The request's tools and those in its items, each name once: what comes later counts."""
    tools = [*read_tools("tools", wire.tools or (), dropped), *items.tools]
    return tuple({tool.name: tool for tool in tools}.values())


def _previous(response_id: str | None) -> str:
    """The call that a request follows; "" for none."""
    if response_id is None:
        return ""
    call_id = parse_response_id(response_id)
    if not call_id:
        raise InvalidRequest(f"Previous response with id {shortened(response_id)} not found.")
    return call_id
