"""The life of one session: prepare a sandbox, run the harness in it, score what it left."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from polar import evaluators, harnesses
from polar.errors import CaptureError, InfrastructureError, SandboxError, StoreError
from polar.evaluators.protocol import Finished
from polar.gateway.gateway import Gateway
from polar.gateway.sessions import LiveSession, Opened
from polar.harnesses.protocol import Endpoint, Launch
from polar.paths import cache_dir
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Observer
from polar.sandboxes.protocol import Exit, Sandbox, SandboxFactory
from polar.specs import Accounting, Finding, SessionResult, SessionStatus, Stage, Task, Timing
from polar.store.captured import read_captured
from polar.store.ledger import Ledger
from polar.tokens.records import Call
from polar.trajectory.builders import RESULT_BUILDER, build

LAST_WORDS = 400  # characters of a crashed harness's stderr that its error quotes
AGENTS_OWN = ("context_length_exceeded",)  # refusals that are part of the task, not a fault of the machine


@dataclass(frozen=True)
class Attempt:
    """One attempt at one sample of a task."""

    task: Task
    sample: int
    number: int


@dataclass(frozen=True)
class Places:
    """What every session of a run uses."""

    folder: RunFolder
    ledger: Ledger
    gateway: Gateway
    sandboxes: SandboxFactory
    observer: Observer


@dataclass(frozen=True)
class Slots:
    """The pools of a node: how many sessions may be in each stage at a time."""

    prepare: asyncio.Semaphore
    run: asyncio.Semaphore
    score: asyncio.Semaphore


@dataclass(frozen=True)
class Ending:
    """How a session ended. `kind` is the error's machine-readable name."""

    status: SessionStatus
    reward: float | None = None
    error: str = ""
    kind: str = ""


@dataclass
class _Clock:
    """Seconds spent in each stage."""

    stage: Stage = "queued"
    since: float = field(default_factory=time.monotonic)
    spent: dict[str, float] = field(default_factory=dict)

    def enter(self, stage: Stage) -> None:
        now = time.monotonic()
        self.spent[self.stage] = self.spent.get(self.stage, 0.0) + now - self.since
        self.stage, self.since = stage, now

    def timing(self) -> Timing:
        return Timing(**{stage: self.spent.get(stage, 0.0) for stage in Timing.__struct_fields__})


