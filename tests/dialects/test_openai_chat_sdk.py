"""OpenAI Chat through the real `openai` SDK, before the real gateway and a scripted policy."""

import asyncio
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from polar.chat import ImagePart, TextPart
from polar.engines.scripted import Scripted, ScriptedCall
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import TOOLS, call_text

pytestmark = pytest.mark.heavy  # a quarter of a minute that `make test` does not have

ASK: list[Any] = [{"role": "user", "content": "Do it."}]
BASH: Any = TOOLS
PIXEL = "iVBORw0KGgo="
THINKING = "<think>\nFirst — look.\n</think>\n\nDone \u2028 é."


def saying(text: str) -> Any:
    return lambda call: Scripted(text)


async def answers(stand: Stand, key: str, **asked: Any) -> tuple[ChatCompletion, ChatCompletion]:
    """The same request answered whole and streamed, both as the SDK reads them."""
    asked = {"model": "any-name", "messages": ASK, **asked}
    completions = stand.client(key).chat.completions
    whole = await completions.create(**asked)
    async with completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        async for _ in stream:
            pass
        return whole, stream.current_completion_snapshot


async def test_a_reply_is_the_policys_text_whole_and_streamed(serve: Serve) -> None:
    async with serve(saying("Done \u2028 é 日本.")) as stand:
        _, key = await stand.open()
        for entry, completion in zip(range(2), await answers(stand, key), strict=True):
            (choice,) = completion.choices
            assert (choice.message.content, choice.message.refusal) == ("Done \u2028 é 日本.", None)
            assert (choice.message.role, choice.finish_reason, completion.model) == ("assistant", "stop", "any-name")
            assert completion.usage is not None
            logged = stand.log[entry]
            assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (
                len(logged.prompt_ids),
                len(logged.ids),
            )


async def test_reasoning_is_told_apart_whole_and_streamed(serve: Serve) -> None:
    async with serve(saying(THINKING)) as stand:
        _, key = await stand.open()
        for completion in await answers(stand, key):
            message = completion.choices[0].message.model_dump()
            assert (message["reasoning_content"].strip(), message["content"]) == ("First — look.", "Done \u2028 é.")


@pytest.mark.parametrize("kept", [True, False])
async def test_a_history_continues_its_call_whether_or_not_reasoning_comes_back(serve: Serve, kept: bool) -> None:
    async with serve(saying(THINKING)) as stand:
        session_id, key = await stand.open()
        completions = stand.client(key).chat.completions
        first = await completions.create(model="m", messages=ASK)
        message: Any = first.choices[0].message.model_dump(exclude_none=True, exclude=None if kept else {"reasoning_content"})
        await completions.create(model="m", messages=[*ASK, message, *ASK])
        before, after = (await stand.captured(session_id)).calls
        assert (after.parent_call, after.fork_reason) == (before.call_id, "")


async def test_parallel_tool_calls_are_read_whole_and_streamed(serve: Serve) -> None:
    async with serve(saying(call_text("ls", "Two.\n") + "\n" + call_text("id"))) as stand:
        _, key = await stand.open()
        for completion in await answers(stand, key, tools=BASH):
            (choice,) = completion.choices
            calls: Any = choice.message.tool_calls
            assert [(call.function.name, call.function.arguments) for call in calls] == [
                ("bash", '{"command":  "ls"}'),
                ("bash", '{"command":  "id"}'),
            ]
            assert len({call.id for call in calls}) == 2
            assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_results_continue_the_call_that_asked_for_them(serve: Serve, stream: bool) -> None:
    def script(call: ScriptedCall) -> Scripted:
        return Scripted("Both done." if call.turn else call_text("ls") + "\n" + call_text("id"))

    async with serve(script) as stand:
        session_id, key = await stand.open()
        message: Any = (await answers(stand, key, tools=BASH))[stream].choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": call.function.name} for call in message.tool_calls]
        history = [*ASK, message.model_dump(exclude_none=True), *results]
        after = await stand.client(key).chat.completions.create(model="m", messages=history, tools=BASH)
        assert after.choices[0].message.content == "Both done."
        calls = (await stand.captured(session_id)).calls
        assert (calls[2].parent_call, calls[2].fork_reason) == (calls[stream].call_id, "")


