"""Sessions for the benchmark of trees: what calls bring and sample, and the records that a gateway keeps of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Raw

from polar.chat import FinishReason, Message, RequestedSampling, TextPart, Tool, ToolCall
from polar.ids import tool_call_id
from polar.specs import CallKind, Float32Array, Int32Array, VersionSpan
from polar.tokens.history import prompt_hash
from polar.tokens.records import Call, CallTimings, ChoiceRecord, Node, Position
from polar.tokens.tree import EMPTY, TokenTree
from polar.trajectory.builders import Captured

Shape = Literal["chain", "busy"]
SYSTEM = 4_000  # tokens of system prompt and tools
SAMPLED = 0.4  # of what a call adds
CHARACTERS = 4  # of text per token
VOCABULARY = 150_000
HEADERS = {"user-agent": "pi/0.3 (linux; x64) node/22.1", "x-stainless-lang": "js", "x-stainless-package-version": "5.1.0"}
TOOLS = (Tool("bash", "Run a command in the workspace.", Raw(b'{"type":"object","properties":{"command":{"type":"string"}}}')),)


@dataclass(frozen=True)
class Turn:
    """One call: what its prompt adds to the call that it follows (None: a first one), and its answer."""

    follows: int | None
    new: Int32Array
    ids: Int32Array
    logprobs: Float32Array
    kind: CallKind = "agent"
    finish: FinishReason = "stop"


def session(shape: Shape, calls: int, tokens: int) -> list[Turn]:
    """A session of `calls` calls in which about `tokens` are different.

    A `chain` is one agent; each call goes on from the one before. In a `busy` session every fifth answer is cut by length and
    asked again, and every tenth call is a sub-agent's under the same system prompt.
    """
    random = np.random.default_rng(7)
    system = random.integers(0, VOCABULARY, SYSTEM).astype(np.int32)
    each = max(2, (tokens - SYSTEM) // calls)
    turns: list[Turn] = []
    last: int | None = None
    for number in range(calls):
        aside, cut = shape == "busy" and number % 10 == 9, shape == "busy" and number % 5 == 3
        adds = max(2, int(each * random.uniform(0.25, 1.75)))
        wrote = max(1, int(SAMPLED * adds))
        new = random.integers(0, VOCABULARY, adds - wrote).astype(np.int32)
        follows = None if aside else last
        if number and turns[-1].finish == "length" and not aside:
            new = turns[-1].new  # asked again
        elif follows is None:
            new = np.concatenate([system, new])
        turns.append(
            Turn(
                follows,
                new,
                random.integers(0, VOCABULARY, wrote).astype(np.int32),
                -random.exponential(0.5, wrote).astype(np.float32),
                "subagent" if aside else "agent",
                "length" if cut else "tool_calls",
            )
        )
        last = last if aside or cut else number
    return turns


def prompt(turns: Sequence[Turn], number: int) -> Int32Array:
    """The whole prompt of a call."""
    parts: list[Int32Array] = []
    at: int | None = number
    while at is not None:
        parts.append(turns[at].new)
        at = turns[at].follows
        if at is not None:
            parts.append(turns[at].ids)
    return np.concatenate(parts[::-1])


@dataclass
class Written:
    """A session as a gateway records it: `commits` has the nodes, the call and the new messages of each call."""

    tree: TokenTree = field(default_factory=TokenTree)
    commits: list[tuple[list[Node], Call, dict[str, bytes]]] = field(default_factory=list)
    captured: Captured = field(default_factory=lambda: Captured([], [], {}, {}))


def write(turns: Sequence[Turn]) -> Written:
    """Put every call into a tree, and make its record with messages as long as its tokens."""
    written, letters = Written(), np.random.default_rng(8)
    calls: list[Call] = []
    messages: dict[str, Message] = {}
    said: list[tuple[str, ...]] = []
    tools = msgspec.json.encode(TOOLS)
    for number, turn in enumerate(turns):
        known = len(written.tree.nodes)
        before = calls[turn.follows] if turn.follows is not None else None
        start = written.tree.end(before.choices[0].node or 0) if before else EMPTY
        call_id = f"c{number:08d}abcdefgh"
        place = written.tree.add_context(start, turn.new, call_id)
        node = written.tree.add_sampled(place, turn.ids, turn.logprobs, (VersionSpan(0, len(turn.ids), 3),), call_id, 0)
        history = (*said[turn.follows], *_heard(before, turn, letters, messages)) if turn.follows is not None and before else ()
        history = history or _heard(None, turn, letters, messages)
        said.append(history)
        answer = Message("assistant", (), "", (ToolCall(tool_call_id(call_id, 0, 0), "bash", _text(letters, len(turn.ids))),))
        call = _call(number, turn, call_id, place, node, history, answer, prompt(turns, number), before, digest(tools))
        bodies = {value: msgspec.json.encode(messages[value]) for value in history[-2:]} | {digest(tools): tools}
        calls.append(call)
        written.commits.append((written.tree.nodes[known:], call, bodies))
    written.captured = Captured(calls, written.tree.nodes, messages, {digest(tools): TOOLS})
    return written


def _heard(before: Call | None, turn: Turn, letters: np.random.Generator, messages: dict[str, Message]) -> tuple[str, ...]:
    """Addresses of the messages that a prompt adds: the reply that it follows, and what came back."""
    if before is None:
        task = _text(letters, len(turn.new) - SYSTEM)
        added = (Message("system", (TextPart(CHARACTERS * SYSTEM * "s"),)), Message("user", (TextPart(task),)))
    else:
        reply, text = before.choices[0].message, _text(letters, len(turn.new))
        added = (reply, Message("tool", (TextPart(text),), tool_call_id=reply.tool_calls[0].id))
    named = {digest(msgspec.json.encode(message)): message for message in added}
    messages.update(named)
    return tuple(named)


def _call(
    number: int,
    turn: Turn,
    call_id: str,
    place: Position,
    node: Node,
    history: tuple[str, ...],
    answer: Message,
    ids: Int32Array,
    before: Call | None,
    tools: str,
) -> Call:
    at = 1.7e9 + number
    return Call(
        call_id=call_id,
        session_id="s1",
        ordinal=number,
        dialect="openai_chat",
        model="policy",
        engine="vllm",
        kind=turn.kind,
        status="ok",
        prompt=place,
        prompt_tokens=len(ids),
        prompt_hash=prompt_hash(ids),
        request_hash=digest(b"request %d" % number),
        message_hashes=history,
        tools_hash=tools,
        choices=(ChoiceRecord(node.node_id, turn.finish, answer),),
        logprobs_mode="raw",
        chain=digest(b"chain %d" % number),
        requested=RequestedSampling(temperature=0.2, max_tokens=32_000),
        resolved={"max_tokens": 8192.0 - number, "temperature": 1.0, "top_p": 1.0, "top_k": 0.0},
        sampled=len(turn.ids),
        parent_call=before.call_id if before else "",
        delivered=True,
        stream=True,
        headers=HEADERS,
        timings=CallTimings(at, at + 0.125, at + 0.25, at + 0.5, at + 0.75),
    )


def digest(body: bytes) -> str:
    """Address of a message."""
    return xxhash.xxh3_128_hexdigest(body)


def _text(letters: np.random.Generator, tokens: int) -> str:
    return letters.bytes(CHARACTERS * tokens // 2).hex()


def texts(written: Written) -> int:
    """Bytes of what was said, as messages and as replies."""
    bodies = {value: body for _, _, given in written.commits for value, body in given.items()}
    replies = [msgspec.json.encode(choice.message) for _, call, _ in written.commits for choice in call.choices]
    return sum(map(len, bodies.values())) + sum(map(len, replies))
