"""The sessions that a gateway serves: their keys, their token history, and which of their answers were delivered."""

import asyncio
import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from polar.chat import Message
from polar.errors import SessionFrozen, StoreError, UnknownKey, UsageError
from polar.gateway.calls import CallRun
from polar.gateway.commits import commit_late
from polar.gateway.kinds import Threads
from polar.ids import new_model_key, new_session_id
from polar.specs import Finding, HarnessProfile, ReasoningHistory, SamplingSpec
from polar.store.capture import CaptureReader, CaptureStore, StoredSession
from polar.tokens.history import History
from polar.tokens.lineage import system_text, tools_root
from polar.tokens.records import Call, Node
from polar.tokens.rendering import Renderer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveSession:
    """One session in memory.

    Attributes:
        calls: the recorded calls by id; `runs` are those in progress.
        answered, aborted, replaced: the newest answer and the aborted calls by their request's hash, and calls asked again.
        arrived: calls so far; the next one's ordinal.
        counted: frozen for good: what is stored of it does not change any more.
        delivering: calls whose client still waits for the reply, or is getting it.
        committing: held while a call of this session is written.
        threads: what it has seen of its agents, by which kinds are told.
        unknown_routes: how often each route that nobody serves was asked for (C11).
        refused: why the last request that never became a call was refused; `refused_last` says that nothing came after it.
        stored_bodies: hashes of messages and tools that this process has stored for the session.
        unstored: failed calls that could not be written, by id, with their messages; they go with the next commit.
    """

    stored: StoredSession
    history: History
    calls: dict[str, Call] = field(default_factory=dict)
    answered: dict[str, str] = field(default_factory=dict)
    aborted: dict[str, list[str]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    runs: set[CallRun] = field(default_factory=set)
    arrived: int = 0
    threads: Threads = field(default_factory=Threads)
    unknown_routes: Counter[str] = field(default_factory=Counter)
    refused: str = ""
    refused_last: bool = False
    stored_bodies: set[str] = field(default_factory=set)
    unstored: dict[str, tuple[Call, dict[str, bytes]]] = field(default_factory=dict)
    frozen: bool = False
    counted: bool = False
    delivering: set[str] = field(default_factory=set)
    all_left: asyncio.Event = field(default_factory=asyncio.Event)
    committing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def session_id(self) -> str:
        return self.stored.session_id

    def check_open(self) -> None:
        """
        Raises:
            SessionFrozen: the session is closed.
        """
        if self.frozen:
            raise SessionFrozen(f"session {self.session_id} is closed to further calls")

    def left(self, call_id: str) -> None:
        """The connection that was to get a call's reply has ended."""
        self.delivering.discard(call_id)
        if not self.delivering:
            self.all_left.set()

    async def deliveries(self) -> None:
        """Wait, for `DELIVERY_PATIENCE` seconds at most, until no reply is on its way."""
        if self.delivering:
            self.all_left.clear()
            try:
                async with asyncio.timeout(DELIVERY_PATIENCE):
                    await self.all_left.wait()
            except TimeoutError:
                log.warning("session %s is closed while %d replies are on their way", self.session_id, len(self.delivering))

    def note_unknown(self, route: str) -> None:
        """Count a request for a route that nobody serves; of very many routes the first ones by name."""
        known = route in self.unknown_routes or len(self.unknown_routes) < MOST_ROUTES
        self.unknown_routes[route if known else "other routes"] += 1

    def findings(self) -> tuple[Finding, ...]:
        """What no call records: routes that nobody serves (C11), and requests that were refused."""
        refused = (Finding("request_refused", self.refused),) if self.refused else ()
        routes = (Finding("unknown_route", f"{route}, {count} ×") for route, count in self.unknown_routes.items())
        return (*refused, *routes)

    def admit(self) -> int:
        """Ordinal of a call that arrives now.

        Raises:
            SessionFrozen: the session is closed.
        """
        self.check_open()
        self.refused_last = False
        self.arrived += 1
        return self.arrived - 1

    def record(self, call: Call) -> None:
        """Take up a call that is stored, or its new state."""
        self.calls[call.call_id] = call
        if call.status == "ok":
            self.answered[call.request_hash] = call.call_id
        if call.status == "aborted":
            self.aborted.setdefault(call.request_hash, []).append(call.call_id)
        if call.replaces:
            self.replaced.add(call.replaces)

    def undelivered(self, request_hash: str) -> Call | None:
        """The committed answer to this very request that never reached its client (D9): it is replayed."""
        call = self.calls.get(self.answered.get(request_hash, ""))
        return None if call is None or call.delivered or call.call_id in self.delivering else call

    def deliver(self, call: Call) -> None:
        """Note that the reply reached its client: the same request again is a new sample."""
        self.calls[call.call_id] = msgspec.structs.replace(call, delivered=True)

    def abandoned(self, request_hash: str) -> CallRun | None:
        """A run in progress for this very request whose client has gone: a retry joins it."""
        return next((run for run in self.runs if run.request_hash == request_hash and run.orphaned and not run.stopped), None)

    def unsent(self, request_hash: str) -> CallRun | None:
        """A run for this very request whose stream broke off when it was too late to abort: its answer is being committed."""
        runs = (run for run in self.runs if run.request_hash == request_hash)
        return next((run for run in runs if run.feed.hung_up and not run.stopped), None)

    def superseded(self, request_hash: str) -> str:
        """The aborted call that this very request repeats, "" if there is none that nobody replaced yet."""
        stopping = [run.call_id for run in self.runs if run.request_hash == request_hash and run.stopped]
        gone = stopping + self.aborted.get(request_hash, [])
        return next((call_id for call_id in gone if call_id not in self.replaced), "")


LONGEST_GRACE = 3600.0  # seconds
MOST_ROUTES = 50  # unknown routes that are counted by name
DELIVERY_PATIENCE = 2.0  # seconds
NO_TOOLS = tools_root(())
CHAT = "chat"  # stands for a renderer's name where the engine renders


class Opened(msgspec.Struct, frozen=True):
    """A new session. This is the only place where its key exists."""

    session_id: str
    key: str


class Sessions:
    """All sessions of one gateway worker, by key.

    Attributes:
        closing: the gateway is about to end, and takes no more calls.
    """

    def __init__(self, store: CaptureStore, renderer: Renderer | None, model: str) -> None:
        self._store = store
        self._renderer = renderer
        self._renderer_name = renderer.name if renderer is not None else CHAT
        self._model = model
        self.closing = False
        self._by_key: dict[str, LiveSession] = {}
        self._by_id: dict[str, LiveSession] = {}

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._by_id.values()))

    async def open(
        self,
        *,
        task_id: str,
        profile: HarnessProfile,
        sampling: SamplingSpec,
        reasoning_history: ReasoningHistory = "as_sampled",
        metadata: dict[str, str] | None = None,
    ) -> Opened:
        """Open a session; it is durable when this returns.

        Raises:
            UsageError: the profile or the sampling cannot be used.
        """
        check_profile(profile)
        check_sampling(sampling)
        key = new_model_key()
        stored = StoredSession(
            session_id=new_session_id(),
            key_hash=hash_key(key),
            task_id=task_id,
            profile=profile,
            sampling=sampling,
            model=self._model,
            renderer=self._renderer_name,
            created=time.time(),
            metadata=metadata or {},
            reasoning_history=reasoning_history,
        )
        await self._store.open_session(stored)
        self._add(LiveSession(stored, self._history(stored)))
        return Opened(stored.session_id, key)

    def by_key(self, key: str) -> LiveSession:
        """The session of a model key; the look-up is by the key's hash, so its time says nothing of the key.

        Raises:
            UnknownKey: no session has it (C08).
        """
        session = self._by_key.get(hash_key(key))
        if session is None:
            raise UnknownKey("no session has this key")
        return session

    def by_id(self, session_id: str) -> LiveSession:
        """The session of an id.

        Raises:
            UsageError: unknown here.
        """
        session = self._by_id.get(session_id)
        if session is None:
            raise UsageError(f"unknown session {session_id!r}")
        return session

    async def freeze(self, session_id: str) -> LiveSession:
        """Close a session to further calls; what is being generated is aborted and recorded first."""
        session = self.by_id(session_id)
        session.frozen = True
        runs = list(session.runs)
        for run in runs:
            run.stop()
        for run in runs:
            await run.done()
        await session.deliveries()
        session.counted = True
        await commit_late(self._store, session)
        await self._store.freeze(session_id)
        return session

    def forget(self, session_id: str) -> None:
        """Free a frozen session's memory; its key stays known as closed, and the store keeps everything."""
        session = self.by_id(session_id)
        session.history = self._history(session.stored)
        session.calls.clear()
        session.unstored.clear()
        session.stored_bodies.clear()

    def restore(self, reader: CaptureReader) -> int:
        """Take up the sessions of an earlier process; how many are open.

        Raises:
            StoreError: a stored session belongs to another model or renderer, or cannot be read.
        """
        for stored in reader.sessions():
            try:
                nodes = () if stored.frozen else reader.nodes(stored.session_id)
                history = self._history(stored, nodes)
            except ValueError as error:
                raise StoreError(f"the token tree of session {stored.session_id} is damaged: {error}") from error
            session = LiveSession(stored, history, frozen=stored.frozen)
            if not stored.frozen:
                self._replay(session, reader)
            self._add(session)
        return sum(not session.frozen for session in self)

    def _replay(self, session: LiveSession, reader: CaptureReader) -> None:
        had, has = (session.stored.model, session.stored.renderer), (self._model, self._renderer_name)
        if had != has:
            raise StoreError(
                f"session {session.session_id} is open with model {had[0]!r} and renderer {had[1]!r}, and now they would be "
                f"{has[0]!r} and {has[1]!r}: start with the model that it had"
            )
        for call in reader.calls(session.session_id):
            session.arrived = max(session.arrived, call.ordinal + 1)
            session.record(call)
            if call.chain:  # else it failed before it had a place
                bodies = reader.messages(call.message_hashes)
                messages = [msgspec.json.decode(bodies[digest], type=Message) for digest in call.message_hashes]
                session.threads.note_asked(call.kind, messages, has_tools=call.tools_hash != NO_TOOLS)
                if call.status == "ok":
                    session.history.answered(call, system_text(messages))
                    session.threads.note_answered(call)

    def _history(self, stored: StoredSession, nodes: Iterable[Node] = ()) -> History:
        as_sent = stored.reasoning_history == "as_sent"
        return History(self._renderer, nodes, trim=trims(stored.profile), as_sent=as_sent)

    def _add(self, session: LiveSession) -> None:
        self._by_key[session.stored.key_hash] = session
        self._by_id[session.session_id] = session


