"""Whoever goes at the worst moment: clients, engines, disks, and those who close a session meanwhile."""

import asyncio
import gc
import json
import logging
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from polar.errors import EngineError, StoreError
from polar.gateway import app as app_module
from polar.gateway import calls as calls_module
from polar.specs import HarnessProfile, Int32Array
from polar.tokens.history import History, Plan
from polar.tokens.rendering import Renderer
from polar.tokens.tree import TokenTree
from polar.trajectory.builders import build
from tests.gateway.puppets import Client, Stage, staged, until

Open = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture(params=["token-in", "chat"])
def stage(policy_renderer: Renderer, tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    """`async with stage() as s`: whoever renders, the same holds."""

    def open_stage(renderer: Renderer = policy_renderer, grace: float = 30.0) -> AbstractAsyncContextManager[Stage]:
        chat = request.param == "chat"
        return staged(renderer, tmp_path / "capture.db", HarnessProfile(retry_grace=grace), chat=chat)

    return open_stage


@pytest.fixture
def hello(policy_tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = policy_tokenizer.encode("Hello there.", add_special_tokens=False).ids
    return ids


async def finish(s: Stage, number: int, ids: list[int]) -> None:
    generation = await s.engine.generation(number)
    generation.say(ids)
    generation.stop()


def statuses(record: Any) -> list[str]:
    return [call.status for call in record.calls]


# A client that goes


async def test_before_its_request_is_complete_nothing_happens(stage: Open) -> None:
    async with stage() as s:
        client = Client(s.app, s.key, b"", pieces=3)
        unfinished = Client(s.app, s.key, None)
        for gone in (client, unfinished):
            gone.hang_up()
        await asyncio.gather(client.task, unfinished.task)
        assert (unfinished.status, s.engine.generations, (await s.settled()).calls) == (0, [], [])


async def test_a_stream_that_ends_before_the_first_token_frees_the_engine(stage: Open) -> None:
    async with stage() as s:
        client = s.ask(stream=True)
        generation = await s.engine.generation(0)
        client.hang_up()
        await client.task
        await until(lambda: generation.closed)
        assert (client.status, generation.aborted) == (0, True)
        (call,) = (await s.settled()).calls
        assert (call.status, call.sampled, call.choices[0].node) == ("aborted", 0, None)


async def test_a_stream_that_ends_while_its_answer_is_committed_is_replayed(stage: Open, hello: list[int]) -> None:
    """It is too late to abort, so the answer exists, and the same request again is a retry of it (D9)."""
    async with stage() as s:
        s.store.gate.clear()
        client = s.ask(stream=True)
        await finish(s, 0, hello)
        await until(lambda: s.store.waiting)
        client.hang_up()
        await client.task
        retry = s.ask(stream=True)
        await asyncio.sleep(0.01)
        s.store.gate.set()
        await retry.task
        assert b"Hello there." in retry.received
        assert len(s.engine.generations) == 1
        (call,) = (await s.settled()).calls
        assert (call.status, call.delivered) == ("ok", True)


@pytest.mark.parametrize("stream", [True, False])
async def test_between_commit_and_last_byte_the_answer_stays_undelivered(stage: Open, hello: list[int], stream: bool) -> None:
    async with stage() as s:
        s.store.gate.clear()
        client = s.ask(stream=stream)
        await finish(s, 0, hello)
        await until(lambda: s.store.waiting)
        s.store.gate.set()
        client.hang_up()
        await client.task
        await until(lambda: not s.runs)
        assert not client.complete
        assert [call.delivered for call in s.stored().calls] == [False]
        retry = s.ask(stream=stream)
        await retry.task
        assert b"Hello there." in retry.received
        assert [call.delivered for call in (await s.settled()).calls] == [True]


async def test_a_retry_after_the_grace_is_a_new_call_and_supersedes(stage: Open, hello: list[int]) -> None:
    """The first is being aborted by an engine that does not listen: nobody may join it any more."""
    async with stage(grace=0.01) as s:
        s.engine.deaf = True
        client = s.ask()
        first = await s.engine.generation(0)
        first.say(hello)
        client.hang_up()
        await client.task
        run = next(iter(s.sessions.by_id(s.session_id).runs))
        await until(lambda: run.stopped)
        retry = s.ask()
        await finish(s, 1, hello)
        assert await retry.text() == "Hello there."
        first.steps.put_nowait("abort")
        record = await s.settled()
        assert statuses(record) == ["aborted", "ok"]
        assert record.calls[1].replaces == record.calls[0].call_id
        accounting = build(record, builder="prefix_merging", status="completed", reward=1.0).accounting
        assert accounting.excluded == {"superseded": len(hello)}


async def test_a_retry_within_the_grace_joins_and_its_own_client_may_go_too(stage: Open, hello: list[int]) -> None:
    async with stage(grace=0.2) as s:
        for _ in range(3):
            client = s.ask()
            await s.engine.generation(0)
            await asyncio.sleep(0.01)
            client.hang_up()
            await client.task
        last = s.ask()
        await asyncio.sleep(0.3)
        await finish(s, 0, hello)
        assert await last.text() == "Hello there."
        assert [(call.status, call.delivered) for call in (await s.settled()).calls] == [("ok", True)]


async def test_the_grace_ends_quietly_when_the_engine_has_died_in_it(stage: Open) -> None:
    async with stage(grace=0.02) as s:
        client = s.ask()
        generation = await s.engine.generation(0)
        client.hang_up()
        await client.task
        s.store.gate.clear()
        generation.fail(EngineError("gone"))
        await asyncio.sleep(0.05)
        s.store.gate.set()
        assert statuses(await s.settled()) == ["failed"]


async def test_a_server_that_cancels_its_handlers_loses_no_call(stage: Open, hello: list[int]) -> None:
    async with stage() as s:
        for number, stream in enumerate((True, False)):
            client = s.ask(stream=stream)
            generation = await s.engine.generation(number)
            generation.say(hello)
            client.task.cancel()
            await asyncio.gather(client.task, return_exceptions=True)
        record = await s.settled()
        assert statuses(record) == ["aborted", "aborted"]
        assert [call.sampled for call in record.calls] == [len(hello)] * 2


async def test_two_equal_requests_at_once_are_two_samples(stage: Open, hello: list[int]) -> None:
    async with stage() as s:
        one, other = s.ask(), s.ask()
        for number in (1, 0):
            await finish(s, number, hello)
        assert (await one.text(), await other.text()) == ("Hello there.", "Hello there.")
        record = await s.settled()
        assert [(call.status, call.replaces) for call in record.calls] == [("ok", "")] * 2
        assert len(build(record, builder="prefix_merging", status="completed", reward=1.0).traces) == 2


# An engine that goes, or never comes


@pytest.mark.parametrize("who", ["client", "freeze", "both"])
async def test_whoever_stops_a_call_while_its_failure_is_recorded_breaks_nothing(stage: Open, who: str) -> None:
    async with stage() as s:
        client = s.ask(stream=True)
        generation = await s.engine.generation(0)
        s.store.gate.clear()
        generation.fail(EngineError("gone"))
        await until(lambda: s.store.waiting)
        if who != "freeze":
            client.hang_up()
            await client.task
        freezing = asyncio.create_task(s.sessions.freeze(s.session_id)) if who != "client" else None
        await asyncio.sleep(0.01)
        s.store.gate.set()
        await asyncio.gather(client.task, *([freezing] if freezing else []))
        (call,) = (await s.settled()).calls
        assert (call.status, call.findings[0].code) == ("failed", "EngineError")


async def test_an_engine_that_never_speaks_is_left_in_peace_until_the_client_goes(
    stage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "HEADERS_AFTER", 0.01)
    monkeypatch.setattr(app_module, "KEEP_ALIVE_EVERY", 0.01)
    monkeypatch.setattr(calls_module, "ABORT_PATIENCE", 0.05)
    async with stage() as s:
        s.engine.deaf = True
        client = s.ask(stream=True)
        await until(lambda: client.received.count(b'"choices":[]') > 2)
        client.hang_up()
        await client.task
        await until(lambda: not s.runs)
        assert s.engine.generations[0].closed
        assert statuses(await s.settled()) == ["aborted"]


async def test_an_engine_that_ends_without_an_end_fails_the_call(stage: Open, hello: list[int]) -> None:
    async with stage() as s:
        client = s.ask()
        generation = await s.engine.generation(0)
        generation.say(hello)
        generation.fail(None)
        answer = await client.answer()
        assert (client.status, answer["error"]["code"]) == (500, "capture_error")
        record = await s.settled()
        assert build(record, builder="prefix_merging", status="completed", reward=1.0).accounting.excluded == {
            "untrusted": len(hello)
        }


@pytest.mark.parametrize("stream", [True, False])
async def test_a_parser_that_breaks_fails_the_call_and_no_other(
    stage: Open, hello: list[int], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with stage() as s:
        client = s.ask(stream=stream)
        generation = await s.engine.generation(0)
        (run,) = s.sessions.by_id(s.session_id).runs
        monkeypatch.setattr(run._choices[0]._reader, "push", lambda ids, deltas: 1 // 0)
        generation.say(hello)
        await client.task
        assert (client.status, generation.closed) == (500, True)
        second = s.ask(content="Again")
        await finish(s, 1, hello)
        assert await second.text() == "Hello there."
        assert statuses(await s.settled()) == ["failed", "ok"]


# A disk that fails


@pytest.mark.parametrize("fault", [StoreError("disk full"), OverflowError("a value that cannot be stored")])
async def test_an_answer_that_could_not_be_stored_is_refused_and_the_session_goes_on(
    stage: Open, hello: list[int], fault: Exception
) -> None:
    async with stage() as s:
        s.store.faults = [fault]
        client = s.ask()
        await finish(s, 0, hello)
        assert "error" in await client.answer()
        assert client.status in (500, 503)
        second = s.ask()
        await finish(s, 1, hello)
        assert await second.text() == "Hello there."
        record = await s.settled()
        assert statuses(record) == ["failed", "ok"]
        assert build(record, builder="prefix_merging", status="completed", reward=1.0).accounting.trained == len(hello) + 1


@pytest.mark.parametrize("fault", [StoreError("disk full"), OverflowError("a value that cannot be stored")])
async def test_a_call_that_could_not_be_recorded_is_recorded_with_the_next(
    stage: Open, hello: list[int], fault: Exception
) -> None:
    async with stage() as s:
        s.store.faults = [fault, fault]
        client = s.ask()
        await finish(s, 0, hello)
        assert "error" in await client.answer()
        assert s.stored().calls == []
        second = s.ask()
        await finish(s, 1, hello)
        assert await second.text() == "Hello there."
        record = await s.settled()
        assert statuses(record) == ["failed", "ok"]
        accounting = build(record, builder="prefix_merging", status="completed", reward=1.0).accounting
        assert accounting.excluded == {"untrusted": len(hello) + 1}


async def test_an_answer_never_leaves_before_the_nodes_that_it_stands_on_are_stored(stage: Open, hello: list[int]) -> None:
    """Two calls of one session commit at once; the first, which made the shared context, fails."""
    async with stage() as s:
        first, second = s.ask(content="Shared words. One."), s.ask(content="Shared words. Two.")
        await s.engine.generation(1)
        s.store.gate.clear()
        s.store.faults = [StoreError("disk full"), None, StoreError("disk full"), StoreError("disk full")]
        await finish(s, 0, hello)
        await until(lambda: s.store.waiting)
        await finish(s, 1, hello)
        await asyncio.sleep(0.01)
        s.store.gate.set()
        done, _ = await asyncio.wait({first.task, second.task}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert done
        record = s.stored()
        tree = TokenTree(record.nodes)
        assert [tree.path(call.prompt).tolist() for call in record.calls] == [s.engine.generations[1].prompt_ids]
        await asyncio.gather(first.task, second.task)
        s.store.faults.clear()
        await s.settled()


# A session that is closed meanwhile


async def test_freezing_waits_for_the_commit_of_an_answer_that_is_complete(stage: Open, hello: list[int]) -> None:
    async with stage() as s:
        s.store.gate.clear()
        client = s.ask()
        await finish(s, 0, hello)
        await until(lambda: s.store.waiting)
        freezing = asyncio.create_task(s.sessions.freeze(s.session_id))
        await asyncio.sleep(0.01)
        assert not freezing.done()
        s.store.gate.set()
        await freezing
        assert await client.text() == "Hello there."
        assert statuses(await s.settled()) == ["ok"]


@pytest.mark.parametrize("stage", ["token-in"], indirect=True)
async def test_freezing_while_a_long_prompt_is_encoded_records_the_call(stage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, go_on = threading.Event(), threading.Event()
    render = History.render

    def held(history: History, plan: Plan) -> Int32Array:
        encoding.set()
        assert go_on.wait(10)
        return render(history, plan)

    monkeypatch.setattr(History, "render", held)
    async with stage() as s:
        client = s.ask(content="word " * 10_000)
        await until(encoding.is_set)
        freezing = asyncio.create_task(s.sessions.freeze(s.session_id))
        await asyncio.sleep(0.01)
        go_on.set()
        await freezing
        await client.task
        assert s.engine.generations == []
        (call,) = (await s.settled()).calls
        assert (call.status, call.sampled) == ("aborted", 0)
        assert call.prompt_tokens > 10_000


async def test_a_request_that_arrives_in_pieces_around_the_freeze_is_409(stage: Open) -> None:
    async with stage() as s:
        client = Client(s.app, s.key, None)
        await asyncio.sleep(0)
        await s.sessions.freeze(s.session_id)
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
        client._inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        await client.answer()
        assert client.status == 409
        assert (await s.settled()).calls == []


async def test_freezing_twice_at_once_is_freezing(stage: Open, hello: list[int]) -> None:
    async with stage() as s:
        client = s.ask(stream=True)
        (await s.engine.generation(0)).say(hello)
        await asyncio.gather(*(s.sessions.freeze(s.session_id) for _ in range(3)))
        await client.task
        assert b'"error"' in client.received
        assert statuses(await s.settled()) == ["aborted"]


async def test_a_forgotten_session_holds_no_tokens_and_stays_closed(stage: Open, hello: list[int]) -> None:
    async with stage() as s:
        session, runs = s.sessions.by_id(s.session_id), []
        for number in range(3):
            client = s.ask(content="Hi" * number)
            await until(lambda: session.runs)
            runs += [weakref.ref(run) for run in session.runs]
            await finish(s, number, hello)
            await client.task
        await s.settled()
        s.sessions.forget(s.session_id)
        assert (session.history.tree.nodes, session.calls, session.runs) == ([], {}, set())
        del client
        gc.collect()
        assert [run() for run in runs] == [None] * 3
        late = s.ask()
        await late.answer()
        assert late.status == 409


async def test_no_key_is_logged_whatever_breaks(
    stage: Open, hello: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with stage() as s:
        s.store.faults = [StoreError("disk full")] * 2
        client = s.ask()
        await finish(s, 0, hello)
        await client.task
        client = s.ask(stream=True)
        generation = await s.engine.generation(1)
        generation.fail(ZeroDivisionError())
        await client.task
        unknown = Client(s.app, s.key + "x", b"{}")
        assert "error" in await unknown.answer()
        assert unknown.status == 401
        await s.settled()
        assert "could not be recorded" in caplog.text
        assert "ZeroDivisionError" in caplog.text
        assert s.key not in caplog.text
        assert s.key.encode() not in client.received + unknown.received


# All of it at once


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_in_whatever_order_the_record_adds_up(stage: Open, hello: list[int], seed: int) -> None:
    """Clients, engine and disk misbehave at random; then `settled` checks the record as it checks every other."""
    dice = random.Random(seed)
    async with stage(grace=0.01) as s:
        s.store.faults = [StoreError("disk full") if dice.random() < 0.15 else None for _ in range(60)]
        clients: list[Client] = []
        for _ in range(120):
            match dice.randrange(6):
                case 0 | 1:
                    clients.append(s.ask(stream=dice.random() < 0.5, content=f"Hi {dice.randrange(4)}"))
                case 2 if clients:
                    dice.choice(clients).hang_up()
                case 3 | 4 if s.engine.generations:
                    generation = dice.choice(s.engine.generations)
                    generation.say(hello)
                    if dice.random() < 0.7:
                        generation.stop()
                    else:
                        generation.fail(EngineError("gone"))
                case 5:
                    (s.store.gate.set if dice.random() < 0.6 else s.store.gate.clear)()
            await asyncio.sleep(dice.choice([0, 0, 0.001]))
        s.store.gate.set()
        s.store.faults.clear()  # the disk works again
        record = await s.settled()
        async with asyncio.timeout(10):
            await asyncio.gather(*(client.task for client in clients))
        answered = {call.call_id for call in record.calls if call.status == "ok"}
        assert answered
        assert answered.isdisjoint(call.replaces for call in record.calls)
