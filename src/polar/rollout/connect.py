"""Connects an engine, and finds the renderer of its model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

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

    Args:
        model: for a URL, the directory of the model's tokenizer; "" takes the one that the engine names.
        log: file for the embedded engine's output.
        note: gets a line about what takes a while.

    Raises:
        UsageError: not an engine, or no tokenizer can be found for its model.
        EngineError: it does not start, or does not answer.
    """
    async with AsyncExitStack() as stack:
        process: EngineProcess | None = None
        url = engine
        if engine == EMBEDDED:
            note(f"starting the embedded engine with {model or 'smollm2'} (log: {log})")
            process = await stack.enter_async_context(embedded_engine(model or "smollm2", log=log))
            url, model = process.url, str(process.model_dir)
        elif urlsplit(engine).scheme not in ("http", "https"):
            raise UsageError(f"--engine: expected `embedded` or a URL like http://127.0.0.1:8000, got {engine!r}")
        client = VllmEngine(url)
        stack.push_async_callback(client.close)
        info = await client.info()
        path = Path(model or info.model_path)
        renderer = await asyncio.to_thread(_renderer, path, url, info)
        note(f"engine ready: {info.model}, context {info.max_model_len} tokens")
        yield Connected(client, renderer, info.model, path, process)


def _renderer(path: Path, url: str, info: EngineInfo) -> Renderer:
    if not path.is_dir():
        raise UsageError(
            f"the engine at {url} serves {info.model!r} from {info.model_path!r}, and {str(path)!r} is no directory here: "
            "name the model's directory (its tokenizer is needed) with --model"
        )
    return load_renderer(path)