async def test_tools_can_be_hidden_and_a_choice_that_cannot_be_forced_is_recorded(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        session_id, key = await stand.open()
        named: Any = {"type": "function", "function": {"name": "bash"}}
        for choice in ("auto", "none", "required", named):
            await stand.client(key).chat.completions.create(model="m", messages=ASK, tools=BASH, tool_choice=choice)
        captured = await stand.captured(session_id)
        assert [len(captured.tools[call.tools_hash]) for call in captured.calls] == [1, 0, 1, 1]
        assert [call.unserved for call in captured.calls] == [(), (), ("tool_choice",), ("tool_choice",)]


async def test_images_are_recorded_and_the_call_says_that_the_policy_did_not_see_them(serve: Serve) -> None:
    async with serve(saying("A picture.")) as stand:
        session_id, key = await stand.open()
        parts = [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "high"}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        ]
        await answers(stand, key, messages=[{"role": "user", "content": parts}])
        captured = await stand.captured(session_id)
        for call in captured.calls:
            assert call.unserved == ("image",)
            assert captured.messages[call.message_hashes[0]].content == (
                TextPart("What is this?"),
                ImagePart(media_type="image/png", data=PIXEL),
                ImagePart(url="https://example.org/a.png"),
            )


@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP"]])
async def test_a_reply_ends_before_a_stop_text(serve: Serve, stop: object) -> None:
    async with serve(saying("All is well. STOP And more that nobody sees.")) as stand:
        session_id, key = await stand.open()
        for completion in await answers(stand, key, stop=stop):
            (choice,) = completion.choices
            assert (choice.message.content, choice.finish_reason) == ("All is well. ", "stop")
        for call in (await stand.captured(session_id)).calls:
            assert call.choices[0].stop_sequence == "STOP"


async def test_two_choices_are_siblings_of_one_call(serve: Serve) -> None:
    def script(call: ScriptedCall) -> Scripted:
        return Scripted(f"I am {call.request_id}.")

    async with serve(script) as stand:
        session_id, key = await stand.open()
        for completion in await answers(stand, key, n=2):
            assert [choice.index for choice in completion.choices] == [0, 1]
            assert [choice.finish_reason for choice in completion.choices] == ["stop", "stop"]
            assert len({choice.message.content for choice in completion.choices}) == 2
        captured = await stand.captured(session_id)
        nodes = {node.node_id: node for node in captured.nodes}
        for call in captured.calls:
            places = {nodes[choice.node].parent for choice in call.choices if choice.node is not None}
            assert (len(call.choices), len(places)) == (2, 1)


async def test_log_probabilities_are_those_that_were_sampled(serve: Serve) -> None:
    async with serve(saying("Well said é.")) as stand:
        _, key = await stand.open()
        for entry, completion in enumerate(await answers(stand, key, logprobs=True)):
            logprobs = completion.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.content is not None
            assert [each.logprob for each in logprobs.content] == stand.log[entry].logprobs
            known = [each for each in logprobs.content if each.bytes is not None]
            assert all(bytes(each.bytes or []).decode() == each.token for each in known)
            assert all("\ufffd" in each.token for each in logprobs.content if each.bytes is None)
            assert all(each.top_logprobs == [] for each in logprobs.content)
        whole, streamed = await answers(stand, key)
        assert whole.choices[0].logprobs is streamed.choices[0].logprobs is None


class Weather(BaseModel):
    city: str
    degrees: int


async def test_a_response_format_is_parsed_by_the_sdk(serve: Serve) -> None:
    async with serve(saying('{"city": "Köln", "degrees": 21}')) as stand:
        _, key = await stand.open()
        completions = stand.client(key).chat.completions
        parsed = await completions.parse(model="m", messages=ASK, response_format=Weather)
        assert parsed.choices[0].message.parsed == Weather(city="Köln", degrees=21)
        async with completions.stream(model="m", messages=ASK, response_format=Weather) as stream:
            assert (await stream.get_final_completion()).choices[0].message.parsed == Weather(city="Köln", degrees=21)
        await completions.create(model="m", messages=ASK, response_format={"type": "json_object"})


