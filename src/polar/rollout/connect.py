"""Connects an engine, and finds the renderer of its model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from polar.engines.keys import KEY_VARIABLE, key_from_environment
from polar.engines.launch import EngineProcess, embedded_engine
from polar.engines.protocol import Engine, EngineInfo
from polar.engines.renderers import load_renderer
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError
from polar.tokens.rendering import Renderer

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Connected:
    """An engine that answers.

    Attributes:
        model_path: directory of its model's tokenizer.
        process: the embedded engine's process, None for an engine that somebody else runs.
    """

    engine: Engine
    renderer: Renderer
    model: str
    model_path: Path
    process: EngineProcess | None


@asynccontextmanager
async def connected(engine: str, model: str, *, log: Path, note: Callable[[str], None]) -> AsyncIterator[Connected]:
    """Connect `engine`: `embedded` starts one with `model` (default `smollm2`) and ends it with the block, a URL finds one.

    The embedded engine has a key that only this process knows. The key of an engine by URL (vLLM's `--api-key`) is taken from
    `$POLAR_ENGINE_KEY`.

    Args:
        model: for a URL, the directory of the model's tokenizer; "" takes the one that the engine names.
        log: file for the embedded engine's output.
        note: gets a line about what takes a while.

    Raises:
        UsageError: not an engine, no tokenizer can be found for its model, or the log cannot be written.
        EngineError: it does not start, does not answer, or refuses the key.
    """
    async with AsyncExitStack() as stack:
        process: EngineProcess | None = None
        if engine == EMBEDDED:
            note(f"starting the embedded engine with {model or 'smollm2'} (log: {log})")
            process = await stack.enter_async_context(embedded_engine(model or "smollm2", log=log))
            url, key, model = process.url, process.key, str(process.model_dir)
        else:
            url, key = engine, key_from_environment()
            _check_url(url, key)
        client = VllmEngine(url, key)
        stack.push_async_callback(client.close)
        info = await client.info()
        path = Path(model or info.model_path)
        renderer = await asyncio.to_thread(_renderer, path, url, info)
        note(f"engine ready: {info.model}, context {info.max_model_len} tokens")
        yield Connected(client, renderer, info.model, path, process)


def _check_url(url: str, key: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that does not close, or a port beyond 65535
        usable = False
    if not usable:
        raise UsageError(f"--engine: expected `embedded` or a URL like http://127.0.0.1:8000, got {url!r}")
    if key and parts.username is not None:
        raise UsageError(
            f"--engine: expected a URL without user name and password where {KEY_VARIABLE} is set: one excludes the other"
        )


def _renderer(path: Path, url: str, info: EngineInfo) -> Renderer:
    if not path.is_dir():
        raise UsageError(
            f"the engine at {url} serves {info.model!r} from {info.model_path!r}, and {str(path)!r} is no directory here: "
            "name the model's directory (its tokenizer is needed) with --model"
        )
    return load_renderer(path)
