"""The life of one call: prompt, generation, checks, commit, reply.

A run outlives the connection that asked for it: it ends by itself, or is told to stop. Nothing that a harness can act on
exists before the commit, because the reply is made from the committed record.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polar.chat import ChatRequest, Delta
from polar.engines.protocol import Engine, EngineInfo, ResolvedSampling
from polar.errors import (
    CaptureError,
    ContextLengthExceeded,
    EngineRefusal,
    InvalidRequest,
    PolarError,
    RequestError,
    StoreError,
)
from polar.gateway.feed import Feed
from polar.gateway.generation import Generation
from polar.gateway.kinds import call_kind
from polar.gateway.terms import numbers, resolve, respelled, unserved
from polar.ids import new_call_id
from polar.specs import CallKind, Finding, Int32Array
from polar.store.capture import CaptureStore
from polar.tokens.history import Plan, prompt_hash
from polar.tokens.records import Call, CallStatus, CallTimings, ChoiceRecord, Node, Position

if TYPE_CHECKING:
    from polar.gateway.sessions import LiveSession

log = logging.getLogger(__name__)
ENCODE_ON_LOOP = 8192  # characters; more text is encoded in a thread


@dataclass(frozen=True)
class Backend:
    """What every call of a gateway uses. `capture` is the file that `store` writes."""

    engine: Engine
    info: EngineInfo
    store: CaptureStore
    capture: Path


@dataclass(frozen=True)
class Arrival:
    """A request as it came in.

    Attributes:
        digests: addresses of its messages, then of its tools; `unseen` has what of these the session's file lacks.
    """

    request: ChatRequest
    digests: tuple[str, ...]
    unseen: dict[str, bytes]
    dialect: str
    request_hash: str
    headers: dict[str, str]
    received: float


class CallRun:
    """One call from its arrival to its commit.

    Attributes:
        feed: text and reasoning for the connection that streams.
        call: the record, once `done`; its reply may go out only if `error` is None.
        error: why there is no reply, once `done`.
        orphaned: its client has gone, and it goes on for a retry to join.
        stopped: it was told to abort.
    """

    def __init__(self, session: "LiveSession", backend: Backend, arrival: Arrival, ordinal: int, replaces: str) -> None:
        self.session = session
        self.call_id = new_call_id(ordinal)
        self.request_hash = arrival.request_hash
        self.feed = Feed()
        self.call: Call | None = None
        self.error: PolarError | None = None
        self.orphaned = False
        self._ordinal = ordinal
        self._backend = backend
        self._arrival = arrival
        self._replaces = replaces
        self._plan: Plan | None = None
        self._kind: CallKind = "agent"
        self._prompt = Position()
        self._prompt_ids: Int32Array = np.empty(0, np.int32)
        self._sampling: ResolvedSampling | None = None
        self._nodes: dict[int, int] = {}
        self._sent = 0.0
        self._committed = 0.0
        self.stopped = False
        renderer, sampling = session.history.renderer, arrival.request.sampling
        self._choices = [Generation(self.call_id, index, renderer, sampling.stop) for index in range(sampling.n)]
        self._task: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.session.runs.add(self)
        self._task = asyncio.create_task(self._live(), name=f"call {self.call_id}")

    @property
    def task(self) -> asyncio.Task[None]:
        """What runs; it never fails, and whoever waits for it must not cancel it."""
        assert self._task is not None
        return self._task

    async def done(self) -> None:
        """Wait for the outcome. Cancelling the waiter does not cancel the run."""
        await asyncio.shield(self.task)

    def stop(self) -> None:
        """Abort the generation on the engine; what was sampled is recorded as `aborted`."""
        if self.stopped or self.feed.ended or all(choice.over for choice in self._choices):
            return
        self.stopped = True
        for choice in self._choices:
            choice.stop()

    def leave(self, grace: float) -> None:
        """The client has gone: go on for `grace` seconds in which a retry may `join`, then stop."""
        self.orphaned = True
        self._grace = asyncio.get_running_loop().call_later(grace, self.stop)

    def join(self) -> None:
        """A retry waits for this run now."""
        self.orphaned = False
        if self._grace is not None:
            self._grace.cancel()

    async def _live(self) -> None:
        try:
            await self._prepare()
            await self._generate()
            await self._settle()
        except EngineRefusal as error:
            await self._fail(self._refused(error))
        except PolarError as error:
            await self._fail(error)
        except Exception as error:  # a bug of ours must fail the call in its dialect, with its traceback in the log
            log.exception("call %s of session %s", self.call_id, self.session.session_id)
            await self._fail(CaptureError("internal", f"{type(error).__name__}: {error}"))
        finally:
            self.join()
            self.session.runs.discard(self)
            self.feed.end()

    async def _prepare(self) -> None:
        session, request = self.session, self._arrival.request
        history = session.history
        plan = self._plan = history.plan(request.messages, request.tools, self._arrival.digests)
        rules = session.stored.profile.kinds
        self._kind = call_kind(rules, request, self._arrival.headers, plan, session.calls, session.threads)
        session.threads.note_asked(self._kind, request.messages, has_tools=bool(request.tools))
        ids = history.render(plan) if plan.size < ENCODE_ON_LOOP else await asyncio.to_thread(history.render, plan)
        self._prompt = history.place(plan, ids, self.call_id)
        self._prompt_ids = history.tree.path(self._prompt)
        room = self._backend.info.max_model_len - len(self._prompt_ids)
        if room < 1:
            raise ContextLengthExceeded(len(self._prompt_ids), self._backend.info.max_model_len)
        constrains = self._backend.info.constrains
        self._sampling = resolve(session.stored.sampling, request, room, history.renderer.stop_ids, constrains=constrains)

    async def _generate(self) -> None:
        """All choices side by side; the first failure ends the others."""
        assert self._sampling is not None
        if self.stopped:
            return
        self._sent = time.time()
        engine, ids, sampling, put = self._backend.engine, self._prompt_ids, self._sampling, self.feed.put
        if len(self._choices) == 1:
            await self._choices[0].run(engine, ids, sampling, put)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(choice.run(engine, ids, sampling, put))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _settle(self) -> None:
        """Check the tokens, commit them, and only then let the reply exist."""
        deltas = [delta for choice in self._choices for delta in choice.read()]
        if self.stopped or any(choice.finish == "abort" and not choice.stop_sequence for choice in self._choices):
            self._hang_whole()
            await self._commit(self._record("aborted"))
            self.error = CaptureError("aborted", "the generation was aborted")
            return
        for choice in self._choices:
            choice.check(len(self._prompt_ids), self.session.history.renderer.stop_ids)
        for choice in self._choices:
            self._hang(choice)
        await self._answer(deltas)

    async def _answer(self, deltas: list[Delta]) -> None:
        call, messages = self._record("ok"), self._arrival.request.messages
        await self._commit(call)
        self.session.history.answered(call, messages)
        self.session.threads.note_answered(call)
        self.feed.put(deltas)

    def _hang_whole(self) -> None:
        """Nodes for those aborted generations of which the engine told all; others are only counted."""
        for choice in self._choices:
            try:
                choice.check(len(self._prompt_ids), self.session.history.renderer.stop_ids)
            except CaptureError:
                continue
            self._hang(choice)

    def _hang(self, choice: Generation) -> None:
        ids, logprobs, versions = choice.kept()
        tree = self.session.history.tree
        self._nodes[choice.choice] = tree.add_sampled(self._prompt, ids, logprobs, versions, self.call_id, choice.choice).node_id

    def _refused(self, error: EngineRefusal) -> PolarError:
        """Asking again helps nobody if it is the harness's schema that the engine refuses."""
        constrained = self._sampling is not None and self._sampling.json_schema is not None
        return InvalidRequest(f"response_format: {error}") if constrained else error

    async def _fail(self, error: PolarError) -> None:
        self.error = error
        code = error.code if isinstance(error, CaptureError | RequestError) else type(error).__name__
        findings = (Finding(code, str(error), self.call_id),)
        try:
            await self._commit(self._record("failed", findings, str(error)))
        except Exception as unstored:  # whatever it is, the run has to end, or nobody could freeze its session
            log.error("call %s failed (%s) and could not be recorded: %s", self.call_id, error, unstored)

    async def _commit(self, call: Call) -> None:
        """Make the call and every node it stands on durable. A session commits one call at a time: what another call of it
        failed to store goes with this one.

        Raises:
            StoreError: nothing was stored; nodes, and the record of a failure, go with the session's next commit.
        """
        session = self.session
        async with session.committing:
            bodies = {digest: body for digest, body in self._arrival.unseen.items() if digest not in session.stored_bodies}
            nodes = session.history.take_unsaved()
            try:
                await self._store(nodes, call, bodies)
            except BaseException:
                session.history.give_back(nodes)
                if call.status != "ok":
                    session.unstored[call.call_id] = (call, bodies)
                raise
            session.stored_bodies.update(bodies)
        self._committed = time.time()
        self.call = call
        session.record(call)

    async def _store(self, nodes: list[Node], call: Call, bodies: dict[str, bytes]) -> None:
        """Write `call`, and with it the failures that could not be written before; alone if they still cannot."""
        store, session_id = self._backend.store, self.session.session_id
        if waiting := self.session.unstored:
            calls = [late for late, _ in waiting.values()]
            known = {digest: body for _, messages in waiting.values() for digest, body in messages.items()}
            try:
                await store.commit(session_id, nodes, [*calls, call], known | bodies)
            except StoreError:
                log.warning("%d failed calls of session %s still cannot be recorded", len(calls), session_id)
            else:
                waiting.clear()
                return
        await store.commit(session_id, nodes, [call], bodies)

    def _record(self, status: CallStatus, findings: tuple[Finding, ...] = (), error: str = "") -> Call:
        arrival, plan = self._arrival, self._plan
        request = arrival.request
        return Call(
            call_id=self.call_id,
            session_id=self.session.session_id,
            ordinal=self._ordinal,
            dialect=arrival.dialect,
            model=request.model,
            engine=self._backend.engine.name,
            kind=self._kind,
            status=status,
            prompt=self._prompt,
            prompt_tokens=len(self._prompt_ids),
            prompt_hash=prompt_hash(self._prompt_ids),
            request_hash=self.request_hash,
            message_hashes=arrival.digests[:-1],
            tools_hash=arrival.digests[-1],
            choices=tuple(self._choice(choice) for choice in self._choices if choice.parsed is not None),
            logprobs_mode=self._backend.engine.logprobs_mode,
            chain=plan.chain if plan else "",
            requested=request.sampling,
            resolved=numbers(self._sampling),
            sampled=sum(len(choice.ids) for choice in self._choices),
            tail=sum(choice.tail for choice in self._choices),
            parent_call=plan.parent_call if plan else "",
            fork_reason=plan.continuation.fork_reason if plan else "",
            replaces=self._replaces,
            derived_from=self._derived_from(),
            constrained=self._sampling is not None and self._sampling.json_schema is not None,
            normalisers=self._normalisers(),
            unserved=unserved(request, self._sampling),
            stream=request.stream,
            headers=arrival.headers,
            extra=request.extra,
            findings=self._odd() + findings,
            timings=self._timings(),
            error=error,
        )

    def _choice(self, choice: Generation) -> ChoiceRecord:
        finish = choice.finish_reason() or "abort"
        return ChoiceRecord(self._nodes.get(choice.choice), finish, choice.message(), choice.stop_sequence)

    def _odd(self) -> tuple[Finding, ...]:
        """What was odd in the replies, once each."""
        names = {name: None for choice in self._choices if choice.parsed for name in choice.parsed.findings}
        return tuple(Finding(name, "in the reply", self.call_id) for name in names)

    def _derived_from(self) -> str:
        if self._plan is None or self._plan.continuation.reply is not None or self._kind == "compaction":
            return ""
        return self.session.threads.origin(self._arrival.request.messages)

    def _normalisers(self) -> tuple[str, ...]:
        """What was read as if it were not there, or came back spelled otherwise than it was sent."""
        request, profile = self._arrival.request, self.session.stored.profile
        names = [*request.normalised, *(name for name in profile.normalisers if name == "trim_text")]
        if request.messages and request.messages[-1].role == "assistant":
            names.append("prefill_closed")  # T18: the message is closed, and a new turn is opened
        return (*names, *respelled(self._plan, request.messages, self.session.calls))

    def _timings(self) -> CallTimings:
        firsts = [choice.first for choice in self._choices if choice.first]
        lasts = [choice.last for choice in self._choices]
        return CallTimings(self._arrival.received, self._sent, min(firsts, default=0.0), max(lasts), self._committed)
