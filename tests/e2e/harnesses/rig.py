"""A real harness in one real session, the policy being a script; what was seen is held against the policy's own log."""

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from tokenizers import Tokenizer

from polar import harnesses, sandboxes
from polar.engines.renderers import load_renderer
from polar.engines.script import Fault
from polar.engines.scripted import Logged, Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import Gateway, gateway
from polar.gateway.sessions import LiveSession
from polar.harnesses.protocol import Turn
from polar.paths import cache_dir
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Silent
from polar.rollout.probe import FINAL, Script, answer_of, differences, play
from polar.rollout.sessions import Attempt, Places, Session, Slots
from polar.sandboxes import SandboxKind, supervisor
from polar.sandboxes.protocol import SandboxFactory
from polar.specs import HarnessSpec, SessionResult, Task, Timeouts, Trajectory
from polar.store.captured import read_captured
from polar.store.ledger import Ledger
from polar.tokens.records import Call
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured, build

SUPERVISOR = supervisor.__file__


@dataclass(frozen=True)
class Seen:
    """A session that has ended.

    Attributes:
        status: exit status of the harness; negative is the signal that ended it.
        out, err: what the harness printed.
        workspace: a copy of the files that it left.
        calls: in order of arrival.
        log: what the policy was asked and sampled, in order of arrival.
        unknown_routes: how often each route that nobody serves was asked for.
    """

    result: SessionResult
    status: int
    out: str
    err: str
    workspace: Path
    captured: Captured
    calls: tuple[Call, ...]
    log: tuple[Logged, ...]
    trajectory: Trajectory
    unknown_routes: dict[str, int]


@dataclass(frozen=True)
class Stand:
    """What `during` works with, while the harness runs."""

    engine: ScriptedEngine
    gateway: Gateway

    @property
    def session(self) -> LiveSession:
        """The harness's session; there is none before the first call."""
        (session,) = self.gateway.sessions
        return session

    def harness(self) -> psutil.Process:
        """The harness's own process; see `harness_process`."""
        return harness_process()

    async def asked(self, generations: int) -> None:
        """Return when the policy was asked so often."""
        while len(self.engine.log) < generations:
            await asyncio.sleep(0.01)

    async def answered(self, calls: int) -> None:
        """Return when so many answers have gone out to their last byte."""
        while sum(call.delivered for session in self.gateway.sessions for call in session.calls.values()) < calls:
            await asyncio.sleep(0.01)


def harness_process() -> psutil.Process:
    """The one harness's own process, or bubblewrap around it. Waits for nothing: call it once the harness has asked."""
    (running,) = [child for child in psutil.Process().children() if SUPERVISOR in child.cmdline()]
    return running.children()[0]


During = Callable[[Stand], Coroutine[None, None, None]]


async def run_harness(
    name: str,
    script: Script,
    tmp_path: Path,
    model_dir: Path,
    *,
    instruction: str = "Write the files; @mentions and <|im_start|> are only text.",
    options: Mapping[str, str] = {},
    files: Mapping[str, str] = {},
    sandbox: SandboxKind = "process",
    max_model_len: int = 200_000,
    timeout: float = 120,
    during: During | None = None,
) -> Seen:
    """One session of harness `name`, installed if it is not; returns when it has ended, however it ended.

    Args:
        files: the workspace that it starts with, path → text.
        timeout: seconds for the harness.
        during: runs next to the harness, and must be done when the harness is.
    """
    harness = harnesses.get(name)
    task = Task("t", instruction, dict(files), HarnessSpec(name, dict(options)), timeouts=Timeouts(run=timeout))
    harness.check(task.harness)
    if not harness.installed(cache_dir()):
        await asyncio.to_thread(harness.install, cache_dir(), lambda _: None)
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="run-", dir=tmp_path)))
    engine = ScriptedEngine(_tokenizer(model_dir), script, model_dir=model_dir, max_model_len=max_model_len)
    async with _serving(engine, model_dir, folder) as serving:
        session = live(task, folder, serving, sandboxes.choose(sandbox, tmp_path / "sandboxes"))
        result = await beside(session, during(Stand(engine, serving)) if during else None)
        return seen(result, folder, serving, engine.log)


def turns(*replies: Turn, final: str = FINAL) -> Script:
    """A policy that plays `replies` one by one, by the assistant turns that the prompt holds, and then says `final`."""
    return play(replies, final)


def by_prompt(scripts: Mapping[str, Script], otherwise: Script) -> Script:
    """A policy that is another one where the prompt holds a text: the first that it holds decides."""

    def reply(call: ScriptedCall) -> Scripted:
        return next((script for text, script in scripts.items() if text in call.prompt_text), otherwise)(call)

    return reply


def faulty(script: Script, *, at: int = 0, fault: Fault = "http_500") -> Script:
    """`script`, but its generation number `at` (from 0, in order of arrival) goes wrong, once."""
    asked = 0

    def reply(call: ScriptedCall) -> Scripted:
        nonlocal asked
        asked += 1
        planned = script(call)
        return planned if asked != at + 1 else Scripted(planned.text, tokens_per_chunk=planned.tokens_per_chunk, fault=fault)

    return reply


