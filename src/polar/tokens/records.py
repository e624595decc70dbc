"""What is recorded of a session: calls, and the nodes of its token tree."""

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Raw, Struct

from polar.chat import FinishReason, Message, RequestedSampling
from polar.specs import NO_EXTRAS, CallKind, Extras, Finding, Float32Array, Int32Array, VersionSpan

ROOT = -1  # the parent of a first node: an empty context
CallStatus = Literal["ok", "aborted", "failed"]
NodeKind = Literal["context", "sampled"]
Untrained = Literal["", "external", "unproven"]


class Position(Struct, frozen=True, order=True):
    """A place in the tree: after the first `offset` tokens of node `node`. The empty context is `Position(ROOT, 0)`."""

    node: int = ROOT
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Node:
    """A span of tokens; immutable.

    Attributes:
        node_id: dense from 0 in the order of making, within a session.
        parent: where this span begins.
        ids: int32[n], n ≥ 1.
        logprobs: float32[n] for a sampled node, None for context.
        versions: for a sampled node, spans that cover its n tokens.
        call_id, choice: for a sampled node, the call and choice that sampled it; for context, the call that brought it.
        extras: for a sampled node, what the engine told besides of each of its n tokens (`routed_experts`, `sampling_mask`).
    """

    node_id: int
    parent: Position
    kind: NodeKind
    ids: Int32Array
    logprobs: Float32Array | None
    versions: tuple[VersionSpan, ...]
    call_id: str
    choice: int = 0
    extras: Extras = field(default_factory=lambda: NO_EXTRAS)


class ChoiceRecord(Struct, frozen=True):
    """One answer of a call.

    Attributes:
        node: the sampled node; None where nothing was sampled.
        message: the assistant message as the harness got it.
        stop_sequence: the requested stop text that ended it; the sampled node keeps that text, the message does not.
    """

    node: int | None
    finish_reason: FinishReason | Literal["abort"]
    message: Message
    stop_sequence: str = ""


class CallTimings(Struct, frozen=True, omit_defaults=True):
    """Unix seconds; 0 where it never came to that."""

    received: float = 0.0
    sent: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    committed: float = 0.0


class Call(Struct, frozen=True, omit_defaults=True):
    """One model call of a harness.

    Attributes:
        ordinal: 0, 1, … in order of arrival in the session.
        prompt: where in the tree the prompt ends.
        prompt_tokens, prompt_hash: of the ids as they went to the engine (xxh3_128 over little-endian int32, hex).
        request_hash: of the request's body, to tell a retry from a new sample.
        message_hashes: the prompt's messages in the content-addressed table; `tools_hash` likewise its tools.
        chain: fingerprint of tools and prompt messages, which lineage follows.
        sampled: tokens that the engine sampled for this call; its nodes hold all but a `tail`, unless they are untrusted.
        parent_call: the call whose reply this prompt continues, or for a fork the one that it left; "" at a root.
        fork_reason: why the prompt is not spliced from stored ids (`history_rewritten`, `tools_changed`, …); "" if it is.
        delivered: the reply's last byte went out.
        replaces: the call that this one supersedes (a hung-up stream that was asked again).
        derived_from: for a root or a fork after a compaction, the call that wrote the summary it stands on.
        tail: tokens of `sampled` that came after a stop text; they are dropped, and stand in no node.
        constrained: sampled under a grammar (`response_format`): the log-probabilities are of the masked distribution (L05).
        normalisers: names of what was read as if it were not there, or spelled otherwise than we sent it.
        unserved: names of what the harness asked and the policy was not given.
        untrained: why nothing of it is ever trained: `external` (another model answered), `unproven` (its engine shows no ids,
            or nobody can tell which of them a stop text left over); "" for the policy's own. Such a call may stand nowhere in
            the tree: then `prompt` is the empty context, no choice has a node, and the counts are the engine's.
    """

    call_id: str
    session_id: str
    ordinal: int
    dialect: str
    model: str
    engine: str
    kind: CallKind
    status: CallStatus
    prompt: Position
    prompt_tokens: int
    prompt_hash: str
    request_hash: str
    message_hashes: tuple[str, ...]
    tools_hash: str
    choices: tuple[ChoiceRecord, ...]
    logprobs_mode: str
    chain: str
    requested: RequestedSampling
    resolved: dict[str, float]
    sampled: int = 0
    parent_call: str = ""
    fork_reason: str = ""
    replaces: str = ""
    derived_from: str = ""
    tail: int = 0
    constrained: bool = False
    normalisers: tuple[str, ...] = ()
    unserved: tuple[str, ...] = ()
    untrained: Untrained = ""
    delivered: bool = False
    stream: bool = False
    headers: dict[str, str] = {}
    extra: dict[str, Raw] = {}
    findings: tuple[Finding, ...] = ()
    timings: CallTimings = CallTimings()
    error: str = ""
