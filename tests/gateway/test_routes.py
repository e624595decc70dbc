"""Other models beside the policy, by the names that harnesses ask for; and a policy whose ids nobody sees."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from polar.audit.session import audit_session
from polar.engines.openai_text import OpenAITextEngine
from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.served import Served, served
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError
from polar.gateway.gateway import gateway
from polar.specs import Accounting, SamplingSpec
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured, build
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import Conversation, call_text
from tests.gateway.test_chat import count_tokens


def policy(call: ScriptedCall) -> Scripted:
    return Scripted("Policy.")


def other(call: ScriptedCall) -> Scripted:
    if "word" in call.prompt_text:
        return Scripted("word " * 400, delay_per_token=0.01)
    return Scripted(call_text("ls", "Other. ") if "Call." in call.prompt_text else "Other.")


@asynccontextmanager
async def text_only(tokenizer: Tokenizer) -> AsyncIterator[tuple[Served, ScriptedEngine]]:
    """A model of somebody else's, of which only text is shown."""
    engine = ScriptedEngine(tokenizer, other)
    async with scripted_server(engine) as url:
        client = OpenAITextEngine(f"{url}/v1", "scripted")
        try:
            yield await served(client, None, trains=False), engine
        finally:
            await client.close()


def accounted(captured: Captured) -> Accounting:
    """The accounting of a session in which the audit finds nothing."""
    assert audit_session(captured, None, None) == []
    accounting = build(captured, builder="prefix_merging", status="completed", reward=1.0).accounting
    assert accounting.holds
    return accounting


@pytest.mark.parametrize("chat", [False, True])
async def test_a_route_is_answered_by_its_model_and_never_trained(serve: Serve, policy_tokenizer: Tokenizer, chat: bool) -> None:
    async with (
        text_only(policy_tokenizer) as (another, engine),
        serve(policy, chat=chat, routes={"helper": another}) as stand,
    ):
        session_id, key = await stand.open(sampling=SamplingSpec(temperature=0.5))
        client = stand.client(key)
        for stream in (True, False):
            talk = Conversation(client, tools=None)
            assert (await talk.ask(stream=stream, model="helper", temperature=0.25, top_p=0.75))["content"] == "Other."
        assert (await Conversation(client, tools=None).ask(model="anything else"))["content"] == "Policy."
        captured = await stand.captured(session_id)
        first, second, third = captured.calls
        assert [call.engine for call in captured.calls] == ["openai_text", "openai_text", "vllm"]
        assert [call.untrained for call in captured.calls] == ["external", "external", ""]
        assert (first.resolved["temperature"], first.resolved["top_p"]) == (0.25, 0.75)
        assert third.resolved["temperature"] == 0.5
        assert [choice.node for choice in first.choices] == [None]
        assert first.prompt_tokens == len(engine.log[0].prompt_ids)
        accounting = accounted(captured)
        assert accounting.excluded == {"external": sum(len(entry.ids) for entry in engine.log)}
        assert accounting.trained == len(stand.log[0].ids)
        assert (second.sampled, second.choices[0].message.text) == (len(engine.log[1].ids), "Other.")


async def test_a_tool_call_of_another_model_has_ids_of_ours(serve: Serve, policy_tokenizer: Tokenizer) -> None:
    async with text_only(policy_tokenizer) as (another, _), serve(policy, routes={"helper": another}) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key), [{"role": "user", "content": "Call."}])
        message = await talk.ask(model="helper")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
        captured = await stand.captured(session_id)
        assert call["id"] == f"call_{captured.calls[0].call_id}_0_0"
        accounted(captured)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_history_with_another_models_reply_forks_nothing_of_the_policys(
    serve: Serve, policy_tokenizer: Tokenizer, chat: bool
) -> None:
    """Policy, helper, policy, policy: what the helper said is context for the third, which the fourth continues."""
    async with (
        text_only(policy_tokenizer) as (another, _),
        serve(lambda call: Scripted("x"), chat=chat, routes={"helper": another}) as stand,
    ):
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key), tools=None)
        for model in ("policy", "helper", "policy", "policy"):
            await talk.ask(model=model)
            talk.messages.append({"role": "user", "content": "Go on."})
        captured = await stand.captured(session_id)
        assert [call.fork_reason for call in captured.calls] == ["", "", "external_history", ""]
        ids = [call.call_id for call in captured.calls]
        assert [call.parent_call for call in captured.calls] == ["", *ids[:3]]
        assert [call.kind for call in captured.calls] == ["agent"] * 4
        accounting = accounted(captured)
        assert accounting.trained == sum(len(entry.ids) for entry in stand.log)
        traces = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
        assert sum(len(trace.call_ids) for trace in traces) == 3
        assert traces[-1].call_ids[-2:] == (ids[2], ids[3])


