"""The life of one call: prompt, generation, checks, commit, reply.

A run outlives the connection that asked for it: it ends by itself, or is told to stop. Nothing that a harness can act on
exists before the commit, because the reply is made from the committed record.
"""

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import xxhash

from polar.chat import ChatRequest, Choice, FinishReason, Message, Reply, TextPart, ToolCall, Usage
from polar.engines.protocol import Engine, EngineInfo, Generated, ResolvedSampling
from polar.errors import CaptureError, ContextLengthExceeded, EngineError, PolarError, RequestError, StoreError
from polar.gateway.feed import Feed
from polar.ids import new_call_id, tool_call_id
from polar.specs import Finding, Int32Array, SamplingSpec, VersionSpan
from polar.store.capture import CaptureStore
from polar.tokens.detectors import check_counts, check_logprobs, check_stop, check_versions
from polar.tokens.history import Plan, prompt_hash
from polar.tokens.lineage import tools_root
from polar.tokens.records import Call, CallStatus, CallTimings, ChoiceRecord, Node, Position
from polar.tokens.rendering import ParsedReply

if TYPE_CHECKING:
    from polar.gateway.sessions import LiveSession

log = logging.getLogger(__name__)
ENCODE_ON_LOOP = 8192  # characters; more text is encoded in a thread
ABORT_PATIENCE = 5.0  # seconds that an engine has to end an aborted stream


@dataclass(frozen=True)
class Backend:
    """What every call of a gateway uses."""

    engine: Engine
    info: EngineInfo
    store: CaptureStore


@dataclass(frozen=True)
class Arrival:
    """A request as it came in."""

    request: ChatRequest
    dialect: str
    request_hash: str
    headers: dict[str, str]
    received: float


