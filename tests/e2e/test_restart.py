"""`kill -9` of the gateway under a running harness: what was acted on is in the store, and the harness goes on."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

from polar import harnesses
from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.harnesses.protocol import Endpoint
from polar.paths import cache_dir
from polar.sandboxes.process import ProcessSandboxes
from polar.specs import HarnessSpec, Task
from polar.store.captured import read_captured
from polar.tokens.records import Call
from polar.trajectory.builders import build
from tests.e2e.test_harnesses import calls

CONTROL = {"authorization": "Bearer control"}


def three_turns(call: ScriptedCall) -> Scripted:
    turns = [
        calls(("bash", {"command": "echo one >> a.txt"})),
        calls(("bash", {"command": "echo two >> a.txt"}), before="Second.\n"),
    ]
    return turns[call.turn] if call.turn < len(turns) else Scripted("Done.")


class CuttingProxy:
    """Stands between harness and gateway. After the `cut_at`-th tool call has passed it acts, and breaks the connection there."""

    def __init__(self, upstream: int, cut_at: int, act: Callable[[], None]) -> None:
        self.upstream, self.cut_at, self.act = upstream, cut_at, act
        self.seen = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except ConnectionError:
            writer.close()
            return
        there = asyncio.create_task(self._pump(reader, up_writer))
        await self._replies(up_reader, writer)
        there.cancel()
        for side in (writer, up_writer):
            side.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.seen += data.count(b'"tool_calls":[')
                if self.seen >= self.cut_at and b'"finish_reason":"tool_calls"' in data:
                    self.cut_at = sys.maxsize
                    writer.write(data[: data.index(b'"finish_reason":"tool_calls"')].rpartition(b"\n\n")[0] + b"\n\n")
                    await writer.drain()
                    self.act()
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return


@asynccontextmanager
async def gateway_process(engine: str, port: int, out: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`polar gateway` as its users start it."""
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("polar")), "gateway", "--engine", engine, "--port", str(port), "--out", str(out)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "POLAR_CONTROL_KEY": "control"},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"polar gateway ready" not in (line := await process.stdout.readline()):
            assert line, "the gateway ended before it was ready"
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def run_pi(base_url: str, key: str, place: Path) -> int:
    """The real Pi in a process sandbox, pointed at `base_url`; its exit status."""
    sandbox = await ProcessSandboxes(place).create("pi")
    pi = harnesses.get("pi")
    task = Task(id="t", instruction="Write a.txt.", harness=HarnessSpec("pi"))
    endpoint = Endpoint(base_url, key, "policy", 32_768)
    launch = pi.launch(task, endpoint, cache=cache_dir(), workspace=sandbox.workspace, home=sandbox.home)
    await sandbox.put(launch.home_files, into=sandbox.home)
    done = await sandbox.run(launch.command, stdout=place / "out", stderr=place / "err", timeout=90)
    await sandbox.get_tree(place / "workspace")
    await sandbox.close()
    return done.status


async def test_a_gateway_killed_after_a_tool_call_loses_nothing_and_its_harness_goes_on(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    engine = ScriptedEngine(Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")), three_turns, model_dir=smollm2_dir)
    port, out, killed = free_port(), tmp_path / "gateway", asyncio.Event()
    in_store: list[Call] = []
    if not harnesses.get("pi").installed(cache_dir()):
        await asyncio.to_thread(harnesses.get("pi").install, cache_dir(), lambda line: None)
    async with scripted_server(engine) as url:
        first: AbstractAsyncContextManager[asyncio.subprocess.Process] = gateway_process(url, port, out)
        async with first as gateway, aiohttp.ClientSession() as http:
            async with http.post(f"http://127.0.0.1:{port}/sessions", headers=CONTROL) as reply:
                session = await reply.json()

            def kill() -> None:
                os.kill(gateway.pid, signal.SIGKILL)
                in_store.extend(read_captured(out / "capture.db", session["session_id"]).calls)
                killed.set()

            proxy = await asyncio.start_server(CuttingProxy(port, 2, kill), "127.0.0.1", 0)
            through = proxy.sockets[0].getsockname()[1]
            harness = asyncio.create_task(
                run_pi(f"http://127.0.0.1:{through}/s/{session['key']}", session["key"], tmp_path / "pi")
            )
            async with asyncio.timeout(60):
                await killed.wait()
        assert [(call.status, call.choices[0].finish_reason) for call in in_store] == [("ok", "tool_calls")] * 2
        async with gateway_process(url, port, out), aiohttp.ClientSession() as http:
            assert await harness == 0
            path = f"http://127.0.0.1:{port}/sessions/{session['session_id']}"
            async with http.post(f"{path}/freeze", headers=CONTROL) as reply:
                assert reply.status == 200
        proxy.close()
    captured = read_captured(out / "capture.db", session["session_id"])
    assert [call.call_id for call in captured.calls][:2] == [call.call_id for call in in_store]
    trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
    assert trajectory.accounting.sampled == sum(len(entry.ids) for entry in engine.log)
    last = engine.log[-1]
    assert any([*trace.prompt_ids, *trace.response_ids] == [*last.prompt_ids, *last.ids] for trace in trajectory.traces)
    assert captured.calls[-1].choices[0].message.text == "Done."
    assert (tmp_path / "pi" / "workspace" / "a.txt").read_text() == "one\ntwo\n"
