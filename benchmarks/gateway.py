"""What the gateway adds to a model call: latency, turns per second, CPU seconds by stage.

The same load goes once through the gateway (chat messages in, tokens captured and durable) and once straight to the
engine (ids in, ids out). The engine is a stub in its own process that answers at once with 200 tokens, so that what
remains is the cost of the way. Runs alternate, medians are printed. `python benchmarks/gateway.py --help` lists the options.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from polar.engines.embedded.models import resolve
from polar.engines.renderers import load_renderer
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import gateway
from polar.specs import HarnessProfile, SamplingSpec

REPLY_TOKENS = 200
SIZES = {"small": 250, "medium": 25_000, "large": 120_000}
MAX_MODEL_LEN = 1_000_000
FILLER = "The quick brown fox jumps over the lazy dog near the river bank. "


# --- the engine: a stub that knows one answer -------------------------------------------------------------------------


def stub_reply(prompt_tokens: int, request_id: str) -> bytes:
    """An SSE reply of `REPLY_TOKENS` tokens in ten chunks, as vLLM writes it."""
    ids = [*(504 + n % 40 for n in range(REPLY_TOKENS - 1)), 2]
    events: list[dict[str, Any]] = []
    for start in range(0, REPLY_TOKENS, REPLY_TOKENS // 10):
        part = ids[start : start + REPLY_TOKENS // 10]
        last = start + len(part) == REPLY_TOKENS
        entries = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in part]
        versions = [{"version": "default", "start": 0, "end": REPLY_TOKENS}] if last else None
        choice = {"index": 0, "finish_reason": "stop" if last else None, "token_ids": part, "weight_versions": versions}
        events.append({"request_id": request_id, "usage": None, "choices": [{**choice, "logprobs": {"content": entries}}]})
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": REPLY_TOKENS, "total_tokens": prompt_tokens + REPLY_TOKENS}
    events.append({"request_id": request_id, "usage": usage, "choices": []})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


async def serve_stub(model_dir: str) -> None:
    """A raw HTTP server: no framework, so that the engine costs next to nothing."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
                body = await reader.readexactly(length)
                if b"/v1/models" in head[:40]:
                    model = {"id": "policy", "object": "model", "root": model_dir, "max_model_len": MAX_MODEL_LEN}
                    reply, kind = json.dumps({"object": "list", "data": [model]}).encode(), b"application/json"
                else:
                    start = body.find(b'"token_ids"')
                    prompt_tokens = body.count(b",", start, body.index(b"]", start)) + 1
                    reply, kind = stub_reply(prompt_tokens, "generate-tokens-x"), b"text/event-stream"
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(reply)) + reply)

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=64 * 1024 * 1024)
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


# --- the gateway in its own process, with a stop-watch on each stage --------------------------------------------------


class StageClock:
    """CPU seconds of this process's event loop thread and helpers, by stage; installed around the gateway's own functions."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def watch(self, owner: type, name: str, stage: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent[stage] = self.spent.get(stage, 0.0) + time.thread_time() - start

        setattr(owner, name, timed)


def watched() -> StageClock:
    from polar.dialects.openai_chat import OpenAIChat
    from polar.gateway.calls import CallRun
    from polar.store.sqlite import Writer
    from polar.tokens.history import History

    clock = StageClock()
    clock.watch(OpenAIChat, "parse", "parse request")
    clock.watch(History, "plan", "lineage")
    clock.watch(History, "render", "render new ids")
    clock.watch(History, "place", "token tree")
    clock.watch(CallRun, "_take", "read reply")
    clock.watch(CallRun, "_record", "call record")
    clock.watch(OpenAIChat, "reply", "render reply")
    clock.watch(Writer, "_commit", "commit (writer thread)")
    return clock


async def serve_gateway(engine_url: str, sessions: int, capture: Path) -> None:
    """Serve until stdin closes; then print CPU seconds by stage."""
    clock = watched()
    client = VllmEngine(engine_url)
    async with gateway(client, load_renderer(resolve("smollm2")), capture) as running:
        opened = [
            await running.sessions.open(task_id="bench", profile=HarnessProfile(), sampling=SamplingSpec())
            for _ in range(sessions)
        ]
        print(json.dumps([running.base_url(one.key) for one in opened]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await client.close()
    print(json.dumps(clock.spent), flush=True)


# --- load -------------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One run of a load."""

    latencies: list[float]
    wall: float
    cpu: float
    stages: dict[str, float]

    @property
    def calls(self) -> int:
        return len(self.latencies)


async def drive(turns: int, callers: list[Callable[[], Awaitable[None]]]) -> tuple[list[float], float]:
    """Each caller makes `turns` calls after a first one that is not measured; seconds of each, and of all together."""
    await asyncio.gather(*(caller() for caller in callers))
    latencies: list[float] = []

    async def work(caller: Callable[[], Awaitable[None]]) -> None:
        for _ in range(turns):
            start = time.perf_counter()
            await caller()
            latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(work(caller) for caller in callers))
    return latencies, time.perf_counter() - start


