"""Chat mode before an engine whose ids a test chooses: what a fork is called, what is not trusted, what is kept in memory."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.chat import ImagePart, Message
from polar.specs import HarnessProfile, Int32Array
from polar.tokens.records import Call
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured, build
from tests.gateway.puppets import Client, Stage, staged, until

Change = Callable[[dict[str, Any]], None]
CALLING = '<think>\nHm.\n</think>\n\nSo:\n<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'


class Talk:
    """One conversation with a puppet engine."""

    def __init__(self, s: Stage, tokenizer: Tokenizer) -> None:
        self.s = s
        self.history: list[dict[str, Any]] = []
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def turn(self, ids: list[int], change: Change = lambda message: None, stop: int | None = None) -> None:
        """The policy says `ids`; the harness does something to the reply, and gives it back."""
        client = self.s.ask(history=self.history)
        generation = await self.s.engine.generation(len(self.s.engine.generations))
        generation.say(ids)
        generation.stop(stop)
        message = (await client.answer())["choices"][0]["message"]
        change(message)
        self.history.append(message)
        for call in message.get("tool_calls", []):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
        if not message.get("tool_calls"):
            self.history.append({"role": "user", "content": "Go on."})


def respell(message: dict[str, Any]) -> None:
    message["tool_calls"][0]["function"]["arguments"] = '{"command":"ls"}'


def forget_reasoning(message: dict[str, Any]) -> None:
    message.pop("reasoning_content")


def trim(message: dict[str, Any]) -> None:
    message["content"] = message["content"].strip()


def keep(message: dict[str, Any]) -> None:
    pass


async def second_call(
    renderer: Renderer, tokenizer: Tokenizer, path: Path, said: Callable[[Talk], list[int]], change: Change, *, stop: str = ""
) -> tuple[Call, Captured, int]:
    """The call after one reply that the harness changed; and how many tokens were sampled in all."""
    profile = HarnessProfile(normalisers=("trim_text",))
    async with staged(renderer, path, profile, chat=True) as s:
        talk = Talk(s, tokenizer)
        first, end = said(talk), tokenizer.get_vocab().get(stop, renderer.stop_ids[0])
        s.engine.ends.add(end)
        await talk.turn(first, change, end)
        await talk.turn(talk.encode("Done."))
        captured = await s.settled()
        return captured.calls[1], captured, len(first) + len(talk.encode("Done.")) + 2


CASES: dict[str, tuple[str, Change, str, str, str]] = {
    "nothing": (CALLING, keep, "", "", ""),
    "respelled": (CALLING, respell, "arguments_respelled", "T02", ""),
    "forgotten": (CALLING, forget_reasoning, "reasoning_dropped", "T03", ""),
    "trimmed": ("  Yes. ", trim, "text_trimmed", "T02", ""),
    "other end": ("Yes.", keep, "stop_trimmed", "T06", "<|endoftext|>"),
}


@pytest.mark.parametrize(("said", "change", "reason", "code", "stop"), CASES.values(), ids=CASES)
async def test_each_drift_has_its_name(
    policy_renderer: Renderer,
    policy_tokenizer: Tokenizer,
    tmp_path: Path,
    said: str,
    change: Change,
    reason: str,
    code: str,
    stop: str,
) -> None:
    call, captured, sampled = await second_call(
        policy_renderer, policy_tokenizer, tmp_path / "capture.db", lambda talk: talk.encode(said), change, stop=stop
    )
    assert call.fork_reason == reason
    assert [finding.code for finding in call.findings] == ([code] if code else [])
    assert call.parent_call == captured.calls[0].call_id
    trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
    assert (len(trajectory.traces), trajectory.accounting.trained) == (2 if reason else 1, sampled)


async def test_an_end_that_is_written_once_more_is_a_finding_and_no_fork(
    policy_renderer: Renderer, policy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """T06: what the policy saw is what is stored, however odd."""

    def doubled(ids: Int32Array) -> Int32Array:
        end = policy_renderer.stop_ids[0]
        reply = np.flatnonzero(ids == end)[2:3]  # after the system's turn and the user's
        return np.insert(ids, reply, end).astype(np.int32)

    async with staged(policy_renderer, tmp_path / "capture.db", chat=True) as s:
        talk, s.engine.shows = Talk(s, policy_tokenizer), doubled
        await talk.turn(talk.encode("Yes."))
        await talk.turn(talk.encode("Done."))
        captured = await s.settled()
        call = captured.calls[1]
        assert (call.fork_reason, [finding.code for finding in call.findings]) == ("", ["T06"])
        assert "stop_doubled" in call.findings[0].message
        assert len(build(captured, builder="prefix_merging", status="completed", reward=1.0).traces) == 1


async def test_ids_without_those_of_their_prompt_are_not_trusted(
    policy_renderer: Renderer, policy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """T08."""
    async with staged(policy_renderer, tmp_path / "capture.db", chat=True) as s:
        talk, s.engine.shows = Talk(s, policy_tokenizer), lambda ids: None
        client = s.ask()
        generation = await s.engine.generation(0)
        generation.say(talk.encode("Yes."))
        generation.stop()
        assert "error" in await client.answer()
        (call,) = (await s.settled()).calls
        assert (call.status, call.findings[0].code) == ("failed", "T08")


async def test_choices_after_different_prompts_are_not_trusted(
    policy_renderer: Renderer, policy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """T01: a template that writes the time of day."""
    async with staged(policy_renderer, tmp_path / "capture.db", chat=True) as s:
        s.engine.shows = lambda ids: np.append(ids, len(s.engine.asked)).astype(np.int32)
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
        client = Client(s.app, s.key, msgspec.json.encode(body))
        for number in range(2):
            generation = await s.engine.generation(number)
            generation.say(Talk(s, policy_tokenizer).encode("Yes."))
        assert "error" in await client.answer()
        (call,) = (await s.settled()).calls
        assert (call.status, call.findings[0].code) == ("failed", "T01")


async def test_of_two_equal_replies_the_one_that_came_back_is_continued(
    policy_renderer: Renderer, policy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with staged(policy_renderer, tmp_path / "capture.db", chat=True) as s:
        talk = Talk(s, policy_tokenizer)
        await talk.turn(talk.encode(CALLING))
        talk.history.clear()
        await talk.turn(talk.encode(CALLING))
        await talk.turn(talk.encode("Done."))
        captured = await s.settled()
        first, second, third = captured.calls
        assert (third.parent_call, third.fork_reason) == (second.call_id, "")
        traces = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
        assert [trace.call_ids for trace in traces] == [(first.call_id,), (second.call_id, third.call_id)]


@pytest.mark.parametrize("chat", [True, False])
async def test_messages_are_dropped_as_soon_as_nobody_needs_them(
    policy_renderer: Renderer, policy_tokenizer: Tokenizer, tmp_path: Path, chat: bool
) -> None:
    """A call may take minutes, and its history may have megabytes."""
    async with staged(policy_renderer, tmp_path / "capture.db", chat=chat) as s:
        client = s.ask(stream=True, content="A long story.")
        generation = await s.engine.generation(0)
        generation.say(Talk(s, policy_tokenizer).encode("Yes."))
        await until(lambda: b"Yes" in client.received)
        s.engine.asked.clear()
        kept = [each for each in gc.get_objects() if isinstance(each, Message) and each.text == "A long story."]
        assert len(kept) <= 1, "the one that the gateway's memory, which is bounded, shares with whoever needs it"
        generation.stop()
        await client.task
        assert len((await s.settled()).messages) == 1


async def test_images_and_a_choice_of_tool_are_handed_to_the_engine(
    policy_renderer: Renderer, policy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with staged(policy_renderer, tmp_path / "capture.db", chat=True) as s:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        body = {"messages": [{"role": "user", "content": [image]}], "tools": [tool], "tool_choice": "required"}
        client = Client(s.app, s.key, msgspec.json.encode(body))
        generation = await s.engine.generation(0)
        generation.say(Talk(s, policy_tokenizer).encode("Yes."))
        generation.stop()
        await client.answer()
        (asked,) = s.engine.asked
        assert (asked.messages[0].content, asked.tool_choice) == ((ImagePart("image/png", "AAAA"),), "required")
        (call,) = (await s.settled()).calls
        assert (call.unserved, call.constrained) == ((), True)
