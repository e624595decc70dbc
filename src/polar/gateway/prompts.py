"""Where a call's prompt stands: what it continues, its ids, and their place in the token tree.

Token-in, its ids are rendered here and put in their place before anything is sampled. In chat mode the engine renders, and
says the ids with the first token: they have to begin with what is stored of the history that they continue, or they fork. The
same holds where a session's reasoning is to stay as the harness sends it: then the model's template decides what is shown of it.
Calls that are not traced stand nowhere in the tree; only what they continue is known.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from polar.chat import Message
from polar.engines.served import Served
from polar.errors import BridgeRefused, CaptureError
from polar.gateway.backend import traced
from polar.specs import Finding, Int32Array
from polar.tokens.detectors import check_bos
from polar.tokens.drift import CODES, Turn, doubles_stop, drift_reason
from polar.tokens.history import History, Plan, Told
from polar.tokens.records import Position
from polar.tokens.rendering import Renderer, render_as_sent

if TYPE_CHECKING:
    from polar.gateway.drafts import Arrival
    from polar.gateway.sessions import LiveSession

ENCODE_ON_LOOP = 8192  # characters; more text is encoded in a thread


class Prompt:
    """The prompt of one call.

    Attributes:
        traced: it stands in the tree, as soon as its ids are known.
        plan: what it continues; None until that is looked for.
        ids: int32[n]; None until they are known, and for good where the engine does not show them.
        place: where they end in the tree.
        fork_reason: why it does not begin with the stored ids of what it continues; "" if it does.
        findings: what was odd about it.
    """

    def __init__(self, session: "LiveSession", call_id: str, served: Served) -> None:
        self.traced = traced(served)
        self.plan: Plan | None = None
        self.ids: Int32Array | None = None
        self.place = Position()
        self.fork_reason = ""
        self.findings: tuple[Finding, ...] = ()
        self._session = session
        self._call_id = call_id
        self._served = served
        self._messages: Sequence[Message] = ()

    def find(self, arrival: "Arrival") -> Plan:
        """Look for what it continues."""
        request = arrival.request
        self._messages = request.messages
        self.plan = self._session.history.plan(request.messages, request.tools, arrival.digests, traced=self.traced)
        self.fork_reason = self.plan.continuation.fork_reason
        return self.plan

    async def render(self, renderer: Renderer) -> Int32Array:
        """Token-in: make its ids, and put those of the policy in their place."""
        history = self._session.history
        if self.traced and history.as_sent:
            self.shown(await asyncio.to_thread(render_as_sent, renderer, self._messages, self._planned.tools))
        elif self.traced:
            self.plan, ids = await rendered(history, self._planned, self._messages)
            self.fork_reason = self.plan.continuation.fork_reason
            self.place = history.place(self.plan, ids, self._call_id)
            self.ids = history.tree.path(self.place)
            check_bos(self.ids, self._served.bos_id)
        else:
            self.ids = await asyncio.to_thread(renderer.render, self._messages, self._planned.tools)
        assert self.ids is not None
        return self.ids

    def shown(self, ids: Int32Array) -> None:
        """Take a prompt that was rendered whole. In chat mode every choice of a call says it again.

        Raises:
            CaptureError: T01, the choices of one call were sampled after different prompts; T05.
        """
        if not self.traced:
            return
        if self.ids is not None:
            if not np.array_equal(self.ids, ids):
                raise CaptureError("T01", "the engine rendered one request in two ways")
            return
        plan, history = self._planned, self._session.history
        self.ids = ids
        self.place, differs = history.place_whole(plan, ids, self._call_id)
        if plan.continuation.reply is not None:
            self._compare(plan, ids, differs)
        check_bos(ids, self._served.bos_id)

    def forget(self) -> None:
        """Drop the messages."""
        self._messages = ()
        if self.plan is not None:
            self.plan = replace(self.plan, tools=(), new=())

    @property
    def _planned(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def _compare(self, plan: Plan, ids: Int32Array, differs: int | None) -> None:
        """Name what the prompt does to the reply that it continues."""
        history = self._session.history
        told = history.told(plan.start)
        turns = [self._turn(reply) for reply in told if reply.reply.call_id in self._session.calls]  # others are not recorded yet
        if differs is not None:
            stored = history.tree.path(plan.start)
            decode = history.renderer.decode if history.renderer is not None else self._served.decode
            reason = drift_reason(stored, ids, differs, turns, decode)
            self.fork_reason = reason
            says = f"{reason}: the prompt leaves what is stored at token {differs} of {len(stored)}"
            self.findings = (Finding(CODES[reason], says, self._call_id),)
        elif turns[-1].stopped and doubles_stop(ids, depth := history.tree.depth(plan.start)):
            says = f"stop_doubled: the end of the last reply is written once more, at token {depth} of the prompt"
            self.findings = (Finding(CODES["stop_doubled"], says, self._call_id),)

    def _turn(self, told: Told) -> Turn:
        call = self._session.calls[told.reply.call_id]
        choice, asked = call.choices[told.reply.choice], len(call.message_hashes)
        came = self._messages[asked] if asked < len(self._messages) else None
        stopped = choice.finish_reason in ("stop", "tool_calls") and not choice.stop_sequence
        return Turn(told.start, told.end, stopped, choice.message, came)


async def rendered(history: History, plan: Plan, messages: Sequence[Message]) -> tuple[Plan, Int32Array]:
    """The ids that follow a plan's start, and the plan that it came to: a refused bridge renders the history whole."""
    try:
        return plan, await _encoded(history, plan)
    except BridgeRefused:
        whole = history.whole(plan, messages)
        return whole, await _encoded(history, whole)


async def _encoded(history: History, plan: Plan) -> Int32Array:
    return history.render(plan) if plan.size < ENCODE_ON_LOOP else await asyncio.to_thread(history.render, plan)