def chat_caller(http: aiohttp.ClientSession, url: str, tokens: int) -> Callable[[], Awaitable[None]]:
    """A conversation that grows by a reply and a user message per turn."""
    filler = FILLER * (tokens // 15)
    messages: list[dict[str, Any]] = [{"role": "user", "content": filler or "Hello."}]

    async def call() -> None:
        body = msgspec.json.encode({"model": "policy", "messages": messages})
        async with http.post(f"{url}/v1/chat/completions", data=body) as reply:
            data = msgspec.json.decode(await reply.read())
        messages.append(data["choices"][0]["message"])
        messages.append({"role": "user", "content": "Go on, please."})

    return call


def direct_caller(http: aiohttp.ClientSession, url: str, tokens: int) -> Callable[[], Awaitable[None]]:
    """The same number of ids straight to the engine."""
    ids = np.full(tokens, 504).tolist()
    params = {"max_tokens": 1000, "temperature": 1.0, "logprobs": 0}
    body = msgspec.json.encode(
        {
            "request_id": "x",
            "token_ids": ids,
            "sampling_params": params,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )

    async def call() -> None:
        async with http.post(f"{url}/inference/v1/generate", data=body) as reply:
            await reply.read()

    return call


@contextlib.contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, __file__, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20) as http:
        yield http


async def through_gateway(engine: str, tokens: int, concurrency: int, turns: int) -> Measured:
    with tempfile.TemporaryDirectory() as scratch, process("--gateway", engine, str(concurrency), f"{scratch}/c.db") as child:
        assert child.stdout is not None
        assert child.stdin is not None
        urls = json.loads(await asyncio.to_thread(child.stdout.readline))
        watched_process = psutil.Process(child.pid)
        async with client() as http:
            callers = [chat_caller(http, url, tokens) for url in urls]
            before = sum(watched_process.cpu_times()[:2])
            latencies, wall = await drive(turns, callers)
            cpu = sum(watched_process.cpu_times()[:2]) - before
        child.stdin.close()
        stages = json.loads(await asyncio.to_thread(child.stdout.readline))
    return Measured(latencies, wall, cpu, stages)


async def straight(engine: str, tokens: int, concurrency: int, turns: int) -> Measured:
    async with client() as http:
        latencies, wall = await drive(turns, [direct_caller(http, engine, tokens) for _ in range(concurrency)])
    return Measured(latencies, wall, 0.0, {})


def median_ms(runs: list[Measured]) -> float:
    return 1000 * statistics.median(statistics.median(run.latencies) for run in runs)


async def one_round(engine: str, tokens: int, concurrency: int, turns: int) -> tuple[Measured, Measured]:
    """The load straight to the engine, then through the gateway."""
    return await straight(engine, tokens, concurrency, turns), await through_gateway(engine, tokens, concurrency, turns)


async def compare(engine: str, sizes: list[str], turns: int, rounds: int) -> tuple[Table, Table]:
    """The two tables: what is added to a call, and where the CPU goes."""
    added = Table(
        "calls",
        "at a time",
        "engine ms",
        "gateway ms",
        "added ms",
        "turns/s",
        "CPU ms/call",
        title="The gateway's share of a call",
    )
    stages = Table("calls", title="CPU ms per call by stage (first call of each session included)")
    rows: list[dict[str, float]] = []
    for size in sizes:
        for concurrency in (1, 8):
            runs = [await one_round(engine, SIZES[size], concurrency, turns) for _ in range(rounds)]
            direct, gated = [run for run, _ in runs], [run for _, run in runs]
            per_call = [run.cpu / (run.calls + concurrency) for run in gated]
            added.add_row(
                f"{size} ({SIZES[size]:,} ids)",
                str(concurrency),
                f"{median_ms(direct):.2f}",
                f"{median_ms(gated):.2f}",
                f"{median_ms(gated) - median_ms(direct):.2f}",
                f"{statistics.median(run.calls / run.wall for run in gated):.0f}",
                f"{1000 * statistics.median(per_call):.2f}",
            )
            if concurrency == 1:
                rows.append(
                    {name: 1000 * gated[0].stages[name] / (gated[0].calls + 1) for name in sorted(gated[0].stages)}
                    | {"whole process": 1000 * per_call[0]}
                )
    for name in rows[0]:
        stages.add_column(name, justify="right")
    for size, row in zip(sizes, rows, strict=True):
        stages.add_row(size, *(f"{row.get(name, 0.0):.2f}" for name in rows[0]))
    return added, stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--turns", type=int, default=30, help="measured calls per session")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each side")
    parser.add_argument("--stub", help=argparse.SUPPRESS)
    parser.add_argument("--gateway", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stub:
        asyncio.run(serve_stub(args.stub))
    elif args.gateway:
        asyncio.run(serve_gateway(args.gateway[0], int(args.gateway[1]), Path(args.gateway[2])))
    else:
        with process("--stub", str(resolve("smollm2"))) as stub:
            assert stub.stdout is not None
            url = f"http://127.0.0.1:{stub.stdout.readline().split()[1]}"
            console = Console(width=160)
            for table in asyncio.run(compare(url, args.sizes, args.turns, args.rounds)):
                console.print(table)
            console.print(
                f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {args.rounds} rounds of {args.turns} turns, medians"
            )


if __name__ == "__main__":
    main()