def check_profile(profile: HarnessProfile) -> None:
    """
    Raises:
        UsageError: a pattern that is no regular expression, or a time that is none.
    """
    if not 0 <= profile.retry_grace <= LONGEST_GRACE:
        raise UsageError(f"profile.retry_grace: expected 0 to {LONGEST_GRACE:g} seconds, got {profile.retry_grace:g}")
    for number, rule in enumerate(profile.kinds):
        for name in ("header_value", "system", "last"):
            try:
                re.compile(getattr(rule, name))
            except re.error as error:
                raise UsageError(f"profile.kinds[{number}].{name}: expected a regular expression: {error}") from None


def check_sampling(sampling: SamplingSpec) -> None:
    """
    Raises:
        UsageError: a value that no engine takes.
    """
    bounds = {
        "temperature": (sampling.temperature >= 0, "0 or more"),
        "top_p": (0 < sampling.top_p <= 1, "more than 0, and 1 at most"),
        "top_k": (sampling.top_k >= 0, "0 (off) or more"),
        "regex": (_compiles(sampling.regex), "a regular expression"),
        "max_tokens": (sampling.max_tokens is None or sampling.max_tokens >= 1, "1 or more"),
    }
    for name, (good, expected) in bounds.items():
        if not good:
            raise UsageError(f"sampling.{name}: expected {expected}, got {getattr(sampling, name)}")


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def trims(profile: HarnessProfile) -> bool:
    """Whether this harness gives texts back without the whitespace around them."""
    return "trim_text" in profile.normalisers


def hash_key(key: str) -> str:
    """sha256 of a model key, hex: what is stored and looked up."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
