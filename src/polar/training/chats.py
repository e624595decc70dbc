"""Chats as trees to train on: each assistant turn as the policy would have sampled it, all else as context.

A turn's prompt goes on from the ids before it, as in a session: the history is rendered once, what follows is bridged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Raw, Struct

from polar.chat import Message, Tool
from polar.dialects.bodies import Memory
from polar.dialects.openai_chat_request import read
from polar.errors import BridgeRefused, RequestError, UsageError
from polar.specs import Int32Array
from polar.tokens.rendering import LastTurn, Renderer
from polar.trajectory.chains import Sampling
from polar.trajectory.forest import NONE, Forest

ASK = Message("user", ())
HOW = Sampling(1.0, 1.0, 0, "raw")


@dataclass(frozen=True)
class Chat:
    """A dialogue.

    Attributes:
        trained: places of the assistant messages to be learned.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    trained: frozenset[int]


class _Weighted(Struct):
    role: str = ""
    weight: float = 1.0


class _Line(Struct):
    messages: list[Raw]
    tools: list[Raw] = []


def whole(messages: Sequence[Message], tools: Sequence[Tool]) -> Chat:
    """A chat of which every assistant message is learned."""
    places = frozenset(place for place, message in enumerate(messages) if message.role == "assistant")
    return Chat(tuple(messages), tuple(tools), places)


def read_chats(path: Path) -> Iterator[Chat]:
    """The chats of a JSONL file in the shape of OpenAI's fine-tuning (`polar export --format sft` writes it).

    An assistant message with `weight` 0 is not learned.

    Raises:
        UsageError: with file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                found = msgspec.json.decode(line, type=_Line)
                weights = [msgspec.json.decode(message, type=_Weighted) for message in found.messages]
                body = msgspec.json.encode({"model": "", "messages": found.messages, "tools": found.tools})
                request = read(body, Memory())
            except (msgspec.DecodeError, RequestError) as fault:
                raise UsageError(f"{path}:{number}: expected a chat: {fault}") from None
            learned = [place for place, each in enumerate(weights) if each.role == "assistant" and each.weight]
            yield Chat(request.messages, request.tools, frozenset(learned))


def chat_forest(renderer: Renderer, chat: Chat, name: str) -> Forest:
    """The one tree of a chat, `name` standing for its session; every learned turn has the same weight a token.

    Raises:
        UsageError: nothing of it can be learned, or the renderer cannot go on from a turn.
    """
    places = [place for place, message in enumerate(chat.messages) if message.role == "assistant"]
    if not chat.trained:
        raise UsageError("nothing to learn: expected an assistant message with a weight above 0")
    pieces: list[tuple[Int32Array, bool]] = [(renderer.render(chat.messages[: places[0]], chat.tools), False)]
    for place, end in zip(places, [*places[1:], len(chat.messages)], strict=True):
        reply = _reply(renderer, chat.messages[place])
        pieces.append((reply, place in chat.trained))
        if end < len(chat.messages):
            try:
                last = LastTurn(reply, stopped=True, calls=chat.messages[place].tool_calls)
                pieces.append((renderer.bridge(last, chat.messages[place + 1 : end]), False))
            except BridgeRefused as fault:
                raise UsageError(f"message {place + 1} cannot follow what was said before it: {fault}") from None
    last_learned = max(index for index, (_, learned) in enumerate(pieces) if learned)
    return _chain(pieces[: last_learned + 1], name)


def _reply(renderer: Renderer, message: Message) -> Int32Array:
    """A turn's ids as they would have been sampled, with the id that ends it; it is the same behind every prompt.

    It is rendered in front of a further question: some templates write an empty reasoning into a last turn.
    """
    before = renderer.render((ASK,), ())
    after = renderer.render((ASK, message, ASK), ())[len(before) :]
    ends = np.flatnonzero(np.isin(after, renderer.stop_ids))
    if len(ends) == 0:
        raise UsageError("an assistant message renders without an end")
    return after[: ends[0] + 1]


def _chain(pieces: Sequence[tuple[Int32Array, bool]], name: str) -> Forest:
    """A forest of one tree without branches."""
    lengths = np.asarray([len(ids) for ids, _ in pieces])
    learned = np.asarray([each for _, each in pieces])
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    mask = np.repeat(learned, lengths)
    nodes = len(pieces)
    return Forest(
        ids=np.concatenate([ids for ids, _ in pieces]).astype(np.int32),
        positions=np.arange(bounds[-1], dtype=np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.zeros(bounds[-1], np.float32),
        policy_versions=np.where(mask, 0, NONE).astype(np.int32),
        bounds=bounds,
        parents=np.arange(-1, nodes - 1, dtype=np.int32),
        sampled=learned.astype(np.uint8),
        traces=np.where(learned, 0, NONE).astype(np.int32),
        weights=np.where(learned, lengths / lengths[learned].sum(), 0.0),
        samplings=np.where(learned, 0, NONE).astype(np.int32),
        sessions=np.zeros(nodes, np.int32),
        choices=np.zeros(nodes, np.int32),
        call_ids=(name,) * nodes,
        sampling=(HOW,),
        session_ids=(name,),
        rewards=np.ones(1),
    )