class Session:
    """One attempt on its way through the stages; everything that it does is on disk as it happens."""

    def __init__(self, attempt: Attempt, places: Places) -> None:
        self._attempt = attempt
        self._task = attempt.task
        self._places = places
        self._clock = _Clock()
        self._opened: Opened | None = None
        self._sandbox: Sandbox | None = None
        self._launch: Launch | None = None
        self._exit: Exit | None = None
        self._findings: list[Finding] = []
        self._past_running = False

    async def live(self, slots: Slots, ran: Callable[[], None]) -> SessionResult | None:
        """All stages; `ran` is called once the run slot is free again. None where it was cancelled before it began.

        Raises:
            StoreError: results cannot be recorded; the run must stop.
        """
        try:
            ending = await self._stages(slots, ran)
        except asyncio.CancelledError:
            await self._conclude(Ending("cancelled", error="the run was stopped", kind="cancelled"))
            raise
        except StoreError:
            raise
        except (InfrastructureError, CaptureError) as error:
            ending = Ending("failed", error=str(error), kind=type(error).__name__)
        finally:
            self._leave_run(ran)
            if self._sandbox is not None:
                await self._sandbox.close()
        return await self._conclude(ending)

    async def _stages(self, slots: Slots, ran: Callable[[], None]) -> Ending:
        async with slots.prepare:
            await self._open()
            await self._enter("preparing")
            await self._prepare()
        await self._enter("ready")
        async with slots.run:
            await self._enter("running")
            self._exit = await self._run()
        self._leave_run(ran)
        session = await self._freeze()
        fault = self._fault(session)
        if fault is not None:
            return fault
        async with slots.score:
            await self._enter("scoring")
            return await self._score(session)

    def _leave_run(self, ran: Callable[[], None]) -> None:
        """Tell once that this session is past running, however it got there."""
        if not self._past_running:
            self._past_running = True
            ran()

    async def _open(self) -> None:
        profile = harnesses.get(self._task.harness.name).profile
        self._opened = await self._places.gateway.sessions.open(
            task_id=self._task.id,
            profile=profile,
            sampling=self._task.sampling,
            reasoning_history=self._task.reasoning_history,
            metadata={"sample": str(self._attempt.sample)},
        )
        await self._places.ledger.add_session(self._session_id, self._task.id, self._attempt.sample, self._attempt.number)

    async def _enter(self, stage: Stage) -> None:
        self._clock.enter(stage)
        await self._places.ledger.set_stage(self._session_id, stage)
        self._places.observer.stage(self._session_id, self._task.id, self._attempt.sample, stage)

    @property
    def _session_id(self) -> str:
        assert self._opened is not None
        return self._opened.session_id

    @property
    def _logs(self) -> Path:
        return self._places.folder.session(self._session_id)

    async def _prepare(self) -> None:
        """Sandbox, workspace and harness configuration, within the stage's budget.

        Raises:
            SandboxError: also when the time is up.
        """
        try:
            async with asyncio.timeout(self._task.timeouts.prepare):
                await self._fill_sandbox()
        except TimeoutError:
            raise SandboxError(f"the sandbox was not ready after {self._task.timeouts.prepare:g} s") from None

    async def _fill_sandbox(self) -> None:
        task = self._task
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {self._logs}: {error.strerror}") from None
        self._sandbox = await self._places.sandboxes.create(self._session_id)
        if isinstance(task.workspace, str):
            await self._sandbox.put_tree(Path(task.workspace), into=self._sandbox.workspace)
        else:
            await self._sandbox.put(task.workspace, into=self._sandbox.workspace)
        self._launch = harnesses.get(task.harness.name).launch(
            task, self._endpoint(), cache=cache_dir(), workspace=self._sandbox.workspace, home=self._sandbox.home
        )
        await self._sandbox.put(self._launch.home_files, into=self._sandbox.home)

    def _endpoint(self) -> Endpoint:
        assert self._opened is not None
        gateway = self._places.gateway
        return Endpoint(gateway.base_url(self._opened.key), self._opened.key, gateway.info.model, gateway.info.max_model_len)

    async def _run(self) -> Exit:
        assert self._sandbox is not None
        assert self._launch is not None
        out, err = self._logs / "harness.out", self._logs / "harness.err"
        ended = await self._sandbox.run(self._launch.command, stdout=out, stderr=err, timeout=self._task.timeouts.run)
        await asyncio.to_thread(_redact, (out, err), self._endpoint().key)
        return ended

    async def _freeze(self) -> LiveSession:
        """The agent has ended: close its session, and take its files."""
        assert self._sandbox is not None
        session = await self._places.gateway.sessions.freeze(self._session_id)
        await self._sandbox.get_tree(self._logs / "workspace")
        await self._sandbox.close()
        return session

    def _fault(self, session: LiveSession) -> Ending | None:
        """Why the session cannot be scored, if so: not the agent failed, but what it ran on."""
        assert self._exit is not None
        calls = sorted(session.calls.values(), key=lambda call: call.ordinal)
        answered = any(call.status == "ok" for call in calls)
        self._findings += session.findings()
        if self._exit.timed_out and answered:
            return None
        if session.refused_last:
            return Ending("failed", error=f"its last request was refused: {session.refused}", kind="request_refused")
        if calls and calls[-1].status == "failed" and (not answered or calls[-1].findings[0].code not in AGENTS_OWN):
            finding = calls[-1].findings[0]
            return Ending("failed", error=finding.message, kind=finding.code)
        if not answered:
            return Ending("failed", error=self._silence(), kind="no_model_calls")
        if self._exit.status < 0:
            error = f"the harness died of signal {-self._exit.status}{self._last_words()}"
            return Ending("failed", error=error, kind="harness_crash")
        return None

    def _silence(self) -> str:
        assert self._exit is not None
        how = "ran out of time" if self._exit.timed_out else f"ended with status {self._exit.status}"
        return f"{self._task.harness.name} {how} without a model call{self._last_words()}"

    def _last_words(self) -> str:
        try:
            text = (self._logs / "harness.err").read_text(errors="replace").strip()[-LAST_WORDS:]
        except OSError:
            text = ""
        return f"; its last words: {text}" if text else f"; see {self._logs}"

    async def _score(self, session: LiveSession) -> Ending:
        assert self._exit is not None
        status: SessionStatus = "timed_out" if self._exit.timed_out else "completed"
        finished = Finished(
            session_id=self._session_id,
            status=status,
            exit_status=self._exit.status,
            workspace=self._logs / "workspace",
            answer=answer(session.calls.values()),
            logs=self._logs,
        )
        evaluator = evaluators.get(self._task.evaluator.kind)
        score = await evaluator.score(self._task, finished, self._places.sandboxes)
        if score.note:
            self._findings.append(Finding("evaluator", score.note))
        return Ending(status, score.reward)

    async def _conclude(self, ending: Ending) -> SessionResult | None:
        """Close the session, account for every token, and record the result."""
        if self._opened is None:
            return None
        places = self._places
        await places.gateway.sessions.freeze(self._session_id)
        self._clock.enter("done")
        result = await asyncio.to_thread(
            result_from_store, places.folder.capture, self._session_id, self._attempt, ending, self._clock.timing(), self._noted()
        )
        result = msgspec.structs.replace(result, sandbox=places.sandboxes.kind)
        await places.ledger.finish(result)
        places.gateway.sessions.forget(self._session_id)
        places.observer.finished(result)
        return result

    def _noted(self) -> tuple[Finding, ...]:
        if self._exit is not None and self._exit.status != 0:
            self._findings.append(Finding("harness_exit", f"{self._task.harness.name} ended with status {self._exit.status}"))
        return tuple(self._findings)


