"""Finished run folders, made by a real gateway before a scripted policy: what the audit and the command line are tried on."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
from tokenizers import Tokenizer

from polar.engines.renderers import load_renderer
from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import Gateway, gateway
from polar.rollout.folder import RunFolder
from polar.rollout.sessions import Attempt, Ending, result_from_store
from polar.specs import HarnessProfile, Task, Timing
from polar.store.ledger import Ledger
from polar.version import __version__
from tests.gateway.conversation import Conversation, call_text

Play = Callable[[Conversation], Awaitable[None]]


def reply(call: ScriptedCall) -> Scripted:
    """Two tool calls, then the answer; what the last message asks for decides otherwise."""
    asked = call.prompt_text.rsplit("<|im_start|>", 2)[-2]
    if "be cut" in asked:
        return Scripted("This is a long answer that does not", finish="length")
    if "be slow" in asked:
        return Scripted("One two three four five six seven eight nine ten", delay_per_token=0.05)
    return Scripted(call_text(f"ls {call.turn}", before="I look. ")) if call.turn < 2 else Scripted("Done: 42 [bold]✓[/bold].")


async def work(talk: Conversation) -> None:
    """Three calls, each continuing the one before."""
    for _ in range(3):
        await talk.ask(stream=True)


async def rewrite(talk: Conversation) -> None:
    """A history that the harness changes: the last call forks."""
    await work(talk)
    talk.messages[1] = {"role": "assistant", "content": "I never said that.\x1b]0;owned\x07 [red]No[/red]."}
    await talk.ask()


async def cut(talk: Conversation) -> None:
    """An answer cut by length and asked again: the first is superseded."""
    talk.messages[0] = {"role": "user", "content": "Please be cut."}
    talk.tools = None
    await talk.ask()
    talk.messages.pop()
    await talk.ask(temperature=0.5)


async def hang_up(talk: Conversation) -> None:
    """A client that leaves in the middle of a stream: the call is aborted."""
    talk.messages[0] = {"role": "user", "content": "Please be slow."}
    messages: Any = talk.messages
    stream = await talk.client.chat.completions.create(model="policy", messages=messages, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.sleep(0.2)


SESSIONS: tuple[tuple[str, int, Play, Ending], ...] = (
    ("files", 0, work, Ending("completed", 1.0)),
    ("files", 1, rewrite, Ending("completed", 0.0)),
    ("cuts", 0, cut, Ending("timed_out", 0.0)),
    ("cuts", 1, hang_up, Ending("failed", None, "the engine died", "EngineError")),
)


def make_run(path: Path, model_dir: Path) -> RunFolder:
    """A run of two tasks with two samples each; `SESSIONS` says what happened in them."""
    return asyncio.run(_make_run(RunFolder(path), model_dir))


async def _make_run(folder: RunFolder, model_dir: Path) -> RunFolder:
    folder.path.mkdir(parents=True)
    engine = ScriptedEngine(Tokenizer.from_file(str(model_dir / "tokenizer.json")), reply, model_dir=model_dir)
    async with scripted_server(engine) as url:
        client, ledger = VllmEngine(url), Ledger.open(folder.ledger)
        try:
            await _describe(ledger, model_dir, url)
            async with gateway(await served(client, load_renderer(model_dir)), folder.capture) as running:
                for position, (task_id, sample, play, ending) in enumerate(SESSIONS):
                    task = Task(task_id, f"Do {task_id}.", samples=2)
                    await ledger.add_task(task, position)
                    await _session(running, ledger, folder, Attempt(task, sample, 0), play, ending)
        finally:
            await ledger.close()
            await client.close()
    return folder


async def _describe(ledger: Ledger, model_dir: Path, url: str) -> None:
    settings = {
        "engine": url,
        "model": "scripted",
        "model_path": str(model_dir),
        "renderer": "chatml",
        "sandbox": "process",
        "polar_version": __version__,
        "created": "1700000000.000",
    }
    for name, value in settings.items():
        await ledger.set_meta(name, value)


async def _session(running: Gateway, ledger: Ledger, folder: RunFolder, attempt: Attempt, play: Play, ending: Ending) -> None:
    opened = await running.sessions.open(task_id=attempt.task.id, profile=HarnessProfile(), sampling=attempt.task.sampling)
    await ledger.add_session(opened.session_id, attempt.task.id, attempt.sample, attempt.number)
    async with openai.AsyncOpenAI(base_url=f"{running.base_url(opened.key)}/v1", api_key="any", max_retries=0) as client:
        await play(Conversation(client))
    await running.sessions.freeze(opened.session_id)
    timing = Timing(queued=0.1, preparing=0.2, ready=0.0, running=1.5, scoring=0.3)
    await ledger.finish(result_from_store(folder.capture, opened.session_id, attempt, ending, timing))