@dataclass
class _Sampled:
    """What has come from the engine so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    versions: tuple[VersionSpan, ...] = ()
    usage: Usage | None = None


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
        self._bodies = addressed(arrival.request)
        self._replaces = replaces
        self._parser = session.history.renderer.parser()
        self._plan: Plan | None = None
        self._prompt = Position()
        self._prompt_ids: Int32Array = np.empty(0, np.int32)
        self._sampling: ResolvedSampling | None = None
        self._sampled = _Sampled()
        self._parsed: ParsedReply | None = None
        self._node: int | None = None
        self._times = {"received": arrival.received}
        self.stopped = False
        self._generating = False
        self._limit = asyncio.timeout(None)
        self._abort: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.session.runs.add(self)
        self._task = asyncio.create_task(self._live(), name=f"call {self.call_id}")

    async def done(self) -> None:
        """Wait for the outcome. Cancelling the waiter does not cancel the run."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def stop(self) -> None:
        """Abort the generation on the engine; what was sampled is recorded as `aborted`."""
        if self.stopped or self._sampled.finish or self.feed.ended:
            return
        self.stopped = True
        if self._generating:
            self._limit.reschedule(asyncio.get_running_loop().time() + ABORT_PATIENCE)
            self._abort = asyncio.create_task(self._abort_upstream())

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
        history, request = self.session.history, self._arrival.request
        plan = self._plan = history.plan(request.messages, request.tools)
        ids = history.render(plan) if plan.size < ENCODE_ON_LOOP else await asyncio.to_thread(history.render, plan)
        self._prompt = history.place(plan, ids, self.call_id)
        self._prompt_ids = history.tree.path(self._prompt)
        room = self._backend.info.max_model_len - len(self._prompt_ids)
        if room < 1:
            raise ContextLengthExceeded(len(self._prompt_ids), self._backend.info.max_model_len)
        self._sampling = resolve(self.session.stored.sampling, request, room, history.renderer.stop_ids)

    async def _generate(self) -> None:
        assert self._sampling is not None
        if self.stopped:
            return
        self._times["sent"] = time.time()
        chunks = self._backend.engine.generate(self.call_id, self._prompt_ids, self._sampling)
        try:
            async with self._limit, aclosing(chunks):
                self._generating = True
                async for chunk in chunks:
                    self._take(chunk)
        except TimeoutError:
            log.warning("call %s: the engine did not end an aborted generation in %s s", self.call_id, ABORT_PATIENCE)
        finally:
            self._generating = False

    def _take(self, chunk: Generated) -> None:
        sampled = self._sampled
        if chunk.ids:
            self._times["last_token"] = time.time()
            self._times.setdefault("first_token", self._times["last_token"])
            sampled.ids.extend(chunk.ids)
            sampled.logprobs.extend(chunk.logprobs)
            self.feed.put(self._parser.push(chunk.ids))
        if chunk.finish is not None:
            sampled.finish, sampled.versions, sampled.usage = chunk.finish, chunk.versions, chunk.usage

    async def _abort_upstream(self) -> None:
        try:
            await self._backend.engine.abort(self.call_id)
        except EngineError as error:
            log.warning("abort of call %s: %s", self.call_id, error)

    async def _settle(self) -> None:
        """Check the tokens, commit them, and only then let the reply exist."""
        deltas, parsed = self._parser.finish()
        if self.stopped or self._sampled.finish == "abort":
            self._parsed, self._node = parsed, self._node_if_whole()
            await self._commit(self._record("aborted", parsed, self._node))
            self.error = CaptureError("aborted", "the generation was aborted")
            return
        self._parsed, self._node = parsed, self._hang(self._check())
        call = self._record("ok", parsed, self._node)
        await self._commit(call)
        self.session.history.answered(call, self._arrival.request.messages)
        self.feed.put(deltas)

    def _check(self) -> tuple[VersionSpan, ...]:
        """The version spans of tokens that can be trusted; raises `CaptureError` for others."""
        sampled = self._sampled
        check_counts(sampled.ids, sampled.logprobs, len(self._prompt_ids), sampled.usage)
        check_logprobs(np.asarray(sampled.logprobs, np.float32))
        check_stop(sampled.ids, sampled.finish == "stop", self.session.history.renderer.stop_ids)
        return check_versions(sampled.versions, len(sampled.ids))

    def _node_if_whole(self) -> int | None:
        """The aborted tokens' node, if the engine told all about them; else they are only counted."""
        try:
            return self._hang(self._check())
        except CaptureError:
            return None

    def _hang(self, versions: tuple[VersionSpan, ...]) -> int:
        ids = np.asarray(self._sampled.ids, np.int32)
        logprobs = np.asarray(self._sampled.logprobs, np.float32)
        return self.session.history.tree.add_sampled(self._prompt, ids, logprobs, versions, self.call_id, 0).node_id

    async def _fail(self, error: PolarError) -> None:
        self.error = error
        code = error.code if isinstance(error, CaptureError | RequestError) else type(error).__name__
        findings = (Finding(code, str(error), self.call_id),)
        try:
            await self._commit(self._record("failed", self._parsed, self._node, findings, str(error)))
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
            bodies = {digest: body for digest, body in self._bodies if digest not in session.stored_bodies}
            nodes = session.history.take_unsaved()
            try:
                await self._store(nodes, call, bodies)
            except BaseException:
                session.history.give_back(nodes)
                if call.status != "ok":
                    session.unstored[call.call_id] = (call, bodies)
                raise
            session.stored_bodies.update(bodies)
        self._times["committed"] = time.time()
        self.call = self.session.calls[call.call_id] = call

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

    def _record(
        self,
        status: CallStatus,
        parsed: ParsedReply | None,
        node: int | None,
        findings: tuple[Finding, ...] = (),
        error: str = "",
    ) -> Call:
        arrival, plan = self._arrival, self._plan
        choices: tuple[ChoiceRecord, ...] = ()
        if parsed is not None:
            findings += tuple(Finding(name, "in the reply", self.call_id) for name in parsed.findings)
            choices = (ChoiceRecord(node, self._finish_reason(parsed), self._message(parsed)),)
        return Call(
            call_id=self.call_id,
            session_id=self.session.session_id,
            ordinal=self._ordinal,
            dialect=arrival.dialect,
            model=arrival.request.model,
            engine=self._backend.engine.name,
            kind="agent",
            status=status,
            prompt=self._prompt,
            prompt_tokens=len(self._prompt_ids),
            prompt_hash=prompt_hash(self._prompt_ids),
            request_hash=self.request_hash,
            message_hashes=tuple(digest for digest, _ in self._bodies[:-1]),
            tools_hash=self._bodies[-1][0],
            choices=choices,
            logprobs_mode=self._backend.engine.logprobs_mode,
            chain=plan.chain if plan else "",
            requested=arrival.request.sampling,
            resolved=_numbers(self._sampling),
            sampled=len(self._sampled.ids),
            parent_call=plan.parent_call if plan else "",
            fork_reason=plan.continuation.fork_reason if plan else "",
            replaces=self._replaces,
            stream=arrival.request.stream,
            headers=arrival.headers,
            extra=arrival.request.extra,
            findings=findings,
            timings=CallTimings(**self._times),
            error=error,
        )

    def _finish_reason(self, parsed: ParsedReply) -> FinishReason | Literal["abort"]:
        if self._sampled.finish == "stop":
            return "tool_calls" if parsed.tool_calls else "stop"
        return "length" if self._sampled.finish == "length" else "abort"

    def _message(self, parsed: ParsedReply) -> Message:
        calls = tuple(
            ToolCall(tool_call_id(self.call_id, 0, index), name, arguments)
            for index, (name, arguments) in enumerate(parsed.tool_calls)
        )
        return Message("assistant", (TextPart(parsed.text),) if parsed.text else (), parsed.reasoning, calls)


def reply_of(call: Call) -> Reply:
    """What a harness is told of a committed call; the same for its first delivery and for a replay."""
    choices: list[Choice] = []
    for choice in call.choices:
        if choice.finish_reason == "abort":
            raise CaptureError("aborted", f"call {call.call_id} has no reply")
        choices.append(Choice(choice.message, choice.finish_reason, choice.stop_sequence))
    usage = Usage(call.prompt_tokens, call.sampled)
    return Reply(call.call_id, call.model, int(call.timings.received), tuple(choices), usage)


def resolve(task: SamplingSpec, request: ChatRequest, room: int, stop_ids: tuple[int, ...]) -> ResolvedSampling:
    """Sampling belongs to the trainer (D18); `max_tokens` is the least of harness, task and room (tokens)."""
    limits = [limit for limit in (request.sampling.max_tokens, task.max_tokens, room) if limit is not None]
    return ResolvedSampling(
        max_tokens=min(limits), temperature=task.temperature, top_p=task.top_p, top_k=task.top_k, stop_token_ids=stop_ids
    )


def addressed(request: ChatRequest) -> list[tuple[str, bytes]]:
    """A request's messages, then its tools, as the content-addressed table holds them: (hash, JSON).

    A message's address is the xxh3_128 of its JSON in hex, the tools' is the root of their lineage.
    """
    bodies = [msgspec.json.encode(message) for message in request.messages]
    return [
        *((xxhash.xxh3_128_hexdigest(body), body) for body in bodies),
        (tools_root(request.tools), msgspec.json.encode(request.tools)),
    ]


def _numbers(sampling: ResolvedSampling | None) -> dict[str, float]:
    if sampling is None:
        return {}
    return {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
