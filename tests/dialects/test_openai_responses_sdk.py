"""OpenAI Responses through the real `openai` SDK, before the real gateway and a scripted policy."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseFailedEvent, ResponseTextDeltaEvent
from pydantic import BaseModel

from polar.chat import ImagePart, TextPart
from polar.engines.scripted import Scripted, ScriptedCall
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import call_text

pytestmark = pytest.mark.heavy  # a quarter of a minute that `make test` does not have

ASK: list[Any] = [{"role": "user", "content": "Do it."}]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH: Any = {"type": "function", "name": "bash", "description": "Run a command.", "parameters": SCHEMA, "strict": False}
TEAM: Any = {"type": "namespace", "name": "team", "description": "Others.", "tools": [{**BASH, "name": "spawn"}]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Patch files.", "format": GRAMMAR}
PIXEL = "iVBORw0KGgo="
THINKING = "<think>\nFirst — look.\n</think>\n\nDone \u2028 é."


def saying(text: str) -> Any:
    return lambda call: Scripted(text)


def named_call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def answers(stand: Stand, key: str, **asked: Any) -> tuple[Response, Response]:
    """The same request answered whole and streamed, both as the SDK reads them."""
    asked = {"model": "any-name", "input": ASK, **asked}
    responses = stand.client(key).responses
    whole = await responses.create(**asked)
    async with responses.stream(**asked) as stream:
        return whole, await stream.get_final_response()


def kept(response: Response) -> list[Any]:
    """A reply's items as clients send them back."""
    return [item.model_dump(exclude_none=True) for item in response.output]


async def test_a_reply_is_the_policys_text_whole_and_streamed(serve: Serve) -> None:
    async with serve(saying("Done \u2028 é 日本.")) as stand:
        _, key = await stand.open()
        for entry, response in enumerate(await answers(stand, key)):
            assert (response.output_text, response.status, response.model) == ("Done \u2028 é 日本.", "completed", "any-name")
            assert response.usage is not None
            logged = stand.log[entry]
            assert (response.usage.input_tokens, response.usage.output_tokens) == (len(logged.prompt_ids), len(logged.ids))


async def test_deltas_come_as_the_policy_says_them(serve: Serve) -> None:
    async with serve(lambda call: Scripted("one two three four", delay_per_token=0.01)) as stand:
        _, key = await stand.open()
        stream = await stand.client(key).responses.create(model="m", input="Do it.", stream=True)
        events = [event async for event in stream]
        deltas = [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]
        assert len(deltas) > 1
        assert "".join(deltas) == "one two three four"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert isinstance(events[-1], ResponseCompletedEvent)


async def test_reasoning_is_told_apart_whole_and_streamed(serve: Serve) -> None:
    async with serve(saying(THINKING)) as stand:
        _, key = await stand.open()
        for response in await answers(stand, key):
            reasoning, message = response.output
            assert reasoning.type == "reasoning"
            assert (reasoning.summary[0].text.strip(), message.type) == ("First — look.", "message")
            assert response.output_text == "Done \u2028 é."


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_results_continue_the_call_that_asked_for_them(serve: Serve, stream: bool) -> None:
    def script(call: ScriptedCall) -> Scripted:
        return Scripted("Both done." if call.turn else "Two.\n" + call_text("ls") + "\n" + call_text("id"))

    async with serve(script) as stand:
        session_id, key = await stand.open()
        response = (await answers(stand, key, tools=[BASH]))[stream]
        asked = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in asked] == [("bash", '{"command":  "ls"}'), ("bash", '{"command":  "id"}')]
        results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in asked]
        after = await stand.client(key).responses.create(model="m", input=[*ASK, *kept(response), *results], tools=[BASH])
        assert after.output_text == "Both done."
        calls = (await stand.captured(session_id)).calls
        assert (calls[2].parent_call, calls[2].fork_reason) == (calls[stream].call_id, "")
        known = (*stand.log[stream].prompt_ids, *stand.log[stream].ids)
        assert stand.log[2].prompt_ids[: len(known)] == known


async def test_custom_and_namespaced_tools_go_there_and_back(serve: Serve) -> None:
    def script(call: ScriptedCall) -> Scripted:
        both = named_call("patch", {"input": '*** "é"\n'}) + "\n" + named_call("team__spawn", {"command": "ls"})
        return Scripted("Done." if call.turn else both)

    async with serve(script) as stand:
        session_id, key = await stand.open()
        tools = [BASH, TEAM, PATCH]
        for response in await answers(stand, key, tools=tools):
            patch, spawn = response.output
            assert patch.type == "custom_tool_call"
            assert (patch.name, patch.input) == ("patch", '*** "é"\n')
            assert spawn.type == "function_call"
            assert (spawn.name, spawn.namespace, json.loads(spawn.arguments)) == ("spawn", "team", {"command": "ls"})
        history: list[Any] = [*ASK, *kept(response)]
        history += [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in kept(response)]
        assert (await stand.client(key).responses.create(model="m", input=history, tools=tools)).output_text == "Done."
        calls = (await stand.captured(session_id)).calls
        assert (calls[2].parent_call, calls[2].fork_reason) == (calls[1].call_id, "")


