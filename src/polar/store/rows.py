"""How calls and nodes look in a capture file.

What is the same in most calls of a session is stored once: settings by content, and the list of messages as what it adds to
an earlier call's list; hashes are bytes, and fields have no names. Otherwise the records of a long session would outweigh its
tokens.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Raw, Struct, structs
from numpy.typing import NDArray

from polar.chat import FinishReason, Message, RequestedSampling
from polar.specs import NO_EXTRAS, CallKind, Extras, Finding, VersionSpan
from polar.tokens.lineage import shared
from polar.tokens.records import Call, CallStatus, CallTimings, ChoiceRecord, Node, NodeKind, Position, Untrained

_MAX_TIPS = 8  # conversations of one session that go on side by side: the agent, and its sub-agents

NodeRow = tuple[int, int, int, str, str, int, bytes, bytes | None, bytes]
ExtraRow = tuple[int, str, str, str, bytes]


class CallSettings(Struct, frozen=True, array_like=True):
    """What hardly changes between the calls of a session. New fields go last, with a default."""

    dialect: str
    model: str
    engine: str
    logprobs_mode: str
    tools_hash: str
    requested: RequestedSampling
    headers: dict[str, str]
    extra: dict[str, bytes]


class _Choice(Struct, frozen=True, array_like=True):
    """`ChoiceRecord` without the names of its fields."""

    node: int | None
    finish_reason: FinishReason | Literal["abort"]
    message: Message
    stop_sequence: str


class CallBody(Struct, frozen=True, array_like=True):
    """What is a call's own, beside its columns. New fields go last, with a default."""

    prompt: tuple[int, int]
    prompt_tokens: int
    prompt_hash: bytes
    request_hash: bytes
    chain: bytes
    sampled: int
    choices: tuple[_Choice, ...]
    resolved: dict[str, float]
    parent_call: str
    fork_reason: str
    replaces: str
    stream: bool
    findings: tuple[Finding, ...]
    timings: tuple[float, float, float, float, float]
    error: str
    derived_from: str = ""
    tail: int = 0
    constrained: bool = False
    normalisers: tuple[str, ...] = ()
    unserved: tuple[str, ...] = ()
    untrained: Untrained = ""


_encode = msgspec.msgpack.Encoder().encode
_settings = msgspec.msgpack.Decoder(CallSettings).decode
_body = msgspec.msgpack.Decoder(CallBody).decode
_spans = msgspec.msgpack.Decoder(tuple[tuple[int, int, int], ...]).decode
_numbers = msgspec.msgpack.Decoder(tuple[int, ...]).decode


def encode_settings(call: Call) -> tuple[bytes, bytes]:
    """(digest, blob) of what the call shares with its neighbours."""
    extra = {name: bytes(raw) for name, raw in call.extra.items()}
    blob = _encode(
        CallSettings(
            call.dialect, call.model, call.engine, call.logprobs_mode, call.tools_hash, call.requested, call.headers, extra
        )
    )
    return xxhash.xxh3_128_digest(blob), blob


def encode_body(call: Call) -> bytes:
    """The call without its columns, settings and messages."""
    return _encode(
        CallBody(
            prompt=(call.prompt.node, call.prompt.offset),
            prompt_tokens=call.prompt_tokens,
            prompt_hash=bytes.fromhex(call.prompt_hash),
            request_hash=bytes.fromhex(call.request_hash),
            chain=bytes.fromhex(call.chain),
            sampled=call.sampled,
            choices=tuple(_Choice(*structs.astuple(choice)) for choice in call.choices),
            resolved=call.resolved,
            parent_call=call.parent_call,
            fork_reason=call.fork_reason,
            replaces=call.replaces,
            stream=call.stream,
            findings=call.findings,
            timings=structs.astuple(call.timings),
            error=call.error,
            derived_from=call.derived_from,
            tail=call.tail,
            constrained=call.constrained,
            normalisers=call.normalisers,
            unserved=call.unserved,
            untrained=call.untrained,
        )
    )


def to_call(
    session_id: str,
    message_hashes: tuple[str, ...],
    call_id: str,
    ordinal: int,
    kind: CallKind,
    status: CallStatus,
    delivered: int,
    settings_blob: bytes,
    body_blob: bytes,
) -> Call:
    """The call of a row. Raises `msgspec.MsgspecError` for a blob that cannot be decoded."""
    settings, body = _settings(settings_blob), _body(body_blob)
    return Call(
        call_id=call_id,
        session_id=session_id,
        ordinal=ordinal,
        dialect=settings.dialect,
        model=settings.model,
        engine=settings.engine,
        kind=kind,
        status=status,
        prompt=Position(*body.prompt),
        prompt_tokens=body.prompt_tokens,
        prompt_hash=body.prompt_hash.hex(),
        request_hash=body.request_hash.hex(),
        chain=body.chain.hex(),
        sampled=body.sampled,
        message_hashes=message_hashes,
        tools_hash=settings.tools_hash,
        choices=tuple(ChoiceRecord(*structs.astuple(choice)) for choice in body.choices),
        logprobs_mode=settings.logprobs_mode,
        requested=settings.requested,
        resolved=body.resolved,
        parent_call=body.parent_call,
        fork_reason=body.fork_reason,
        replaces=body.replaces,
        delivered=bool(delivered),
        stream=body.stream,
        headers=settings.headers,
        extra={name: Raw(raw) for name, raw in settings.extra.items()},
        findings=body.findings,
        timings=CallTimings(*body.timings),
        error=body.error,
        derived_from=body.derived_from,
        tail=body.tail,
        constrained=body.constrained,
        normalisers=body.normalisers,
        unserved=body.unserved,
        untrained=body.untrained,
    )