async def test_a_model_that_takes_ids_may_be_another_one_too(
    serve: Serve, policy_tokenizer: Tokenizer, policy_renderer: Renderer
) -> None:
    """A frozen model on an engine of ours: rendered for it, and kept out of the policy's tree."""
    engine = ScriptedEngine(policy_tokenizer, other)
    async with scripted_server(engine) as url:
        client = VllmEngine(url)
        frozen = await served(client, policy_renderer, trains=False)
        async with serve(policy, routes={"frozen": frozen}) as stand:
            session_id, key = await stand.open()
            talk = Conversation(stand.client(key), tools=None)
            await talk.ask(model="frozen")
            talk.messages.append({"role": "user", "content": "Go on."})
            assert (await talk.ask(model="frozen", stream=True))["content"] == "Other."
            captured = await stand.captured(session_id)
            assert captured.nodes == []
            assert [call.prompt_tokens for call in captured.calls] == [len(entry.prompt_ids) for entry in engine.log]
            assert captured.calls[1].parent_call == captured.calls[0].call_id
            assert accounted(captured).excluded == {"external": sum(len(entry.ids) for entry in engine.log)}
        await client.close()


async def test_the_routes_are_listed_behind_the_policy(serve: Serve, policy_tokenizer: Tokenizer) -> None:
    async with text_only(policy_tokenizer) as (another, _), serve(policy, routes={"helper": another}) as stand:
        _, key = await stand.open()
        names = [model.id async for model in stand.client(key).models.list()]
        assert names == [stand.gateway.info.model, "helper"]


async def test_hanging_up_leaves_another_model_at_once(serve: Serve, policy_tokenizer: Tokenizer) -> None:
    async with text_only(policy_tokenizer) as (another, engine), serve(policy, routes={"helper": another}) as stand:
        session_id, key = await stand.open()
        stream = await stand.client(key).chat.completions.create(
            model="helper", messages=[{"role": "user", "content": "word"}], stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(1):
            while stand.gateway.sessions.by_id(session_id).runs:
                await asyncio.sleep(0.005)
        captured = await stand.captured(session_id)
        assert [call.status for call in captured.calls] == ["aborted"]
        assert len(engine.log[0].ids) < 400
        accounted(captured)


async def test_another_model_that_breaks_off_fails_the_call_and_may_be_asked_again(
    serve: Serve, policy_tokenizer: Tokenizer
) -> None:
    engine = ScriptedEngine(policy_tokenizer, lambda call: Scripted("Half of it.", fault="die"))
    async with scripted_server(engine) as url:
        client = OpenAITextEngine(f"{url}/v1", "scripted")
        async with serve(policy, routes={"helper": await served(client, None, trains=False)}) as stand:
            session_id, key = await stand.open()
            with pytest.raises(openai.InternalServerError):
                await Conversation(stand.client(key), tools=None).ask(model="helper")
            captured = await stand.captured(session_id)
            assert [call.status for call in captured.calls] == ["failed"]
            accounted(captured)
        await client.close()


async def test_a_policy_that_shows_no_ids_is_unproven_and_still_has_a_history(policy_tokenizer: Tokenizer, tmp_path: Any) -> None:
    async with text_only(policy_tokenizer) as (model, engine):
        shown = Served(model.engine, model.info, None)
        async with gateway(shown, tmp_path / "capture.db") as running:
            stand = Stand(running, engine, tmp_path / "capture.db", None)  # type: ignore[arg-type]
            session_id, key = await stand.open(sampling=SamplingSpec(temperature=0.5))
            assert await count_tokens(stand, key) == (404, 0)  # a number that is not true is none
            talk = Conversation(stand.client(key), tools=None)
            for number in range(3):
                await talk.ask(stream=number == 1, stop=["ther"])
                talk.messages.append({"role": "user", "content": "Go on."})
            captured = await stand.captured(session_id)
            calls = captured.calls
            assert [call.choices[0].message.text for call in calls] == ["O"] * 3
            assert [call.untrained for call in calls] == ["unproven"] * 3
            assert [call.resolved["temperature"] for call in calls] == [0.5] * 3
            assert [(call.parent_call, call.fork_reason) for call in calls] == [
                ("", ""),
                (calls[0].call_id, ""),
                (calls[1].call_id, ""),
            ]
            accounting = accounted(captured)
            assert (accounting.trained, accounting.excluded) == (0, {"unproven": accounting.sampled})


async def test_what_cannot_be_asked_as_it_is_to_be_is_refused_at_once(policy_tokenizer: Tokenizer, tmp_path: Any) -> None:
    async with text_only(policy_tokenizer) as (another, _):
        trained = Served(another.engine, another.info, None)
        for model, routes, says in (
            (another, {}, "the policy is the model that is trained"),
            (trained, {"helper": trained}, "route 'helper': there is one policy"),
        ):
            with pytest.raises(UsageError, match=says):
                async with gateway(model, tmp_path / "capture.db", routes=routes):
                    pass
        assert not (tmp_path / "capture.db").exists()
