"""The engine's process: loads the model, listens, and ends cleanly."""

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.applications import Starlette
from tokenizers import Tokenizer
from transformers import GenerationConfig

from polar.engines.embedded.api import Api
from polar.engines.embedded.generation import Generator
from polar.engines.embedded.weights import load_model
from polar.errors import UsageError

GOODBYE_SECONDS = 3  # for replies on their way when the server is told to stop


class _Server(uvicorn.Server):
    """Says when it is ready, and where; ends generations when told to stop, so that no reply holds it up."""

    def __init__(self, config: uvicorn.Config, generator: Generator, name: str) -> None:
        super().__init__(config)
        self._generator = generator
        self._name = name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        sys.stdout.write(f"polar engine ready on http://{_authority(host, port)} (model {self._name})\n")
        sys.stdout.flush()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, and the process would not exit with 0.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True
        self._generator.close_door()


def run(
    directory: Path,
    *,
    name: str,
    host: str,
    port: int,
    max_model_len: int | None,
    dtype: Literal["float32", "bfloat16"],
    max_num_seqs: int,
    kv_cache_gib: float,
    key: str,
) -> None:
    """Serve the model in `directory`; see `polar.engines.embedded.serve`."""
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise UsageError(f"expected tokenizer.json in the model directory {directory}")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))  # before the model loads: a taken port is known at once
    except OSError as fault:
        raise UsageError(f"cannot listen on {_authority(host, port)}: {fault.strerror}") from fault
    model = load_model(directory, dtype)
    gc.collect()
    gc.freeze()  # the objects of a million imported lines live on: no collection in mid-step, nor the process's end, visits them
    room = int(model.config.get_text_config().max_position_embeddings)
    if max_model_len is not None and max_model_len > room:
        raise UsageError(f"max_model_len {max_model_len} is beyond the model's own {room} tokens")

    async def serve() -> None:
        generator = Generator(
            model,
            eos_ids=_eos_ids(model.generation_config),
            max_model_len=max_model_len or room,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
        )

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await generator.close()

        app = Api(generator, tokenizer, name, directory, key).app(lifespan)
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=GOODBYE_SECONDS)
        await _Server(config, generator, name).serve([listener])

    asyncio.run(serve())


def _authority(host: str, port: int) -> str:
    """Host and port as a URL has them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _eos_ids(config: GenerationConfig | None) -> frozenset[int]:
    eos = None if config is None else config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
