"""The life of one call: prompt, generation, checks, commit, reply.

A run outlives the connection that asked for it: it ends by itself, or is told to stop. Nothing that a harness can act on
exists before the commit, because the reply is made from the committed record.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from polar.chat import ChatRequest, Delta
from polar.engines.protocol import Chatted, Generated
from polar.errors import CaptureError, ContextLengthExceeded, EngineError, EngineRefusal, InvalidRequest, PolarError, RequestError
from polar.gateway.backend import Backend
from polar.gateway.commits import commit
from polar.gateway.drafts import Arrival, Draft
from polar.gateway.feed import Feed
from polar.gateway.generation import Generation
from polar.gateway.kinds import call_kind
from polar.gateway.reading import ChatReader, IdReader, Reader
from polar.gateway.terms import overflow, own_terms, resolve
from polar.ids import new_call_id
from polar.specs import Finding
from polar.tokens.records import Call

if TYPE_CHECKING:
    from polar.gateway.sessions import LiveSession

log = logging.getLogger(__name__)
ABORT_PATIENCE = 5.0  # seconds that an engine has to end an aborted stream


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
        self.stopped = False
        self._store = backend.store
        self._served = backend.served(arrival.request.model)
        self._arrival = arrival
        self._draft = Draft(session, self.call_id, ordinal, arrival, self._served, replaces)
        sampling = arrival.request.sampling
        patience = ABORT_PATIENCE if self._draft.prompt.traced else 0.0  # nobody waits for tokens that are not kept
        self._choices = [Generation(self.call_id, index, self._reader(), sampling.stop, patience) for index in range(sampling.n)]
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

    def _reader(self) -> Reader:
        renderer, tools = self._served.renderer, self._arrival.request.tools
        return IdReader(renderer, tools) if renderer is not None else ChatReader(self._served.decode)

    async def _prepare(self) -> None:
        session, request, draft = self.session, self._arrival.request, self._draft
        plan = draft.prompt.find(self._arrival)
        rules = session.stored.profile.kinds
        draft.kind = call_kind(rules, request, self._arrival.headers, plan, session.calls, session.threads)
        session.threads.note_asked(draft.kind, request.messages, has_tools=bool(request.tools))
        info, renderer = self._served.info, self._served.renderer
        room = info.max_model_len
        if renderer is not None:
            room -= len(ids := await draft.prompt.render(renderer))
            if room < 1:
                raise ContextLengthExceeded(len(ids), info.max_model_len)
        task = session.stored.sampling if self._served.trains else own_terms(request)
        draft.sampling = resolve(task, request, room, renderer.stop_ids if renderer else (), constrains=info.constrains)
        if renderer is not None:
            draft.forget()  # in chat mode the engine has to read them first

    async def _generate(self) -> None:
        """All choices side by side; the first failure ends the others."""
        if self.stopped:
            return
        self._draft.sent = time.time()
        engine, shown = self._served.engine, self._draft.prompt.shown
        runs = [choice.run(engine, self._pieces(choice), self._heard, shown) for choice in self._choices]
        if len(runs) == 1:
            await runs[0]
            return
        try:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(run)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _pieces(self, choice: Generation) -> AsyncGenerator[Generated | Chatted, None]:
        engine, sampling, session_id = self._served.engine, self._draft.sampling, self.session.session_id
        assert sampling is not None
        if self._served.renderer is not None:
            ids = self._draft.prompt.ids
            assert ids is not None
            return engine.generate(choice.request_id, ids, sampling, session_id=session_id)
        return engine.chat(choice.request_id, _asked(self._arrival.request), sampling, session_id=session_id)

    def _heard(self, deltas: list[Delta]) -> None:
        """The engine speaks, so it has all messages."""
        self._draft.forget()
        self.feed.put(deltas)

    async def _settle(self) -> None:
        """Check the tokens, commit them, and only then let the reply exist."""
        deltas = [delta for choice in self._choices for delta in choice.read()]
        if self.stopped or any(choice.finish == "abort" and not choice.stop_sequence for choice in self._choices):
            self._hang_whole()
            await self._commit(self._draft.record("aborted", self._choices))
            self.error = CaptureError("aborted", "the generation was aborted")
            return
        for choice in self._choices:
            self._check(choice)
        for choice in self._choices:
            self._hang(choice)
        await self._answer(deltas)

    async def _answer(self, deltas: list[Delta]) -> None:
        plan, call = self._draft.prompt.plan, self._draft.record("ok", self._choices)
        await self._commit(call)
        assert plan is not None
        self.session.history.answered(call, plan.system)
        self.session.threads.note_answered(call)
        self.feed.put(deltas)

    def _check(self, choice: Generation) -> None:
        """Whether what was sampled can be trusted; of what is never trained, whether it has an end."""
        prompt, renderer = self._draft.prompt, self._served.renderer
        if prompt.traced:
            if prompt.ids is None:
                raise CaptureError("T08", f"{len(choice.ids)} sampled ids came, and never those of their prompt")
            choice.check(len(prompt.ids), renderer.stop_ids if renderer else ())
        elif not choice.over:
            raise EngineError("the engine broke off in mid-reply")

    def _hang_whole(self) -> None:
        """Nodes for those aborted generations of which the engine told all; others are only counted."""
        for choice in self._choices:
            try:
                self._check(choice)
            except (CaptureError, EngineError):
                continue
            self._hang(choice)

    def _hang(self, choice: Generation) -> None:
        if self._draft.prompt.traced:
            ids, logprobs, versions = choice.kept()
            tree, at = self.session.history.tree, self._draft.prompt.place
            node = tree.add_sampled(at, ids, logprobs, versions, self.call_id, choice.choice, choice.kept_extras())
            self._draft.nodes[choice.choice] = node.node_id

    def _refused(self, error: EngineRefusal) -> PolarError:
        """Asking again helps nobody if it is the harness's request that the engine refuses."""
        if self._served.renderer is None:
            return overflow(str(error), self._served.info.max_model_len) or InvalidRequest(str(error))
        return InvalidRequest(f"response_format: {error}") if self._draft.constrained else error

    async def _fail(self, error: PolarError) -> None:
        self.error = error
        code = error.code if isinstance(error, CaptureError | RequestError) else type(error).__name__
        findings = (Finding(code, str(error), self.call_id),)
        try:
            await self._commit(self._draft.record("failed", self._choices, findings, str(error)))
        except Exception as unstored:  # whatever it is, the run has to end, or nobody could freeze its session
            log.error("call %s failed (%s) and could not be recorded: %s", self.call_id, error, unstored)

    async def _commit(self, call: Call) -> None:
        await commit(self._store, self.session, call, self._arrival.unseen)
        self._draft.committed = time.time()
        self.call = call
        self.session.record(call)


def _asked(request: ChatRequest) -> ChatRequest:
    """What a chatting engine is asked. Where stop texts are watched for, its tokens have to come one by one."""
    return replace(request, stream=True) if request.sampling.stop else request
