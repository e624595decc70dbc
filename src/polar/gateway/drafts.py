"""The record of a call in the making: what was asked, where its prompt stands, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from polar.chat import ChatRequest
from polar.engines.protocol import ResolvedSampling
from polar.engines.served import Served
from polar.gateway.generation import Generation
from polar.gateway.prompts import Prompt
from polar.gateway.terms import forces_tool, has_images, numbers, respelled, unserved
from polar.specs import CallKind, Finding
from polar.tokens.history import Plan, prompt_hash
from polar.tokens.records import Call, CallStatus, CallTimings, ChoiceRecord, Untrained

if TYPE_CHECKING:
    from polar.gateway.sessions import LiveSession


@dataclass(eq=False)
class Arrival:
    """A request as it came in.

    Attributes:
        request: without messages once nobody needs them: a call may take minutes.
        digests: addresses of its messages, then of its tools; `unseen` has what of these the session's file lacks.
    """

    request: ChatRequest
    digests: tuple[str, ...]
    unseen: dict[str, bytes]
    dialect: str
    request_hash: str
    headers: dict[str, str]
    received: float

    @property
    def form(self) -> ChatRequest:
        """The request without its messages: what a dialect needs for the reply."""
        return msgspec.structs.replace(self.request, messages=())

    def forget(self) -> None:
        """Drop the messages."""
        self.request = self.form


@dataclass(frozen=True)
class _Read:
    """What the record needs of the messages."""

    normalisers: tuple[str, ...]
    unserved: tuple[str, ...]
    derived_from: str
    saw_images: bool


class Draft:
    """The record of one call in the making.

    Attributes:
        prompt, kind: known once the call has found its place.
        sampling: what the engine is told; None until it is settled.
        nodes: the sampled node of each choice that has one.
        sent, committed: unix seconds.
    """

    def __init__(
        self, session: "LiveSession", call_id: str, ordinal: int, arrival: Arrival, served: Served, replaces: str
    ) -> None:
        self.prompt = Prompt(session, call_id, served)
        self.kind: CallKind = "agent"
        self.sampling: ResolvedSampling | None = None
        self.nodes: dict[int, int] = {}
        self.sent = self.committed = 0.0
        self._session = session
        self._call_id = call_id
        self._ordinal = ordinal
        self._arrival = arrival
        self._served = served
        self._replaces = replaces
        self._read: _Read | None = None

    @property
    def untrained(self) -> Untrained:
        """Why nothing of the call will ever be trained."""
        if not self._served.trains:
            return "external"
        return "" if self.prompt.traced else "unproven"

    @property
    def constrained(self) -> bool:
        """Sampled under a grammar (L05); a chatting engine samples one for a tool that has to be called."""
        forced = self._served.renderer is None and forces_tool(self._arrival.request)
        return forced or (self.sampling is not None and self.sampling.constrained)

    def forget(self) -> None:
        """Read what the record needs of the messages, and drop them, if that is not done."""
        if self._read is None:
            self._read = self._read_messages()
            self._arrival.forget()
            self.prompt.forget()

    def record(
        self, status: CallStatus, choices: Sequence[Generation], findings: tuple[Finding, ...] = (), error: str = ""
    ) -> Call:
        """The call as it is stored."""
        arrival, prompt, read = self._arrival, self.prompt, self._read or self._read_messages()
        request, engine, plan = arrival.request, self._served.engine, self.prompt.plan
        ids = np.empty(0, np.int32) if prompt.ids is None else prompt.ids
        counted = 0 if prompt.traced else _counted(choices)
        return Call(
            call_id=self._call_id,
            session_id=self._session.session_id,
            ordinal=self._ordinal,
            dialect=arrival.dialect,
            model=request.model,
            engine=engine.name,
            kind=self.kind,
            status=status,
            prompt=prompt.place,
            prompt_tokens=len(ids) or counted,
            prompt_hash=prompt_hash(ids),
            request_hash=arrival.request_hash,
            message_hashes=arrival.digests[:-1],
            tools_hash=arrival.digests[-1],
            choices=tuple(self._choice(choice) for choice in choices if choice.parsed is not None),
            logprobs_mode=engine.logprobs_mode,
            chain=plan.chain if plan else "",
            requested=request.sampling,
            resolved=numbers(self.sampling),
            sampled=sum(choice.sampled for choice in choices),
            tail=sum(choice.tail for choice in choices),
            parent_call=plan.parent_call if plan else "",
            fork_reason=prompt.fork_reason,
            replaces=self._replaces,
            derived_from=read.derived_from,
            constrained=self.constrained,
            normalisers=read.normalisers,
            unserved=read.unserved,
            # T11: nobody here can tell whether an engine expanded an image's placeholder as often as it ought to.
            untrained=self.untrained or ("unproven" if read.saw_images or not all(choice.exact for choice in choices) else ""),
            stream=request.stream,
            headers=arrival.headers,
            extra=request.extra,
            findings=prompt.findings + self._odd(choices) + findings,
            timings=self._timings(choices),
            error=error,
        )

    def _choice(self, choice: Generation) -> ChoiceRecord:
        finish = choice.finish_reason() or "abort"
        return ChoiceRecord(self.nodes.get(choice.choice), finish, choice.message(), choice.stop_sequence)

    def _odd(self, choices: Sequence[Generation]) -> tuple[Finding, ...]:
        """What was odd in the replies, once each."""
        names = {name: None for choice in choices if choice.parsed for name in choice.parsed.findings}
        return tuple(Finding(name, "in the reply", self._call_id) for name in names)

    def _timings(self, choices: Sequence[Generation]) -> CallTimings:
        firsts = [choice.first for choice in choices if choice.first]
        lasts = [choice.last for choice in choices]
        return CallTimings(self._arrival.received, self.sent, min(firsts, default=0.0), max(lasts), self.committed)

    def _read_messages(self) -> "_Read":
        request, plan = self._arrival.request, self.prompt.plan
        by_engine = self._served.renderer is None
        return _Read(
            normalisers=self._normalisers(request, plan),
            unserved=unserved(request, self.sampling, by_engine=by_engine),
            derived_from=self._derived_from(request, plan),
            saw_images=by_engine and has_images(request),
        )

    def _normalisers(self, request: ChatRequest, plan: Plan | None) -> tuple[str, ...]:
        """What was read as if it were not there, or came back spelled otherwise than it was sent."""
        names = [*request.normalised, *(name for name in self._session.stored.profile.normalisers if name == "trim_text")]
        if request.messages and request.messages[-1].role == "assistant":
            names.append("prefill_closed")  # T18: the message is closed, and a new turn is opened
        return (*names, *respelled(plan, request.messages, self._session.calls))

    def _derived_from(self, request: ChatRequest, plan: Plan | None) -> str:
        if plan is None or plan.continuation.reply is not None or self.kind == "compaction":
            return ""
        return self._session.threads.origin(request.messages)


def _counted(choices: Sequence[Generation]) -> int:
    """Tokens of the prompt as the engine counted them."""
    return max((choice.usage.prompt_tokens for choice in choices if choice.usage is not None), default=0)
