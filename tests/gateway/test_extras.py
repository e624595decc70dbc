"""What an engine tells of each token besides: from vLLM's wire into the store, and out to a trainer.

The real vLLM tells them on a GPU only (its CPU build has no Triton), so the scripted engine speaks in its shapes: the experts
as base64 of a `.npy` at the end, of all tokens but the last; the ids that could be sampled as lists, with each token.
"""

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from polar.audit.session import audit_session
from polar.engines.scripted import Logged, Scripted, ScriptedCall
from polar.engines.scripted_generation import experts, support
from polar.errors import StoreError
from polar.specs import SamplingSpec
from polar.store.capture import CaptureReader, CaptureStore
from polar.tokens.records import Node
from polar.trajectory.builders import Captured, build
from polar.trajectory.forest import NONE, Forest, forest, join
from polar.trajectory.tensors import ForestTensors, TensorFile, read_forest
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import Conversation

LONG = Scripted("and so it goes on " * 5, extras=True)


async def told(stand: Stand, turns: int, **extra: object) -> Captured:
    session_id, key = await stand.open()
    talk = Conversation(stand.client(key), tools=None)
    for turn in range(turns):
        await talk.ask(stream=turn % 2 == 0, **extra)
        talk.messages.append({"role": "user", "content": "Go on."})
    captured = await stand.captured(session_id)
    assert audit_session(captured, None, stand.renderer) == []
    return captured


def passed(entry: Logged, count: int) -> list[list[list[int]]]:
    """The experts of the passes that sampled the first `count` tokens: each is the pass of the token before."""
    return [experts(token) for token in [entry.prompt_ids[-1], *entry.ids][:count]]


def padded(ids: Sequence[int]) -> list[list[int]]:
    masks = [support(token) for token in ids]
    width = max(map(len, masks))
    return [mask + [-1] * (width - len(mask)) for mask in masks]


def sampled(captured: Captured) -> list[Node]:
    return [node for node in captured.nodes if node.kind == "sampled"]


async def test_each_sampled_token_has_the_experts_of_its_pass_and_what_could_have_been_sampled(serve: Serve) -> None:
    async with serve(lambda call: LONG) as stand:
        captured = await told(stand, 3)
    for node, entry in zip(sampled(captured), stand.log, strict=True):
        assert node.ids.tolist() == entry.ids
        assert node.extras["routed_experts"].dtype == np.uint8
        assert node.extras["routed_experts"].tolist() == passed(entry, len(entry.ids))
        assert node.extras["sampling_mask"].tolist() == padded(entry.ids)
    assert all(not node.extras for node in captured.nodes if node.kind == "context")


async def test_an_engine_that_tells_experts_is_asked_for_those_of_sampled_tokens_alone(serve: Serve) -> None:
    async with serve(lambda call: LONG) as stand:
        captured = await told(stand, 3)
    lengths = [call.prompt_tokens for call in captured.calls]
    assert [entry.experts_from for entry in stand.log] == [0, lengths[1] - 1, lengths[2] - 1]


async def test_the_tail_after_a_stop_text_is_cut_off_them_too(serve: Serve) -> None:
    async with serve(lambda call: Scripted("one two three four five six", tokens_per_chunk=50, extras=True)) as stand:
        captured = await told(stand, 1, stop=["three"])
    (node,), (entry,), (call,) = sampled(captured), stand.log, captured.calls
    assert 0 < call.tail == len(entry.ids) - len(node.ids)
    assert node.extras["routed_experts"].tolist() == passed(entry, len(node.ids))
    assert len(node.extras["sampling_mask"]) == len(node.ids)


async def test_an_engine_that_tells_nothing_costs_nothing(serve: Serve) -> None:
    async with serve(lambda call: Scripted("x")) as stand:
        captured = await told(stand, 1)
        assert not any(node.extras for node in captured.nodes)
        assert forest(captured, reward=1.0).extras == {}