def branches(seen: Seen) -> list[tuple[str, int, str]]:
    """The chains of the token tree, in order of their first calls: kind, number of calls, and why the first one forked.

    The reason is "" at a root. A chain of calls of several kinds has them joined (`agent+compaction`). Auxiliary and
    constrained calls are there; what failed, was aborted, superseded or not delivered is not: no history goes on from it.
    """
    calls = {call.call_id: call for call in seen.calls}
    as_agents = [msgspec.structs.replace(call, kind="agent", constrained=False) for call in seen.calls]
    all_trained = Captured(as_agents, seen.captured.nodes, seen.captured.messages, seen.captured.tools)
    chains = [trace.call_ids for trace in build(all_trained, builder="prefix_merging", status="completed", reward=1.0).traces]
    chains.sort(key=lambda chain: calls[chain[0]].ordinal)
    return [
        ("+".join(dict.fromkeys(calls[each].kind for each in chain)), len(chain), calls[chain[0]].fork_reason) for chain in chains
    ]


# What a probe leaves behind (`polar.harnesses.protocol.Harness.probe`).
FILES = {"hello.txt": "hello\n", "one.txt": "one\n", "two.txt": "two\n"}


def files(seen: Seen) -> dict[str, str]:
    """What the harness left in its workspace: name → text."""
    return {path.name: path.read_text() for path in seen.workspace.iterdir()}


def exact(seen: Seen) -> None:
    """Every prompt, sampled id and log-probability is that of the policy's log; every trained token is trained once."""
    assert not (found := list(differences(seen.captured, seen.log))), "; ".join(found)
    calls = {call.call_id: call for call in seen.calls}
    log = {entry.request_id: entry for entry in seen.log}
    for trace in seen.trajectory.traces:
        mine = [answer_of(calls[call_id], log[call_id]) for call_id in trace.call_ids]
        trained = trace.loss_mask == 1
        assert trace.prompt_ids.tolist() == list(log[trace.call_ids[0]].prompt_ids)
        assert [*trace.prompt_ids, *trace.response_ids] == [*log[trace.call_ids[-1]].prompt_ids, *mine[-1][0]]
        assert trace.response_ids[trained].tolist() == [token for ids, _ in mine for token in ids]
        assert trace.response_logprobs[trained].tolist() == [value for _, logprobs in mine for value in logprobs]
    in_traces = [call_id for trace in seen.trajectory.traces for call_id in trace.call_ids]
    assert len(set(in_traces)) == len(in_traces), "no call is in two traces"
    accounting = seen.trajectory.accounting
    assert accounting.holds
    assert accounting == seen.result.accounting
    if seen.result.reward is not None:
        assert accounting.trained == sum(len(answer_of(calls[call_id], log[call_id])[0]) for call_id in in_traces)


async def live(task: Task, folder: RunFolder, serving: Gateway, factory: SandboxFactory) -> SessionResult:
    """The one session of `task`, from its opening to its result."""
    one = Slots(asyncio.Semaphore(), asyncio.Semaphore(), asyncio.Semaphore())
    async with _ledger(folder, task) as ledger:
        result = await Session(Attempt(task, 0, 0), Places(folder, ledger, serving, factory, Silent())).live(one, lambda: None)
    assert result is not None
    return result


async def beside(work: Coroutine[None, None, SessionResult], during: Coroutine[None, None, None] | None) -> SessionResult:
    """The result of `work`; what `during` raises ends both, and it must be done when `work` is."""
    if during is None:
        return await work
    session, beside = asyncio.create_task(work), asyncio.create_task(during)
    try:
        await asyncio.wait((session, beside), return_when=asyncio.FIRST_COMPLETED)
        if not session.done():
            beside.result()
        result = await session
        await asyncio.wait((beside,), timeout=1)  # it may be between two looks
        assert beside.done(), f"the harness ended while `during` still waited: {result}"
        beside.result()
        return result
    finally:
        session.cancel()
        beside.cancel()
        await asyncio.gather(session, beside, return_exceptions=True)


def seen(result: SessionResult, folder: RunFolder, serving: Gateway, log: Sequence[Logged]) -> Seen:
    """What is left of the gateway's one session; `log` is the policy's own."""
    (session,) = serving.sessions
    captured = read_captured(folder.capture, result.session_id)
    place = folder.session(result.session_id)
    status = next((int(each.message.split()[-1]) for each in result.findings if each.code == "harness_exit"), 0)
    return Seen(
        result=result,
        status=status,
        out=_text(place / "harness.out"),
        err=_text(place / "harness.err"),
        workspace=place / "workspace",
        captured=captured,
        calls=tuple(sorted(captured.calls, key=lambda call: call.ordinal)),
        log=tuple(log),
        trajectory=build(captured, builder="prefix_merging", status=result.status, reward=result.reward),
        unknown_routes=dict(session.unknown_routes),
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@asynccontextmanager
async def _serving(engine: ScriptedEngine, model_dir: Path, folder: RunFolder) -> AsyncIterator[Gateway]:
    async with scripted_server(engine) as url:
        client = VllmEngine(url)
        try:
            async with gateway(await served(client, _renderer(model_dir)), folder.capture) as serving:
                yield serving
        finally:
            await client.close()


@asynccontextmanager
async def _ledger(folder: RunFolder, task: Task) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(folder.ledger)
    try:
        await ledger.add_task(task, 0)
        yield ledger
    finally:
        await ledger.close()


@functools.cache
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@functools.cache
def _renderer(model_dir: Path) -> Renderer:
    return load_renderer(model_dir)
