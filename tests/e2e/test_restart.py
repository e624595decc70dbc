"""`kill -9` of the gateway under a running harness: what was acted on is in the store, and the harness goes on."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from polar import harnesses
from polar.engines.scripted import ScriptedEngine, scripted_server
from polar.harnesses.protocol import Endpoint, Turn
from polar.paths import cache_dir
from polar.rollout.probe import Script, play
from polar.sandboxes.process import ProcessSandboxes
from polar.specs import HarnessSpec, Task
from polar.store.captured import read_captured
from polar.tokens.records import Call
from polar.trajectory.builders import build

CONTROL = {"authorization": "Bearer control"}


@dataclass(frozen=True)
class Wire:
    """A harness and its dialect: patterns of the event that completes a tool call, and of the start of the stream's end."""

    harness: str
    tool: str
    argument: str
    call: bytes
    end: bytes

    def script(self) -> Script:
        """Two commands, one after the other, and an answer."""
        said = {"one": "", "two": "Second.\n"}
        return play(
            [Turn(text, ((self.tool, {self.argument: f"echo {word} >> a.txt"}),)) for word, text in said.items()], "Done."
        )


PI = Wire("pi", "bash", "command", rb'"tool_calls":\[', rb'data: [^\n]*"finish_reason":"tool_calls"')
CODEX = Wire(
    *("codex", "exec_command", "cmd"),
    rb'"type":"response\.output_item\.done"[^\n]*"type":"function_call"',
    rb"event: response\.completed\n",
)
CLAUDE_CODE = Wire("claude_code", "Bash", "command", rb'"type":"tool_use"', rb"event: message_delta\n")


class CuttingProxy:
    """Stands between harness and gateway. After the `cut_at`-th tool call has passed it acts, and breaks the connection there."""

    def __init__(self, upstream: int, wire: Wire, cut_at: int, act: Callable[[], None]) -> None:
        self.upstream, self.wire, self.cut_at, self.act = upstream, wire, cut_at, act
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
                self.seen += len(re.findall(self.wire.call, data))
                if self.seen >= self.cut_at and (end := re.search(self.wire.end, data)):
                    self.cut_at = sys.maxsize
                    writer.write(data[: end.start()])
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


async def run_harness(name: str, base_url: str, key: str, place: Path) -> int:
    """The real harness in a process sandbox, pointed at `base_url`; its exit status."""
    sandbox = await ProcessSandboxes(place).create(name)
    task = Task(id="t", instruction="Write a.txt.", harness=HarnessSpec(name))
    endpoint = Endpoint(base_url, key, "policy", 32_768)
    launch = harnesses.get(name).launch(task, endpoint, cache=cache_dir(), workspace=sandbox.workspace, home=sandbox.home)
    await sandbox.put(launch.home_files, into=sandbox.home)
    done = await sandbox.run(launch.command, stdout=place / "out", stderr=place / "err", timeout=90)
    await sandbox.get_tree(place / "workspace")
    await sandbox.close()
    return done.status


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(PI, id="pi"),
        pytest.param(CODEX, id="codex", marks=pytest.mark.heavy),
        pytest.param(CLAUDE_CODE, id="claude_code", marks=pytest.mark.heavy),
    ],
)
async def test_a_gateway_killed_after_a_tool_call_loses_nothing_and_its_harness_goes_on(
    wire: Wire, smollm2_dir: Path, tmp_path: Path
) -> None:
    engine = ScriptedEngine(Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")), wire.script(), model_dir=smollm2_dir)
    port, out, killed = free_port(), tmp_path / "gateway", asyncio.Event()
    in_store: list[Call] = []
    if not harnesses.get(wire.harness).installed(cache_dir()):
        await asyncio.to_thread(harnesses.get(wire.harness).install, cache_dir(), lambda line: None)
    async with scripted_server(engine) as url:
        first: AbstractAsyncContextManager[asyncio.subprocess.Process] = gateway_process(url, port, out)
        async with first as gateway, aiohttp.ClientSession() as http:
            async with http.post(f"http://127.0.0.1:{port}/sessions", headers=CONTROL) as reply:
                session = await reply.json()

            def kill() -> None:
                os.kill(gateway.pid, signal.SIGKILL)
                in_store.extend(read_captured(out / "capture.db", session["session_id"]).calls)
                killed.set()

            proxy = await asyncio.start_server(CuttingProxy(port, wire, 2, kill), "127.0.0.1", 0)
            through = proxy.sockets[0].getsockname()[1]
            harness = asyncio.create_task(
                run_harness(wire.harness, f"http://127.0.0.1:{through}/s/{session['key']}", session["key"], tmp_path / "sandbox")
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
    assert (tmp_path / "sandbox" / "workspace" / "a.txt").read_text() == "one\ntwo\n"
