"""Sessions, calls and nodes to store."""

import msgspec
import numpy as np
import xxhash

from polar.chat import Message, RequestedSampling, TextPart
from polar.specs import HarnessProfile, SamplingSpec, VersionSpan
from polar.store.capture import StoredSession
from polar.tokens.records import Call, CallTimings, ChoiceRecord, Node, Position

HEADERS = {"user-agent": "pi/0.3 (linux; x64) node/22.1", "x-stainless-lang": "js", "x-stainless-package-version": "5.1.0"}


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def session(session_id: str = "s1") -> StoredSession:
    return StoredSession(session_id, "ab" * 32, "task-1", HarnessProfile("pi", "0.3"), SamplingSpec(), "policy", "qwen3", 17.5)


def bodies(*texts: str) -> dict[str, bytes]:
    """Messages by hash, as `commit` takes them."""
    return {digest(text.encode()): text.encode() for text in texts}


def call(ordinal: int, *texts: str, session_id: str = "s1", call_id: str = "", reply: str = "Done.") -> Call:
    """A call whose prompt is the messages `texts`."""
    return Call(
        call_id=call_id or f"c{ordinal}abcdefgh",
        session_id=session_id,
        ordinal=ordinal,
        dialect="openai_chat",
        model="policy",
        engine="vllm",
        kind="agent",
        status="ok",
        prompt=Position(2 * ordinal, 7),
        prompt_tokens=1000 + ordinal,
        prompt_hash=digest(b"prompt %d" % ordinal),
        request_hash=digest(b"request %d" % ordinal),
        message_hashes=tuple(bodies(*texts)),
        tools_hash="",
        choices=(ChoiceRecord(2 * ordinal + 1, "stop", Message("assistant", (TextPart(reply),))),),
        logprobs_mode="raw",
        chain=digest(b"chain %d" % ordinal),
        requested=RequestedSampling(temperature=0.2, max_tokens=32000),
        resolved={"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "max_tokens": 8192.0 - ordinal},
        sampled=200,
        parent_call=f"c{ordinal - 1}abcdefgh",
        headers=HEADERS,
        stream=True,
        timings=CallTimings(1.7e9 + 0.125, 1.7e9 + 0.25, 1.7e9 + 0.5, 1.7e9 + 1, 1.7e9 + 2),
    )


def context(node_id: int, ids: list[int], parent: Position | None = None) -> Node:
    return Node(node_id, parent or Position(), "context", np.array(ids, np.int32), None, (), "c0abcdefgh")


def sampled(node_id: int, ids: list[int], parent: Position, logprobs: list[float]) -> Node:
    return Node(
        node_id,
        parent,
        "sampled",
        np.array(ids, np.int32),
        np.array(logprobs, np.float32),
        (VersionSpan(0, len(ids), 3),),
        "c0abcdefgh",
    )


def conversation(turns: int, seed: int = 0) -> list[tuple[list[Node], Call, dict[str, bytes]]]:
    """The commits of a session of `turns` calls: each adds about 300 tokens of context and samples about 200."""
    random = np.random.default_rng(seed)
    commits: list[tuple[list[Node], Call, dict[str, bytes]]] = []
    said: list[str] = []
    end = Position()
    for ordinal in range(turns):
        read, wrote = int(random.integers(150, 450)), int(random.integers(100, 300))
        user, answer = _text(random, 4 * read), _text(random, 4 * wrote)
        said.append(user)
        nodes = [
            context(2 * ordinal, random.integers(0, 150_000, read).tolist(), end),
            sampled(2 * ordinal + 1, random.integers(0, 150_000, wrote).tolist(), Position(2 * ordinal, read), [-0.5] * wrote),
        ]
        commits.append((nodes, call(ordinal, *said, reply=answer), bodies(*said[-2:])))
        said.append(msgspec.json.encode(Message("assistant", (TextPart(answer),))).decode())
        end = Position(2 * ordinal + 1, wrote)
    return commits


def _text(random: np.random.Generator, length: int) -> str:
    return random.bytes(length // 2).hex()
