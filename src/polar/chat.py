"""The pivot: what a model call says, in no dialect's words.

Dialects translate to these structs and back, never to each other. Content is a tuple of parts; a plain string is one
text part. Tool-call arguments stay the text that the model wrote: parsing them is for those who compare or render.
"""

from typing import Literal

from msgspec import Raw, Struct

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]


class TextPart(Struct, frozen=True, tag="text"):
    text: str


Part = TextPart  # images join here as a tagged union


class ToolCall(Struct, frozen=True):
    """One call of a tool. `arguments` is the raw text, valid JSON or not."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True, omit_defaults=True):
    """One message. `tool_call_id` names the call that a `tool` message answers."""

    role: Role
    content: tuple[Part, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.content)


class Tool(Struct, frozen=True):
    """A function that the model may call. `parameters` is its JSON schema, byte for byte as the harness wrote it."""

    name: str
    description: str
    parameters: Raw


class RequestedSampling(Struct, frozen=True, omit_defaults=True):
    """What the harness asked for; None is "not said"."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None


class ChatRequest(Struct, frozen=True):
    """A parsed request.

    Attributes:
        extra: fields that the dialect does not know or does not use, kept raw under their own names.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: RequestedSampling = RequestedSampling()
    stream: bool = False
    include_usage: bool = False
    extra: dict[str, Raw] = {}


class Usage(Struct, frozen=True):
    """Token counts of one call, as the engine's ids give them."""

    prompt_tokens: int
    completion_tokens: int


class TextDelta(Struct, frozen=True, tag="text"):
    text: str


class ReasoningDelta(Struct, frozen=True, tag="reasoning"):
    text: str


Delta = TextDelta | ReasoningDelta


class Reply(Struct, frozen=True):
    """What the policy said in one choice: `message` has role `assistant`."""

    call_id: str
    model: str
    created: int
    message: Message
    finish_reason: FinishReason
    usage: Usage
