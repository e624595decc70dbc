"""What the gateway asks of an inference server: ids in, ids and log-probabilities out.

An engine generates token by token and says which weights sampled each token. It never sees messages.
"""

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

from msgspec import Raw, Struct

from polar.chat import Usage
from polar.specs import Float32Array, Int32Array, VersionSpan

EngineFinish = Literal["stop", "length", "abort"]
LogprobsMode = Literal["raw", "processed"]


class ResolvedSampling(Struct, frozen=True):
    """What the engine is told: task, harness and room have been settled. `top_k` 0 is "off".

    Attributes:
        json_schema: what the sampled text must fit, for an engine that `constrains`; None for free text.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    json_schema: Raw | None = None


class Generated(Struct, frozen=True):
    """Tokens that arrived together.

    Attributes:
        ids, logprobs: equally long; possibly empty in the last chunk.
        finish: set in the last chunk, and only there.
        versions: with `finish`, spans over *all* tokens of the generation.
        usage: with `finish`, the engine's own counts, None where it gives none.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: EngineFinish | None = None
    versions: tuple[VersionSpan, ...] = ()
    usage: Usage | None = None


class EngineInfo(Struct, frozen=True):
    """What an engine says of itself.

    Attributes:
        model: served name.
        model_path: directory of the model's tokenizer, as the engine names it; empty if it does not say.
        max_model_len: tokens of prompt and reply together.
        constrains: it can sample under a JSON schema.
    """

    model: str
    model_path: str
    max_model_len: int
    constrains: bool = False


class Engine(Protocol):
    """An inference server. Every method raises `EngineError` when the server is down or answers what it must not."""

    name: str
    logprobs_mode: LogprobsMode

    def generate(self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling) -> AsyncGenerator[Generated, None]:
        """Stream one generation. Closing the iterator early aborts it on the server."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a generation; its stream ends with finish `abort` and what was sampled."""
        ...

    async def info(self) -> EngineInfo:
        """Model, tokenizer directory and context length; also the health check."""
        ...

    async def score(self, ids: Int32Array) -> Float32Array:
        """Log-probability of each of `ids[1:]` given what is before it, by prefill; float32[n - 1]."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...
