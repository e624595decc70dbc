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


class ImagePart(Struct, frozen=True, omit_defaults=True, tag="image"):
    """An image: base64 `data` of a `media_type`, or a `url`, as the harness wrote it."""

    media_type: str = ""
    data: str = ""
    url: str = ""

    @property
    def text(self) -> str:
        """What a policy that reads only text is shown in its place; the call records `image` as unserved."""
        return f"[image {self.media_type}]" if self.media_type else "[image]"


Part = TextPart | ImagePart


class ToolCall(Struct, frozen=True):
    """One call of a tool. `arguments` is the raw text, valid JSON or not; `name` is a `Tool.name`."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True, omit_defaults=True, cache_hash=True):
    """One message.

    Attributes:
        tool_call_id: the call that a `tool` message answers; `is_error` says that the tool failed.
        minted: identifiers of ours that came back with an `assistant` message, besides those of its tool calls.
    """

    role: Role
    content: tuple[Part, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    is_error: bool = False
    minted: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The parts as text, joined."""
        return "".join(part.text for part in self.content)


class Tool(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call.

    Attributes:
        name: what the policy calls it. In a namespace it is `{namespace}__{bare name}`.
        parameters: its JSON schema, byte for byte as the harness wrote it.
        custom: a free-text tool: its only parameter `input` is the text, which the dialect hands over bare.
    """

    name: str
    description: str
    parameters: Raw
    namespace: str = ""
    custom: bool = False


class RequestedSampling(Struct, frozen=True, omit_defaults=True):
    """What the harness asked for; None is "not said". `stop` are texts at which a reply ends, without them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1


class ChatRequest(Struct, frozen=True):
    """A parsed request.

    Attributes:
        tool_choice: `auto`, `none` (the dialect leaves the tools out), `required`, or the name of a tool.
        json_schema: what the reply's text must fit; None for free text.
        logprobs: the harness wants the log-probability of each sampled token.
        previous: id of the call whose prompt and reply this one's messages follow (`previous_response_id`); "" for none.
        unserved: names of what was asked and the policy is not given; recorded on the call.
        normalised: names of what the dialect reads as if it were not there (`cache_control`); recorded on the call.
        extra: fields that the dialect does not know or does not use, kept raw under their own names.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: RequestedSampling = RequestedSampling()
    stream: bool = False
    include_usage: bool = False
    tool_choice: str = "auto"
    json_schema: Raw | None = None
    logprobs: bool = False
    previous: str = ""
    unserved: tuple[str, ...] = ()
    normalised: tuple[str, ...] = ()
    extra: dict[str, Raw] = {}


class Usage(Struct, frozen=True):
    """Token counts of one call, as the engine's ids give them."""

    prompt_tokens: int
    completion_tokens: int


class TextDelta(Struct, frozen=True, tag="text"):
    text: str
    choice: int = 0


class ReasoningDelta(Struct, frozen=True, tag="reasoning"):
    text: str
    choice: int = 0


Delta = TextDelta | ReasoningDelta


class TokenLogprob(Struct, frozen=True):
    """One sampled token as text, with its log-probability."""

    token: str
    logprob: float


class Choice(Struct, frozen=True):
    """One answer of the policy: `message` has role `assistant`.

    Attributes:
        stop_sequence: which of the requested stop texts ended it; "" for none.
        logprobs: of each sampled token, where the request wants them.
    """

    message: Message
    finish_reason: FinishReason
    stop_sequence: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


class Reply(Struct, frozen=True):
    """What the policy said. All dialects but one know a single choice: the first."""

    call_id: str
    model: str
    created: int
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def message(self) -> Message:
        return self.choices[0].message

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason
