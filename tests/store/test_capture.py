"""What a capture file keeps of a session, and what it refuses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from polar.chat import Message, RequestedSampling, TextPart, ToolCall
from polar.errors import StoreError, UsageError
from polar.specs import Finding, VersionSpan
from polar.store.capture import NOTES_AFTER, CaptureReader, CaptureStore
from polar.tokens.records import Call, CallTimings, ChoiceRecord, Node, Position
from tests.store.samples import bodies, call, context, conversation, digest, sampled, session

replace = msgspec.structs.replace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "capture.sqlite"


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[CaptureStore]:
    """A store with session `s1` open."""
    store = CaptureStore.open(path)
    await store.open_session(session())
    yield store
    await store.close()


# Sessions


async def test_a_session_is_read_as_it_was_opened(store: CaptureStore, path: Path) -> None:
    other = replace(session("s2"), metadata={"split": "train"})
    await store.open_session(other)
    reader = CaptureReader.open(path)
    assert reader.sessions() == [session(), other]
    assert reader.session("s2") == other


async def test_a_frozen_session_is_read_as_frozen(store: CaptureStore, path: Path) -> None:
    await store.freeze("s1")
    await store.freeze("s1")
    assert CaptureReader.open(path).session("s1") == replace(session(), frozen=True)


async def test_a_session_is_opened_once(store: CaptureStore) -> None:
    with pytest.raises(StoreError, match="session s1 is already in"):
        await store.open_session(session())


async def test_an_unknown_session_is_named(store: CaptureStore, path: Path) -> None:
    with pytest.raises(StoreError, match="session s9 was not opened"):
        await store.commit("s9", [], [], {})
    with pytest.raises(StoreError, match="session s9 was not opened"):
        await store.freeze("s9")
    reader = CaptureReader.open(path)
    for read in (reader.session, reader.calls, reader.nodes):
        with pytest.raises(UsageError, match="there is no session s9"):
            read("s9")


# Nodes


async def test_nodes_are_read_by_id_with_their_own_types(store: CaptureStore, path: Path) -> None:
    first, second = context(0, [1, 2, 3]), sampled(1, [-1, 2**31 - 1], Position(0, 3), [-0.25, float("-inf")])
    await store.commit("s1", [second, first], [], {})
    context_node, sampled_node = CaptureReader.open(path).nodes("s1")
    assert (context_node.kind, context_node.parent, context_node.logprobs, context_node.versions) == (
        "context",
        Position(),
        None,
        (),
    )
    assert (sampled_node.node_id, sampled_node.kind, sampled_node.parent) == (1, "sampled", Position(0, 3))
    assert (sampled_node.call_id, sampled_node.choice, sampled_node.versions) == ("c0abcdefgh", 0, (VersionSpan(0, 2, 3),))
    assert sampled_node.ids.dtype == np.int32
    assert sampled_node.ids.tolist() == [-1, 2**31 - 1]
    assert sampled_node.logprobs is not None
    assert sampled_node.logprobs.dtype == np.float32


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)), min_size=1))
def test_ids_and_logprobs_come_back_bit_for_bit(tokens: list[tuple[int, int]]) -> None:
    ids = np.array([token for token, _ in tokens], np.int32)
    logprobs = np.array([bits for _, bits in tokens], np.uint32).view(np.float32)  # every float there is, NaNs too
    node = Node(0, Position(), "sampled", ids, logprobs, (VersionSpan(0, len(ids), 1),), "c0")
    with TemporaryDirectory() as directory:
        path = Path(directory) / "capture.sqlite"
        asyncio.run(write(path, node))
        (back,) = CaptureReader.open(path).nodes("s1")
    assert back.logprobs is not None
    assert (back.ids.tobytes(), back.logprobs.tobytes()) == (ids.tobytes(), logprobs.tobytes())


async def write(path: Path, node: Node) -> None:
    store = CaptureStore.open(path)
    await store.open_session(session())
    await store.commit("s1", [node], [], {})
    await store.close()


async def test_the_same_node_again_is_fine(store: CaptureStore, path: Path) -> None:
    for _ in range(2):
        await store.commit("s1", [context(0, [1, 2])], [], {})
    assert len(CaptureReader.open(path).nodes("s1")) == 1


async def test_a_node_is_never_overwritten(store: CaptureStore, path: Path) -> None:
    await store.commit("s1", [context(0, [1, 2])], [], {})
    with pytest.raises(StoreError, match="node 0 of session s1 is stored with other content"):
        await store.commit("s1", [context(0, [1, 3])], [], {})
    assert CaptureReader.open(path).nodes("s1")[0].ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (context(0, []), "a node has at least one token"),
        (sampled(0, [1, 2], Position(), [-0.5]), "a sampled node has one logprob per token"),
        (Node(0, Position(), "sampled", np.array([1], np.int32), None, (), "c0"), "a sampled node has one logprob per token"),
    ],
)
async def test_a_node_that_cannot_be_is_refused(store: CaptureStore, node: Node, why: str) -> None:
    with pytest.raises(StoreError, match=f"node 0 of session s1 is refused: .*{why}"):
        await store.commit("s1", [node], [], {})


# Calls


async def test_every_field_of_a_call_comes_back(store: CaptureStore, path: Path) -> None:
    said = Message("assistant", (TextPart("let me see"),), "hm", (ToolCall("call_c3_0_0", "bash", '{"command": "ls"'),))
    full = replace(
        call(3, "system", "user"),
        kind="compaction",
        status="aborted",
        tools_hash=digest(b"tools"),
        choices=(ChoiceRecord(1, "tool_calls", said), ChoiceRecord(None, "abort", Message("assistant"))),
        requested=RequestedSampling(0.5, 0.9, 20, 4096, 7),
        parent_call="c1abcdefgh",
        fork_reason="history_rewritten",
        replaces="c2abcdefgh",
        derived_from="c0abcdefgh",
        tail=2,
        constrained=True,
        normalisers=("cache_control",),
        unserved=("service_tier",),
        untrained="external",
        delivered=True,
        headers={"user-agent": "pi/0.3"},
        extra={"store": Raw(b"false"), "metadata": Raw(b'{ "user":"x" }')},
        findings=(Finding("T14", "a token was trimmed", "c3abcdefgh"),),
        timings=CallTimings(1.1, 2.2, 3.3, 4.4, 5.5),
        error="the client hung up",
    )
    plain = call(4, "system", "user")
    left_out = [name for name, default in defaults() if getattr(full, name) == default]
    assert left_out == []  # a new field of Call must be set above, and stored
    await store.commit("s1", [], [full, plain], bodies("system", "user", "tools"))
    assert CaptureReader.open(path).calls("s1") == [full, plain]


def defaults() -> list[tuple[str, object]]:
    fields = msgspec.structs.fields(Call)
    return [(field.name, {} if field.default is msgspec.NODEFAULT else field.default) for field in fields if not field.required]


async def test_calls_are_read_in_order_of_arrival(store: CaptureStore, path: Path) -> None:
    for ordinal in (2, 0, 1):
        await store.commit("s1", [], [call(ordinal)], {})
    assert [call.ordinal for call in CaptureReader.open(path).calls("s1")] == [0, 1, 2]


async def test_a_call_may_be_written_again_when_its_status_changes(store: CaptureStore, path: Path) -> None:
    first = call(0, "system", "user")
    await store.commit("s1", [], [first], bodies("system", "user"))
    later = replace(first, status="aborted", findings=(Finding("superseded", "asked again"),))
    await store.commit("s1", [], [later], {})
    assert CaptureReader.open(path).calls("s1") == [later]


async def test_what_was_delivered_stays_delivered(store: CaptureStore, path: Path) -> None:
    await store.commit("s1", [], [call(0), call(1)], {})
    store.note_delivered("s1", "c0abcdefgh")
    await store.flush()
    await store.commit("s1", [], [call(0)], {})
    assert [call.delivered for call in CaptureReader.open(path).calls("s1")] == [True, False]


@pytest.mark.parametrize("with_what", ["commit", "freeze", "time"])
async def test_a_delivery_is_stored_with_what_comes_next(store: CaptureStore, path: Path, with_what: str) -> None:
    await store.commit("s1", [], [call(0), call(1)], {})
    store.note_delivered("s1", "c0abcdefgh")
    if with_what == "commit":
        await store.commit("s1", [], [call(1)], {})
    elif with_what == "freeze":
        await store.freeze("s1")
    else:
        await asyncio.sleep(2 * NOTES_AFTER)
    assert [call.delivered for call in CaptureReader.open(path).calls("s1")] == [True, False]


async def test_a_delivery_that_could_not_be_stored_goes_with_the_next_commit(store: CaptureStore, path: Path) -> None:
    await store.commit("s1", [], [call(0)], {})
    store.note_delivered("s1", "c0abcdefgh")
    with pytest.raises(StoreError):
        await store.commit("nowhere", [], [call(1)], {})
    await store.commit("s1", [], [call(1)], {})
    assert [call.delivered for call in CaptureReader.open(path).calls("s1")] == [True, False]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (call(0, "user", call_id="c9"), "ordinal 0 of session s1 is taken by another call"),
        (call(1, "user", call_id="c0abcdefgh"), "call c0abcdefgh is stored with another ordinal or other messages"),
        (call(0, "user", "user 2"), "call c0abcdefgh is stored with another ordinal or other messages"),
        (call(1, "user", session_id="s2"), "call c1abcdefgh belongs to session s2, not to s1"),
        (call(1, "user", "unheard"), f"call c1abcdefgh names message {digest(b'unheard')}, which is neither stored nor given"),
        (replace(call(1), tools_hash="t" * 32), "call c1abcdefgh names message t{32}, which is neither stored nor given"),
    ],
)
async def test_a_call_that_contradicts_the_file_is_refused(store: CaptureStore, path: Path, second: Call, why: str) -> None:
    await store.commit("s1", [], [call(0, "user")], bodies("user", "user 2"))
    with pytest.raises(StoreError, match=why):
        await store.commit("s1", [], [second], {})
    assert CaptureReader.open(path).calls("s1") == [call(0, "user")]


async def test_a_commit_is_written_whole_or_not_at_all(store: CaptureStore, path: Path) -> None:
    with pytest.raises(StoreError, match="neither stored nor given"):
        await store.commit("s1", [context(0, [1])], [call(0, "user"), call(1, "unheard")], bodies("user"))
    reader = CaptureReader.open(path)
    assert (reader.nodes("s1"), reader.calls("s1")) == ([], [])
    with pytest.raises(StoreError, match="messages are not in"):
        reader.messages(bodies("user"))


async def test_a_commit_that_failed_leaves_no_trace_in_later_ones(store: CaptureStore, path: Path) -> None:
    with pytest.raises(StoreError, match="neither stored nor given"):
        await store.commit("s1", [], [call(0, "system", "user"), call(1, "unheard")], bodies("system", "user"))
    await store.commit("s1", [], [call(0, "other")], bodies("other"))
    await store.commit("s1", [], [call(1, "system", "user")], bodies("system", "user"))
    assert CaptureReader.open(path).calls("s1") == [call(0, "other"), call(1, "system", "user")]


# Messages


async def test_messages_live_once_for_all_sessions(store: CaptureStore, path: Path) -> None:
    await store.open_session(session("s2"))
    await store.commit("s1", [], [call(0, "system")], bodies("system"))
    await store.commit("s2", [], [call(0, "system", session_id="s2")], {})
    assert CaptureReader.open(path).messages(bodies("system")) == bodies("system")


async def test_a_missing_message_is_named(store: CaptureStore, path: Path) -> None:
    await store.commit("s1", [], [], bodies("system"))
    with pytest.raises(StoreError, match=f"1 of 2 messages are not in .*the first is {digest(b'user')}"):
        CaptureReader.open(path).messages(bodies("system", "user"))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.one_of(st.text("abc", max_size=8), st.just("restart")), min_size=1, max_size=30))
def test_lists_of_messages_survive_forks_side_conversations_and_restarts(histories: list[str]) -> None:
    calls = [call(ordinal, *history) for ordinal, history in enumerate(histories) if history != "restart"]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "capture.sqlite"
        asyncio.run(write_calls(path, histories))
        assert CaptureReader.open(path).calls("s1") == calls


async def write_calls(path: Path, histories: list[str]) -> None:
    store = CaptureStore.open(path)
    await store.open_session(session())
    for ordinal, history in enumerate(histories):
        if history == "restart":
            await store.close()
            store = CaptureStore.open(path)
        else:
            await store.commit("s1", [], [call(ordinal, *history)], bodies(*history))
    await store.close()


# Many callers, and size


async def test_a_bad_commit_fails_alone(store: CaptureStore, path: Path) -> None:
    commits = [store.commit("s1", [context(0 if index == 7 else index, [index + 1])], [], {}) for index in range(20)]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, StoreError)] == [7]
    assert [node.node_id for node in CaptureReader.open(path).nodes("s1")] == [index for index in range(20) if index != 7]


async def test_a_reader_sees_each_commit_of_a_writer_at_work(store: CaptureStore, path: Path) -> None:
    reader = CaptureReader.open(path)
    for ordinal, (nodes, record, messages) in enumerate(conversation(5)):
        await store.commit("s1", nodes, [record], messages)
        assert reader.calls("s1")[ordinal] == record
        assert len(reader.nodes("s1")) == 2 * ordinal + 2


def test_a_long_session_costs_little_more_than_its_tokens(path: Path) -> None:
    commits = conversation(200)
    asyncio.run(write_conversation(path, commits))
    tokens = sum(len(node.ids) for nodes, _, _ in commits for node in nodes)
    messages = {key: body for *_, given in commits for key, body in given.items()}
    replies = [choice.message.text for _, record, _ in commits for choice in record.choices]
    texts = sum(map(len, messages.values())) + sum(map(len, replies))
    assert 95_000 < tokens < 105_000
    assert path.stat().st_size - texts <= 1.2 * (4 + 4) * tokens
    assert CaptureReader.open(path).calls("s1") == [record for _, record, _ in commits]


async def write_conversation(path: Path, commits: list[tuple[list[Node], Call, dict[str, bytes]]]) -> None:
    store = CaptureStore.open(path)
    await store.open_session(session())
    for nodes, record, messages in commits:
        await store.commit("s1", nodes, [record], messages)
    await store.close()