async def test_what_the_policy_is_not_given_is_recorded_and_does_no_harm(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        session_id, key = await stand.open()
        knobs = {"reasoning_effort": "high", "frequency_penalty": 1.5, "parallel_tool_calls": False}
        await answers(stand, key, store=False, extra_body={"novel": [1]}, **knobs)
        for call in (await stand.captured(session_id)).calls:
            assert set(call.unserved) == set(knobs)
            assert set(call.extra) == {*knobs, "store", "novel"}


async def test_models_are_listed_and_any_name_is_one(serve: Serve) -> None:
    async with serve(saying("Fine."), max_model_len=4096) as stand:
        _, key = await stand.open()
        client = stand.client(key)
        (listed,) = [model async for model in client.models.list()]
        assert (listed.id, listed.owned_by, listed.model_dump()["max_model_len"]) == ("scripted", "polar", 4096)
        assert (await client.models.retrieve("org/any name")).id == "org/any name"


# Errors


async def refusal(stand: Stand, key: str, **asked: Any) -> openai.APIStatusError:
    """The error with which this request is refused, the same whole and streamed; nothing is generated."""
    told: list[openai.APIStatusError] = []
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as refused:
            await stand.client(key).chat.completions.create(**{"model": "m", "messages": ASK, **asked}, stream=stream)
        told.append(refused.value)
    assert (told[0].status_code, told[0].code, told[0].message) == (told[1].status_code, told[1].code, told[1].message)
    assert stand.log == []
    return told[0]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"messages": []}, "messages: expected at least one message"),
        ({"n": 17}, "<= 16"),
        ({"stop": ""}, "stop"),
        ({"functions": [{"name": "f"}]}, "functions: .* is not served"),
        ({"modalities": ["text", "audio"]}, "modalities: .* is not served"),
        ({"tool_choice": "required"}, "needs at least one tool"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio' is not served"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_a_bad_request(serve: Serve, asked: dict[str, Any], says: str) -> None:
    async with serve(saying("Fine.")) as stand:
        _, key = await stand.open()
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            raise await refusal(stand, key, **asked)
        assert (refused.value.type, refused.value.code) == ("invalid_request_error", "invalid_request")


async def test_an_unknown_key_is_an_authentication_error(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        error = await refusal(stand, "pk-guess")
        assert (type(error), error.code) == (openai.AuthenticationError, "invalid_api_key")


async def test_an_unknown_route_is_not_found(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        _, key = await stand.open()
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not served here") as missing:
            await stand.client(key).embeddings.create(model="m", input="x")
        assert missing.value.code == "unknown_url"


async def test_a_frozen_session_is_a_conflict(serve: Serve) -> None:
    async with serve(saying("Fine.")) as stand:
        session_id, key = await stand.open()
        await stand.gateway.sessions.freeze(session_id)
        error = await refusal(stand, key)
        assert (type(error), error.code) == (openai.ConflictError, "session_frozen")


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_compact_on(serve: Serve) -> None:
    async with serve(saying("Fine."), max_model_len=200) as stand:
        _, key = await stand.open()
        error = await refusal(stand, key, messages=[{"role": "user", "content": "word " * 300}])
        assert (type(error), error.code) == (openai.BadRequestError, "context_length_exceeded")
        assert "maximum context length is 200 tokens. However, your messages resulted in" in error.message


async def test_an_engine_that_breaks_in_mid_stream_is_an_error_and_never_a_clean_end(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 20, fault="die", delay_per_token=0.002)) as stand:
        _, key = await stand.open()
        choices: list[Any] = []
        with pytest.raises(openai.APIError, match="engine"):  # noqa: PT012 - the error comes while the stream is read
            async for chunk in await stand.client(key).chat.completions.create(model="m", messages=ASK, stream=True):
                choices += chunk.choices
        assert "".join(choice.delta.content or "" for choice in choices).startswith("word")
        assert not any(choice.finish_reason for choice in choices)


async def test_hanging_up_in_mid_stream_aborts_at_the_engine(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 400, delay_per_token=0.01)) as stand:
        session_id, key = await stand.open()
        stream = await stand.client(key).chat.completions.create(model="m", messages=ASK, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while not stand.log[0].finish:  # the test's time limit bounds it
            await asyncio.sleep(0.01)
        assert stand.log[0].finish == "abort"
        assert len(stand.log[0].ids) < 200
        assert [call.status for call in (await stand.captured(session_id)).calls] == ["aborted"]