def node_row(node: Node) -> NodeRow:
    """The columns of `nodes` after `session`, from `node_id` on. Arrays are little-endian on every machine."""
    logprobs = None if node.logprobs is None else node.logprobs.astype("<f4", copy=False).tobytes()
    versions = _encode([(span.start, span.end, span.policy_version) for span in node.versions])
    ids = node.ids.astype("<i4", copy=False).tobytes()
    return (node.node_id, node.parent.node, node.parent.offset, node.kind, node.call_id, node.choice, ids, logprobs, versions)


def to_node(
    node_id: int,
    parent: int,
    offset: int,
    kind: NodeKind,
    call_id: str,
    choice: int,
    ids: bytes,
    logprobs: bytes | None,
    versions: bytes,
    *,
    extras: Extras = NO_EXTRAS,
) -> Node:
    """The node of a row; its arrays are read-only."""
    return Node(
        node_id=node_id,
        parent=Position(parent, offset),
        kind=kind,
        ids=np.frombuffer(ids, "<i4").astype(np.int32, copy=False),
        logprobs=None if logprobs is None else np.frombuffer(logprobs, "<f4").astype(np.float32, copy=False),
        versions=tuple(VersionSpan(*span) for span in _spans(versions)),
        call_id=call_id,
        choice=choice,
        extras=extras,
    )


def encode_extras(node: Node) -> list[ExtraRow]:
    """The rows of `extras` after `session`, one a name. Arrays are little-endian on every machine."""
    arrays = {name: np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")) for name, rows in node.extras.items()}
    return [(node.node_id, name, rows.dtype.str, json.dumps(rows.shape), rows.tobytes()) for name, rows in sorted(arrays.items())]


def to_extras(rows: Iterable[ExtraRow]) -> dict[int, dict[str, NDArray[np.generic]]]:
    """What is stored of tokens besides, by node and name; read-only. `ValueError` for an array that is cut."""
    extras: dict[int, dict[str, NDArray[np.generic]]] = {}
    for node_id, name, dtype, shape, body in rows:
        array: NDArray[np.generic] = np.frombuffer(body, dtype).reshape(json.loads(shape))
        extras.setdefault(node_id, {})[name] = array
    return extras


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Row numbers of messages, as `calls.added` holds them."""
    return _encode(numbers)


def message_lists(rows: Iterable[tuple[int, int | None, int, bytes]]) -> dict[int, tuple[int, ...]]:
    """Row numbers of the messages of each call, by `call_no`.

    Args:
        rows: (call_no, base, kept, added) of all calls of a session in order of `call_no`; a base always comes first.
    """
    lists: dict[int, tuple[int, ...]] = {}
    for call_no, base, kept, added in rows:
        inherited = () if base is None else lists[base][:kept]
        lists[call_no] = inherited + _numbers(added)
    return lists


class Tips:
    """The latest lists of messages of each session, for the next call to build on.

    Only a cache: a call that finds no base is stored with its whole list. It knows just the ends of conversations, so that
    memory does not grow with calls × messages.
    """

    def __init__(self) -> None:
        self._tips: dict[int, list[tuple[int, tuple[str, ...]]]] = {}

    def base(self, session: int, hashes: tuple[str, ...]) -> tuple[int | None, int]:
        """(call_no, length) of the known list that shares the longest beginning with `hashes`; (None, 0) without one."""
        best: tuple[int | None, int] = (None, 0)
        for call_no, tip in self._tips.get(session, ()):
            same = shared(tip, hashes)
            if same > best[1]:
                best = (call_no, same)
        return best

    def add(self, session: int, call_no: int, hashes: tuple[str, ...]) -> None:
        """Remember a stored call; the list that it continues is no longer an end."""
        tips = [(number, tip) for number, tip in self._tips.get(session, ()) if tip != hashes[: len(tip)]]
        self._tips[session] = [*tips, (call_no, hashes)][-_MAX_TIPS:]

    def drop(self, session: int) -> None:
        """Forget a session."""
        self._tips.pop(session, None)

    def clear(self) -> None:
        """Forget everything: a transaction was undone, and with it calls that were remembered."""
        self._tips.clear()
