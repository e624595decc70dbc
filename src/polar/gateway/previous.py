"""Requests that name an earlier reply instead of sending the history again (`previous_response_id`)."""

import asyncio
from contextlib import closing
from pathlib import Path

import msgspec

from polar.chat import ChatRequest, Message
from polar.errors import InvalidRequest
from polar.gateway.sessions import LiveSession
from polar.ids import item_id, response_id
from polar.store.capture import CaptureReader
from polar.tokens.records import Call


async def follow(request: ChatRequest, dialect: str, session: LiveSession, capture: Path) -> ChatRequest:
    """The request with the prompt and the reply that it follows in front of its own messages.

    Calls of another dialect cannot be followed: their ids have another form. Instructions hold for one request: those of the
    earlier one are left out, this one's come first.

    Raises:
        InvalidRequest: the session has no such reply.
    """
    if not request.previous:
        return request
    call = session.calls.get(request.previous)
    if call is None or call.status != "ok" or call.dialect != dialect:
        raise InvalidRequest(f"Previous response with id '{response_id(request.previous)}' not found.")
    earlier = await asyncio.to_thread(_prompt, capture, call)
    own = 1 if "instructions" in request.extra else 0
    said = msgspec.structs.replace(call.choices[0].message, minted=(item_id("msg", call.call_id, 0, 0),))
    messages = (*request.messages[:own], *earlier, said, *request.messages[own:])
    return msgspec.structs.replace(request, messages=messages)


def _prompt(capture: Path, call: Call) -> list[Message]:
    """The messages of a call's prompt without its instructions."""
    with closing(CaptureReader.open(capture)) as reader:
        bodies = reader.messages(call.message_hashes)
    messages = [msgspec.json.decode(bodies[digest], type=Message) for digest in call.message_hashes]
    return messages[1:] if "instructions" in call.extra else messages
