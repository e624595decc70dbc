"""Earlier reasoning in later prompts (T03): as it was sampled, or as the harness sends it and the model's template shows it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from polar.audit.session import audit_session
from polar.engines.renderers import load_renderer
from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import gateway
from polar.specs import HarnessProfile, ReasoningHistory, SamplingSpec
from polar.trajectory.builders import Captured, build
from tests import qwen3
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import Conversation, call_text
from tests.gateway.test_chat import finished

THOUGHT = "<think>\nIt is so.\n</think>\n\n"
ONE_LETTER = Scripted(f"{THOUGHT}x", canonical=True)


async def opened(stand: Stand, history: ReasoningHistory) -> tuple[str, str]:
    one = await stand.gateway.sessions.open(
        task_id="t", profile=HarnessProfile(), sampling=SamplingSpec(), reasoning_history=history
    )
    return one.session_id, one.key


async def forgetful(stand: Stand, key: str, turns: int, talk: Conversation | None = None) -> Conversation:
    """A harness that sends no reasoning back."""
    talk = talk or Conversation(stand.client(key), tools=None)
    for _ in range(turns):
        (await talk.ask()).pop("reasoning_content", None)
        talk.messages.append({"role": "user", "content": "Go on."})
    return talk


def forks(captured: Captured) -> list[str]:
    return [call.fork_reason for call in captured.calls]


def traces(captured: Captured) -> int:
    return len(build(captured, builder="prefix_merging", status="completed", reward=1.0).traces)


async def test_a_history_keeps_its_reasoning_unless_the_task_wants_it_as_sent(serve: Serve) -> None:
    async with serve(lambda call: ONE_LETTER) as stand:
        session_id, key = await opened(stand, "as_sampled")
        await forgetful(stand, key, 3)
        captured = await stand.captured(session_id)
        assert (forks(captured), traces(captured)) == ([""] * 3, 1)
        assert all("It is so." in stand.renderer.decode(entry.prompt_ids) for entry in stand.log[1:])


async def test_reasoning_that_the_harness_leaves_out_is_not_shown_and_forks_by_name(serve: Serve) -> None:
    async with serve(lambda call: ONE_LETTER) as stand:
        session_id, key = await opened(stand, "as_sent")
        await forgetful(stand, key, 3)
        captured = await finished(stand, session_id)
        assert audit_session(captured, None, stand.renderer) == []
        assert forks(captured) == ["", "reasoning_dropped", "reasoning_dropped"]
        assert [finding.code for call in captured.calls for finding in call.findings] == ["T03", "T03"]
        assert [call.parent_call for call in captured.calls[1:]] == [call.call_id for call in captured.calls[:2]]
        assert traces(captured) == 3
        for call, entry in zip(captured.calls, stand.log, strict=True):
            assert "It is so." not in stand.renderer.decode(entry.prompt_ids)
            sent = [captured.messages[digest] for digest in call.message_hashes]
            assert list(entry.prompt_ids) == stand.renderer.render(sent, ()).tolist()


async def test_reasoning_that_comes_back_as_it_was_goes_on_in_one_trace(serve: Serve) -> None:
    async with serve(lambda call: ONE_LETTER) as stand:
        session_id, key = await opened(stand, "as_sent")
        talk = Conversation(stand.client(key), tools=None)
        for _ in range(3):
            assert (await talk.ask())["reasoning_content"].strip() == "It is so."
            talk.messages.append({"role": "user", "content": "Go on."})
        captured = await finished(stand, session_id)
        assert (forks(captured), traces(captured)) == ([""] * 3, 1)


async def test_it_holds_after_a_restart(serve: Serve) -> None:
    async with serve(lambda call: ONE_LETTER) as stand:
        session_id, key = await opened(stand, "as_sent")
        talk = await forgetful(stand, key, 1)
        port = int(stand.gateway.url.rsplit(":", 1)[1])
    async with serve(lambda call: ONE_LETTER, port=port) as stand:
        talk.client = stand.client(key)
        await forgetful(stand, key, 1, talk)
        assert forks(await stand.captured(session_id)) == ["", "reasoning_dropped"]


async def test_a_program_asks_for_it_when_it_opens_a_session(
    smollm2_dir: Path, policy_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    engine = ScriptedEngine(policy_tokenizer, lambda call: ONE_LETTER, model_dir=smollm2_dir)
    async with scripted_server(engine) as url:
        policy = await served(client := VllmEngine(url), load_renderer(smollm2_dir))
        async with gateway(policy, tmp_path / "capture.db", control_key="k") as running:
            at, headers = f"{running.url}/sessions", {"Authorization": "Bearer k"}
            wanted = {"reasoning_history": "as_sent"}
            async with aiohttp.request("POST", at, json=wanted, headers=headers) as reply:
                session_id = (await reply.json())["session_id"]
            assert running.sessions.by_id(session_id).stored.reasoning_history == "as_sent"
            async with aiohttp.request("POST", at, json={"reasoning_history": "none"}, headers=headers) as reply:
                assert reply.status == 400
                assert "reasoning_history" in await reply.text()
        await client.close()


@asynccontextmanager
async def qwen(model_dir: Path, capture: Path) -> AsyncIterator[Stand]:
    """Qwen3's tokenizer and template; the policy uses a tool in every second turn, and thinks in all."""
    tokenizer, renderer = Tokenizer.from_file(str(model_dir / "tokenizer.json")), load_renderer(model_dir)

    def script(call: ScriptedCall) -> Scripted:
        return Scripted(THOUGHT + (call_text("ls") if call.turn % 2 == 0 else "Done."), canonical=True)

    engine = ScriptedEngine(tokenizer, script, model_dir=model_dir)
    async with scripted_server(engine) as url:
        client = VllmEngine(url)
        async with gateway(await served(client, renderer), capture) as running:
            yield Stand(running, engine, capture, renderer)
        await client.close()


def as_the_template_has_it(model_dir: Path, talk: Conversation, length: int) -> Sequence[int]:
    messages = [{"content": "", **message} for message in talk.messages[:length]]
    template: Any = AutoTokenizer.from_pretrained(model_dir)
    ids: list[int] = template.apply_chat_template(messages, tools=talk.tools, add_generation_prompt=True, return_dict=False)
    return ids


@pytest.mark.heavy
@pytest.mark.parametrize(("history", "expected"), [("as_sampled", 1), ("as_sent", 2)])
async def test_qwen3s_template_forgets_what_was_thought_before_the_last_question(
    cache_dir: Path, tmp_path: Path, history: ReasoningHistory, expected: int
) -> None:
    model_dir = qwen3.tokenizer_dir(cache_dir)
    async with qwen(model_dir, tmp_path / "capture.db") as stand:
        session_id, key = await opened(stand, history)
        talk, lengths = Conversation(stand.client(key)), []
        for turn in range(4):
            lengths.append(len(talk.messages))
            await talk.ask()
            if talk.messages[-1]["role"] == "tool":
                talk.messages[-1]["content"] = "a file"  # transformers reads a control token's spelling as one (T12)
            if turn == 1:
                talk.messages.append({"role": "user", "content": "And again."})
        captured = await finished(stand, session_id)
        assert traces(captured) == expected
        assert forks(captured) == (["", "", "reasoning_dropped", ""] if history == "as_sent" else [""] * 4)
        if history == "as_sent":
            for length, entry in zip(lengths, stand.log, strict=True):
                assert list(entry.prompt_ids) == as_the_template_has_it(model_dir, talk, length)
