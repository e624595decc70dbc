"""Polar's gateway in a process of its own, as `polar gateway` runs it; it ends when its standard input is closed.

Without the command line around it, because the stub is no engine that a gateway would accept after a self-test. SIGUSR1 starts
the profiler, and SIGUSR1 again stops it and prints (to standard error) the functions that took most of the process's own time.
"""

import argparse
import asyncio
import cProfile
import pstats
import signal
import sys
import time
from pathlib import Path

from polar.engines.renderers import load_renderer
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import gateway

CHAT_MODE, TOKEN_IN = "chat-mode", "token-in"  # who renders: the engine, or the gateway
PROFILED = 40  # functions that are printed


class Profiler:
    """Of the event loop's thread."""

    def __init__(self) -> None:
        self._profile: cProfile.Profile | None = None

    def toggle(self) -> None:
        if self._profile is None:
            self._profile = cProfile.Profile(time.thread_time)
            self._profile.enable()
        else:
            self._profile.disable()
            pstats.Stats(self._profile, stream=sys.stderr).sort_stats("tottime").print_stats(PROFILED)
            self._profile = None


async def serve(mode: str, engine_url: str, model_dir: Path, capture: Path, key: str) -> None:
    client = VllmEngine(engine_url)
    renderer = load_renderer(model_dir) if mode == TOKEN_IN else None
    async with gateway(await served(client, renderer), capture, control_key=key) as running:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, Profiler().toggle)
        print(running.url.rpartition(":")[2], flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=(CHAT_MODE, TOKEN_IN))
    for name, type_ in (("engine_url", str), ("model_dir", Path), ("capture", Path), ("key", str)):
        parser.add_argument(name, type=type_)
    asyncio.run(serve(**vars(parser.parse_args())))
