"""Making calls durable: each with every node that it stands on, and with the failures that could not be written before."""

import logging
from typing import TYPE_CHECKING

from polar.errors import StoreError
from polar.store.capture import CaptureStore
from polar.tokens.records import Call, Node

if TYPE_CHECKING:
    from polar.gateway.sessions import LiveSession

log = logging.getLogger(__name__)


async def commit(store: CaptureStore, session: "LiveSession", call: Call, unseen: dict[str, bytes]) -> None:
    """Make the call durable. A session commits one call at a time: what another call of it failed to store goes with this one.

    Args:
        unseen: the messages that the session's file lacks, by their addresses.

    Raises:
        StoreError: nothing was stored; nodes, and the record of a failure, go with the session's next commit.
    """
    async with session.committing:
        bodies = {digest: body for digest, body in unseen.items() if digest not in session.stored_bodies}
        nodes = session.history.take_unsaved()
        try:
            await _store(store, session, nodes, call, bodies)
        except BaseException:
            session.history.give_back(nodes)
            if call.status != "ok":
                session.unstored[call.call_id] = (call, bodies)
            raise
        session.stored_bodies.update(bodies)


async def commit_late(store: CaptureStore, session: "LiveSession") -> None:
    """Write the failures that could not be written when they happened: nothing comes that would take them along."""
    if session.unstored:
        nodes = session.history.take_unsaved()
        calls, bodies = _waiting(session)
        try:
            await store.commit(session.session_id, nodes, calls, bodies)
        except BaseException:
            session.history.give_back(nodes)
            raise
        for call in calls:
            session.record(call)
        session.unstored.clear()


async def _store(store: CaptureStore, session: "LiveSession", nodes: list[Node], call: Call, bodies: dict[str, bytes]) -> None:
    """Write `call`, and with it the failures that could not be written before; alone if they still cannot."""
    if session.unstored:
        calls, known = _waiting(session)
        try:
            await store.commit(session.session_id, nodes, [*calls, call], known | bodies)
        except StoreError:
            log.warning("%d failed calls of session %s still cannot be recorded", len(calls), session.session_id)
        else:
            session.unstored.clear()
            return
    await store.commit(session.session_id, nodes, [call], bodies)


def _waiting(session: "LiveSession") -> tuple[list[Call], dict[str, bytes]]:
    """The failures that are not written yet, with their messages."""
    calls = [call for call, _ in session.unstored.values()]
    return calls, {digest: body for _, messages in session.unstored.values() for digest, body in messages.items()}
