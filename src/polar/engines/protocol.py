"""What the gateway asks of an inference server.

Token-in: ids in, ids and log-probabilities out; the engine never sees messages. Chat mode, for models that nobody here can
render: messages in, and with the reply the ids of prompt and reply, where the engine shows them. Not every engine can do
everything; `EngineInfo` says what it can, and the rest is refused with `EngineRefusal`.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from msgspec import Raw, Struct

from polar.chat import ChatRequest, Delta, Usage
from polar.specs import NO_EXTRAS, Extras, Float32Array, Int32Array, VersionSpan
from polar.tokens.rendering import ParsedReply

EngineFinish = Literal["stop", "length", "abort"]
LogprobsMode = Literal["raw", "processed"]
PauseMode = Literal["keep", "wait", "abort"]


class ResolvedSampling(Struct, frozen=True):
    """What the engine is told: task, harness and room have been settled. `top_k` 0 is "off".

    Attributes:
        json_schema: what the sampled text must fit, for an engine that `constrains`; None for free text.
        regex: likewise, as a regular expression that the whole reply matches; "" for none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    json_schema: Raw | None = None
    regex: str = ""

    @property
    def constrained(self) -> bool:
        """Sampled under a grammar: the log-probabilities are of the masked distribution (L05)."""
        return self.json_schema is not None or bool(self.regex)


class Generated(Struct, frozen=True):
    """Tokens that arrived together.

    Attributes:
        ids, logprobs: equally long; possibly empty in the last chunk.
        finish: set in the last chunk, and only there.
        versions: with `finish`, spans over *all* tokens of the generation.
        usage: with `finish`, the engine's own counts, None where it gives none.
        extras: with `finish`, what the engine tells besides of each token of the generation.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: EngineFinish | None = None
    versions: tuple[VersionSpan, ...] = ()
    usage: Usage | None = None
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True)
class Chatted:
    """What arrived together of a generation in chat mode.

    Attributes:
        tokens: as in token-in mode; without ids from an engine that shows none.
        deltas: text and reasoning, as the engine parses them.
        prompt_ids: int32[n], the prompt as the engine rendered it: in the first piece that knows it, and only there.
        parsed: with `tokens.finish`, the whole reply as the engine parsed it; its text and reasoning are the joined deltas.
    """

    tokens: Generated
    deltas: tuple[Delta, ...] = ()
    prompt_ids: Int32Array | None = None
    parsed: ParsedReply | None = None


class EngineInfo(Struct, frozen=True):
    """What an engine says of itself.

    Attributes:
        model: served name.
        model_path: directory of the model's tokenizer, as the engine names it; empty if it does not say.
        max_model_len: tokens of prompt and reply together.
        constrains: it can sample under a JSON schema.
        token_in: it generates from ids.
        chats: it generates from messages.
        shows_ids: in chat mode it tells the ids of prompt and reply; without them nothing can be trained.
        scores: it can give log-probabilities of a given sequence (`score`).
    """

    model: str
    model_path: str
    max_model_len: int
    constrains: bool = False
    token_in: bool = True
    chats: bool = False
    shows_ids: bool = True
    scores: bool = True


class Engine(Protocol):
    """An inference server. Every method raises `EngineError` when the server is down or answers what it must not."""

    name: str
    logprobs_mode: LogprobsMode

    def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        """Stream one generation. Closing the iterator early aborts it on the server.

        Args:
            session_id: whose call it is, for routing over replicas.
        """
        ...

    def chat(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Chatted, None]:
        """Stream one generation from messages; one choice, whatever `request.sampling.n` says.

        Of `request` the messages, tools, tool choice, and `stream` (whether anybody reads along) count; sampling is `sampling`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a generation; its stream ends with finish `abort` and what was sampled."""
        ...

    async def info(self) -> EngineInfo:
        """Model, tokenizer directory and context length; also the health check."""
        ...

    async def tokenize(self, text: str) -> Int32Array:
        """Ids that the server gives to `text` as a bare prompt, with the special tokens that it adds; int32[n]."""
        ...

    async def score(self, ids: Int32Array) -> Float32Array:
        """Log-probability of each of `ids[1:]` given what is before it, by prefill; float32[n - 1]."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...


@runtime_checkable
class CountsPrompts(Protocol):
    """An engine that says how many tokens a request has as it would render it, without generating."""

    async def count_prompt(self, request: ChatRequest) -> int:
        """Tokens of the prompt that `chat` would make."""
        ...


@runtime_checkable
class WeightControl(Protocol):
    """An engine whose weights a trainer changes. Pause, load, name the version, forget cached prefixes (W02), resume."""

    @property
    def salts_prefixes(self) -> bool:
        """A prefix is never reused under another version than it was computed under (W02)."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling. `keep` freezes running generations, which go on after `resume`."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def reload_weights(self, path: str) -> None:
        """Load the weights from directory `path`, as the server sees it. Pause first."""
        ...

    async def update_version(self, version: int) -> None:
        """Name the weights that sample from now on."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, which old weights computed (W02)."""
        ...


@runtime_checkable
class AdapterControl(Protocol):
    """An engine that takes LoRA adapters beside its weights. A running call keeps the one that it began with to its end."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Directories that have to stay: of adapters that running calls, or the next ones, need."""
        ...

    async def load_adapter(self, path: str, version: int) -> None:
        """Have calls begin with the adapter in directory `path`, as policy `version`; older ones that no call needs go."""
        ...
