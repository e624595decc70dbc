"""A model as the gateway asks it: an engine, what it says of itself, and who renders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polar.engines.protocol import Engine, EngineInfo
from polar.tokens.rendering import Renderer


@dataclass(frozen=True)
class Served:
    """A model as the gateway asks it.

    Attributes:
        renderer: renders prompts and reads replies (token-in); None has the engine do both (chat mode).
        decode: text of ids with control tokens spelled out, for chat mode; None where no tokenizer is at hand.
        bos_id: what the model's tokenizer puts before every text; None for nothing, or where nobody knows.
        trains: it is the policy. Of another model (frozen, or somebody else's) nothing is ever trained: `external`.
    """

    engine: Engine
    info: EngineInfo
    renderer: Renderer | None
    trains: bool = True
    decode: Callable[[Sequence[int]], str] | None = None
    bos_id: int | None = None


async def served(
    engine: Engine,
    renderer: Renderer | None,
    *,
    trains: bool = True,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Served:
    """Ask an engine what it is.

    Raises:
        EngineError: it does not answer.
    """
    return Served(engine, await engine.info(), renderer, trains, decode)