async def test_hosted_tools_are_not_given_and_recorded_by_name(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        session_id, key = await stand.open()
        await answers(stand, key, tools=[BASH, {"type": "web_search"}], reasoning={"effort": "high"}, parallel_tool_calls=False)
        captured = await stand.captured(session_id)
        for call in captured.calls:
            assert [tool.name for tool in captured.tools[call.tools_hash]] == ["bash"]
            assert call.unserved == ("tool:web_search", "reasoning.effort", "parallel_tool_calls")


async def test_images_are_recorded_and_the_call_says_that_the_policy_did_not_see_them(serve: Serve) -> None:
    async with serve(saying("A picture.")) as stand:
        session_id, key = await stand.open()
        parts = [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "high"},
        ]
        await answers(stand, key, input=[{"role": "user", "content": parts}])
        captured = await stand.captured(session_id)
        seen = (TextPart("What is this?"), ImagePart(media_type="image/png", data=PIXEL))
        for call in captured.calls:
            assert call.unserved == ("image",)
            assert captured.messages[call.message_hashes[0]].content == seen


async def test_a_request_may_name_the_reply_that_it_follows(serve: Serve) -> None:
    """Instructions are those of the last request only."""

    def script(call: ScriptedCall) -> Scripted:
        return Scripted(f"Turn {call.turn}.")

    async with serve(script) as stand:
        session_id, key = await stand.open()
        responses = stand.client(key).responses
        first = await responses.create(model="m", input="One.", instructions="Be brief.")
        second = await responses.create(model="m", input="Two.", instructions="Be brief.", previous_response_id=first.id)
        assert (second.output_text, second.previous_response_id) == ("Turn 1.", first.id)
        third = await responses.create(model="m", input="Three.", instructions="Be long.", previous_response_id=second.id)
        assert third.output_text == "Turn 2."
        captured = await stand.captured(session_id)
        one, two, three = captured.calls
        assert (two.parent_call, two.fork_reason) == (one.call_id, "")
        assert three.fork_reason != ""
        texts = [captured.messages[digest].text for digest in three.message_hashes]
        assert texts == ["Be long.", "One.", "Turn 0.", "Two.", "Turn 1.", "Three."]


class Weather(BaseModel):
    city: str


async def test_a_text_format_is_parsed_by_the_sdk(serve: Serve) -> None:
    async with serve(saying('{"city": "Köln"}')) as stand:
        _, key = await stand.open()
        parsed = await stand.client(key).responses.parse(model="m", input=ASK, text_format=Weather)
        assert parsed.output_parsed == Weather(city="Köln")


async def test_tokens_are_counted_as_they_are_sent(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        _, key = await stand.open()
        counted = await stand.client(key).responses.input_tokens.count(model="m", input=ASK, tools=[BASH])
        assert stand.log == []
        await stand.client(key).responses.create(model="m", input=ASK, tools=[BASH])
        assert counted.input_tokens == len(stand.log[0].prompt_ids)


async def test_a_reply_that_was_cut_is_incomplete(serve: Serve) -> None:
    async with serve(saying("one two three four")) as stand:
        _, key = await stand.open()
        response = await stand.client(key).responses.create(model="m", input=ASK, max_output_tokens=2)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


# Errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"input": []}, "input: expected at least one message"),
        ({"background": True}, "background is not served"),
        ({"previous_response_id": "resp_theirs"}, "Previous response with id 'resp_theirs' not found"),
        ({"previous_response_id": "resp_c9z0000000"}, "Previous response with id .* not found"),
        ({"tool_choice": "required"}, "needs at least one tool"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_a_bad_request(
    serve: Serve, asked: dict[str, Any], says: str, stream: bool
) -> None:
    async with serve(saying("Fine.")) as stand:
        _, key = await stand.open()
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            await stand.client(key).responses.create(**{"model": "m", "input": ASK, **asked}, stream=stream)
        assert refused.value.type == "invalid_request_error"
        assert stand.log == []


async def test_what_is_not_served_is_not_found(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        _, key = await stand.open()
        responses = stand.client(key).responses
        for asked in (responses.compact(model="m", input=ASK), responses.retrieve("resp_1"), responses.delete("resp_1")):
            with pytest.raises(openai.NotFoundError, match="/v1/responses/.* is not served here") as missing:
                await asked
            assert missing.value.code == "unknown_url"


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_compact_on(serve: Serve) -> None:
    async with serve(saying("Fine."), max_model_len=200) as stand:
        _, key = await stand.open()
        with pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens") as refused:
            await stand.client(key).responses.create(model="m", input="word " * 300, stream=True)
        assert refused.value.code == "context_length_exceeded"


async def test_an_engine_that_breaks_in_mid_stream_is_a_failure_and_never_a_clean_end(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 20, fault="die", delay_per_token=0.002)) as stand:
        _, key = await stand.open()
        events = [event async for event in await stand.client(key).responses.create(model="m", input=ASK, stream=True)]
        failed = events[-1]
        assert isinstance(failed, ResponseFailedEvent)
        assert failed.response.error is not None
        assert failed.response.error.code == "server_error"
        assert not any(event.type in ("response.completed", "response.output_item.done") for event in events)


async def test_hanging_up_in_mid_stream_aborts_at_the_engine(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 400, delay_per_token=0.01)) as stand:
        session_id, key = await stand.open()
        stream = await stand.client(key).responses.create(model="m", input=ASK, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        while not stand.log[0].finish:  # the test's time limit bounds it
            await asyncio.sleep(0.01)
        assert stand.log[0].finish == "abort"
        assert [call.status for call in (await stand.captured(session_id)).calls] == ["aborted"]


async def test_a_closed_session_is_a_conflict_whatever_the_request_follows(serve: Serve) -> None:
    async with serve(saying("Hello.")) as stand:
        session_id, key = await stand.open()
        first = await stand.client(key).responses.create(model="policy", input="Hi")
        await stand.gateway.sessions.freeze(session_id)
        stand.gateway.sessions.forget(session_id)
        with pytest.raises(openai.ConflictError):
            await stand.client(key).responses.create(model="policy", input="Go on", previous_response_id=first.id)