def result_from_store(
    capture: Path, session_id: str, attempt: Attempt, ending: Ending, timing: Timing, findings: tuple[Finding, ...] = ()
) -> SessionResult:
    """The result of a frozen session, its tokens counted from what is stored. Tokens that cannot be trusted cost the reward."""
    captured = read_captured(capture, session_id)
    try:
        trajectory = build(captured, builder=RESULT_BUILDER, status=ending.status, reward=ending.reward, findings=findings)
        traces, accounting, findings = len(trajectory.traces), trajectory.accounting, trajectory.findings
    except CaptureError as error:
        ending = Ending("failed", error=str(error), kind=error.code)
        sampled = sum(call.sampled for call in captured.calls)
        traces, accounting = 0, Accounting(sampled, 0, {"untrusted": sampled})
    return SessionResult(
        session_id=session_id,
        task_id=attempt.task.id,
        sample=attempt.sample,
        status=ending.status,
        reward=ending.reward,
        calls=len(captured.calls),
        traces=traces,
        accounting=accounting,
        timing=timing,
        findings=findings,
        error=ending.error,
        error_kind=ending.kind,
        metadata=attempt.task.metadata,
    )


def answer(calls: Iterable[Call]) -> str:
    """The last text that reached the agent.

    Side calls (titles, summaries) carry other tools than the agent's own, or none: the tools of most calls are the agent's.
    """
    answered = [call for call in sorted(calls, key=lambda call: call.ordinal) if call.status == "ok" and call.delivered]
    tools = Counter(call.tools_hash for call in answered).most_common(1)
    own = [call for call in answered if call.tools_hash == tools[0][0]] if tools else []
    texts = [choice.message.text for call in own for choice in call.choices if choice.message.text]
    return texts[-1] if texts else ""


def _redact(files: Iterable[Path], key: str) -> None:
    """Take a model key out of a harness's output (D20)."""
    for file in files:
        if file.is_file() and key.encode() in (text := file.read_bytes()):
            file.write_bytes(text.replace(key.encode(), b"(model key)"))
