"""What harnesses do to their histories, and which branches come of it."""

from collections.abc import Callable

import pytest

from polar.engines.scripted import Scripted, ScriptedCall
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve
from tests.gateway.conversation import TOOLS, Conversation, call_text


def script(call: ScriptedCall) -> Scripted:
    return Scripted(call_text(f"step {call.turn}", "So: ")) if call.turn < 3 else Scripted("Done.")


async def branches(serve: Serve, change) -> tuple[int, list[str]]:  # type: ignore[no-untyped-def]
    """Two turns, then the harness does something to its history, then one more: traces and fork reasons."""
    async with serve(script) as stand:
        session_id, key = await stand.open()
        talk = Conversation(
            stand.client(key), [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Do it."}]
        )
        await talk.ask()
        await talk.ask(stream=True)
        change(talk)
        await talk.ask()
        captured = await stand.captured(session_id)
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert trajectory.accounting.trained == sum(len(entry.ids) for entry in stand.log)
        for trace in trajectory.traces:
            path = [*trace.prompt_ids, *trace.response_ids]
            assert any(path == [*entry.prompt_ids, *entry.ids] for entry in stand.log)
        return len(trajectory.traces), [call.fork_reason for call in captured.calls]


def reserialise(talk: Conversation) -> None:
    """T02: spacing, escapes and key order of arguments change; what they say does not."""
    for message in talk.messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = call["function"]["arguments"].replace(":  ", ":")


def drop_reasoning(talk: Conversation) -> None:
    """T03: reasoning comes and goes."""
    talk.messages[2]["reasoning_content"] = "It was never said."


def as_parts(talk: Conversation) -> None:
    for message in talk.messages:
        if isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]


@pytest.mark.parametrize("change", [lambda talk: None, reserialise, drop_reasoning, as_parts])
async def test_a_history_that_means_the_same_is_continued(serve: Serve, change) -> None:  # type: ignore[no-untyped-def]
    assert await branches(serve, change) == (1, ["", "", ""])


def rewrite(talk: Conversation) -> None:
    """T14: the scaffold repairs the model's message."""
    talk.messages[-2]["content"] = "So, better:"


def other_arguments(talk: Conversation) -> None:
    talk.messages[-2]["tool_calls"][0]["function"]["arguments"] = '{"command": "something else"}'


def other_tools(talk: Conversation) -> None:
    """T17."""
    talk.tools = [*TOOLS, {"type": "function", "function": {"name": "read", "parameters": {}}}]


def no_tools(talk: Conversation) -> None:
    talk.tools = None


def other_system(talk: Conversation) -> None:
    """T17."""
    talk.messages[0]["content"] = "Be verbose."


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rewrite, "history_rewritten"),
        (other_arguments, "history_rewritten"),
        (other_tools, "tools_changed"),
        (no_tools, "tools_changed"),
        (other_system, "system_changed"),
    ],
)
async def test_a_history_that_says_something_else_forks_by_name(serve: Serve, change, reason: str) -> None:  # type: ignore[no-untyped-def]
    assert await branches(serve, change) == (2, ["", "", reason])


def drop_turn(talk: Conversation) -> None:
    """As mini-swe-agent does: a turn is left out, and the user says something else."""
    del talk.messages[-2:]
    talk.messages.append({"role": "user", "content": "That was no good. Again."})


async def test_a_turn_that_the_harness_dropped_stays_a_branch_of_its_own(serve: Serve) -> None:
    assert await branches(serve, drop_turn) == (2, ["", "", ""])


def compact(talk: Conversation) -> None:
    talk.messages[1:] = [{"role": "user", "content": "Summary of what happened: two steps. Go on."}]


async def test_a_compacted_history_is_a_new_root(serve: Serve) -> None:
    assert await branches(serve, compact) == (2, ["", "", ""])


async def normalisers(serve: Serve, change: Callable[[Conversation], None]) -> tuple[str, tuple[str, ...]]:
    """Fork reason and normalisers of a second turn before which the harness changed its history."""
    async with serve(lambda call: Scripted(call_text("ls", "<think>hm</think>Look:"))) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key))
        await talk.ask()
        change(talk)
        await talk.ask()
        call = (await stand.captured(session_id)).calls[1]
        return call.fork_reason, call.normalisers


def respell(talk: Conversation) -> None:
    talk.messages[1]["tool_calls"][0]["function"]["arguments"] = '{"command":"ls"}'


def forget_reasoning(talk: Conversation) -> None:
    del talk.messages[1]["reasoning_content"]


def prefill(talk: Conversation) -> None:
    talk.messages.append({"role": "assistant", "content": "I will"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda talk: None, ("", ())),
        (respell, ("", ("arguments_respelled",))),
        (forget_reasoning, ("", ("reasoning_changed",))),
        (prefill, ("history_rewritten", ("prefill_closed",))),
    ],
    ids=["nothing", "T02", "T03", "T18"],
)
async def test_what_a_harness_does_to_a_reply_is_recorded_by_name(
    serve: Serve, change: Callable[[Conversation], None], expected: tuple[str, tuple[str, ...]]
) -> None:
    assert await normalisers(serve, change) == expected