async def test_a_token_without_its_row_fails_the_call(serve: Serve) -> None:
    async with serve(lambda call: Scripted("one two three", extras=True, fault="missing_extra")) as stand:
        session_id, key = await stand.open()
        assert await stand.post(key, {"model": "policy", "messages": [{"role": "user", "content": "Do it."}]}) == 500
        (call,) = (await stand.captured(session_id)).calls
    assert (call.status, [finding.code for finding in call.findings]) == ("failed", ["T08"])
    assert "rows of sampling_mask" in call.error


async def test_a_grammars_tokens_stay_out_of_training_with_their_mask(serve: Serve) -> None:
    async with serve(lambda call: LONG) as stand:
        session_id, key = await stand.open(sampling=SamplingSpec(regex=".*"))
        await Conversation(stand.client(key), tools=None).ask()
        captured = await stand.captured(session_id)
    trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
    assert dict(trajectory.accounting.excluded) == {"constrained": trajectory.accounting.sampled}
    assert "sampling_mask" in sampled(captured)[0].extras


async def test_a_trainer_gets_a_row_for_each_trained_token(serve: Serve) -> None:
    """Sessions with and without them, side by side: where an engine told nothing there is -1."""

    def script(call: ScriptedCall) -> Scripted:
        return Scripted("x") if "Quiet" in call.prompt_text else LONG

    async with serve(script) as stand:
        sessions = []
        for opening in ("Do it.", "Quiet, please.", "Do it again."):
            session_id, key = await stand.open()
            talk = Conversation(stand.client(key), [{"role": "user", "content": opening}], None)
            for _ in range(2):
                await talk.ask()
                talk.messages.append({"role": "user", "content": "Go on."})
            sessions.append(forest(await stand.captured(session_id), reward=1.0))
    entries = {entry.request_id: entry for entry in stand.log}
    quiet = set(sessions[1].call_ids)
    for found in (join(sessions), written(sessions)):
        order = [call_id for call_id, trace in zip(found.call_ids, found.traces.tolist(), strict=True) if trace != NONE]
        assert trained(found) == [token for call_id in order for token in entries[call_id].ids]
        expected = [row for call_id in order for row in rows(entries[call_id], quiet=call_id in quiet)]
        assert found.extras["routed_experts"].tolist() == expected
        assert found.extras["sampling_mask"].shape == (len(expected), 3)
    assert sessions[1].extras == {}


def rows(entry: Logged, *, quiet: bool) -> list[list[list[int]]]:
    return [[[-1, -1], [-1, -1]]] * len(entry.ids) if quiet else passed(entry, len(entry.ids))


def trained(found: Forest) -> list[int]:
    return [int(token) for token in found.ids[found.loss_mask == 1]]


def written(sessions: Sequence[Forest]) -> Forest:
    """What comes back from a file of them."""
    tensors, file = TensorFile(ForestTensors(), io.BytesIO), io.BytesIO()
    for one in sessions:
        tensors.add(one)
    tensors.pour(file)
    return read_forest(file.getvalue())


async def test_a_node_never_changes_what_is_told_of_it(serve: Serve) -> None:
    async with serve(lambda call: LONG) as stand:
        captured = await told(stand, 1)
    store = CaptureStore.open(stand.capture)
    (node,) = sampled(captured)
    await store.commit(captured.calls[0].session_id, [node], [], {})
    other = {**node.extras, "sampling_mask": np.zeros((len(node.ids), 3), np.int32)}
    with pytest.raises(StoreError, match="sampling_mask of node 1 .* nodes never change"):
        await store.commit(captured.calls[0].session_id, [replace(node, extras=other)], [], {})
    await store.close()
    reader = CaptureReader.open(stand.capture)
    (stored,) = (one for one in reader.nodes(captured.calls[0].session_id) if one.kind == "sampled")
    assert stored.extras["sampling_mask"].tolist() == node.extras["sampling_mask"].tolist()
    reader.close()
