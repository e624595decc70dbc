"""The drift probe: many dialogues through one dialect, a renderer and a vocabulary, held against the policy's own log.

What is proved is proved from the log alone: the prompts that the policy received and the tokens that it sampled. Polar's store
is only asked for the traces, which have to be made of just these.
"""

import asyncio
import functools
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from polar.engines.scripted import Logged, Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.served import served
from polar.engines.tokenizers import load_tokenizer
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import Gateway, gateway
from polar.specs import Accounting, HarnessProfile, SamplingSpec, Trace
from polar.store.captured import read_captured
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import build
from tests.drift.clients import CLIENTS, Open, habits
from tests.drift.dialogues import TURNS, Spell, dialogue

AT_ONCE = 8  # dialogues that are held at the same time
TRIMMING = HarnessProfile("trimming", normalisers=("trim_text",))


@dataclass(frozen=True)
class Model:
    """A policy, and who renders.

    Attributes:
        renderer: None for chat mode, in which the engine renders by the model's own template.
        spell: how it writes a reply.
        canonical: it samples as the tokenizer encodes; else as no tokenizer would.
    """

    directory: Path
    renderer: Renderer | None
    spell: Spell
    canonical: bool = False


@dataclass
class Outcome:
    """What came of some dialogues.

    Attributes:
        breaks: prompts that do not start with the prompt and the reply before them, token by token.
        odd: replies that are not what the tokenizer makes of their text.
        changes: how replies came back otherwise than they were sent (T02, T03), by name.
        forks: why prompts were not continued, as Polar names it.
        excluded: tokens that are not trained, by reason.
    """

    dialogues: int = 0
    calls: int = 0
    sampled: int = 0
    odd: int = 0
    breaks: int = 0
    traces: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)


class Policy:
    """Says what the dialogue wants said next. `asked` are the requests of each dialogue, in order: the log is read by them."""

    def __init__(self, spell: Spell, canonical: bool) -> None:
        self.asked: dict[int, list[str]] = {}
        self._spell = spell
        self._canonical = canonical

    def __call__(self, call: ScriptedCall) -> Scripted:
        found = re.search(r"Dialogue (\d+)\.", call.prompt_text)
        assert found is not None
        number = int(found[1])
        asked = self.asked.setdefault(number, [])
        turn = len(asked)
        asked.append(call.request_id)
        said = dialogue(number).turns[turn].said
        text = self._spell(said, random.Random(f"{number} {turn}"))
        finish: Literal["length", "stop"] = "length" if said.cut else "stop"
        return Scripted(text, tokens_per_chunk=7, finish=finish, canonical=self._canonical)


async def probe(model: Model, dialect: str, numbers: Iterable[int], folder: Path) -> Outcome:
    """Hold the dialogues of `numbers` through `dialect`.

    Raises:
        AssertionError: a trace is not made of what the log says, a token is neither trained once nor counted as excluded, or a
            client was told other tool calls than the policy made.
    """
    tokenizer, decode = loaded(model.directory)
    policy = Policy(model.spell, model.canonical)
    engine = ScriptedEngine(tokenizer, policy, model_dir=model.directory, max_model_len=200_000)
    outcome, capture = Outcome(), folder / "capture.db"
    async with scripted_server(engine) as url, CLIENTS[dialect]() as open_client:
        client = VllmEngine(url)
        try:
            async with gateway(await served(client, model.renderer, decode=decode), capture) as running:
                held = await _hold_all(running, list(numbers), open_client)
        finally:
            await client.close()
    log = {entry.request_id: entry for entry in engine.log}
    for number, session_id in held.items():
        _judge(outcome, [log[request] for request in policy.asked[number]], capture, session_id)
    outcome.odd = sum(_is_odd(entry.ids, tokenizer) for entry in engine.log)
    return outcome


@functools.cache
def loaded(directory: Path) -> tuple[Tokenizer, Callable[[Sequence[int]], str]]:
    """A model's tokenizer for the policy, and the decoder that Polar has of it."""
    return Tokenizer.from_file(str(directory / "tokenizer.json")), load_tokenizer(directory).decode


async def _hold_all(running: Gateway, numbers: Sequence[int], open_client: Open) -> dict[int, str]:
    """The session of each dialogue."""
    free = asyncio.Semaphore(AT_ONCE)
    held: dict[int, str] = {}

    async def one(number: int) -> None:
        async with free:
            held[number] = await _hold(running, number, open_client)

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(one(number))
    return held


async def _hold(running: Gateway, number: int, open_client: Open) -> str:
    profile = TRIMMING if habits(number).trims else HarnessProfile()
    opened = await running.sessions.open(task_id="drift", profile=profile, sampling=SamplingSpec())
    talk = dialogue(number)
    client = open_client(running.base_url(opened.key), talk, habits(number))
    for turn in talk.turns:
        await client.ask()
        told = [(call.name, _plain(call.arguments)) for call in client.called]
        assert told == [(name, _plain(arguments)) for name, arguments in turn.said.calls]
        client.hear(turn)
    await running.sessions.freeze(opened.session_id)
    return opened.session_id


def _plain(value: object) -> object:
    """A value without what a family's way of writing cannot keep, and a vocabulary's normaliser does not."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return unicodedata.normalize("NFC", value.replace("<", "‹").strip()) if isinstance(value, str) else value


def _judge(outcome: Outcome, log: Sequence[Logged], capture: Path, session_id: str) -> None:
    """Hold one dialogue against the log."""
    captured = read_captured(capture, session_id)
    trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
    check_traces(log, trajectory.traces, trajectory.accounting)
    assert len(log) == TURNS
    outcome.dialogues += 1
    outcome.calls += len(log)
    outcome.sampled += sum(len(entry.ids) for entry in log)
    outcome.breaks += breaks(log)
    outcome.traces += len(trajectory.traces)
    outcome.excluded.update(trajectory.accounting.excluded)
    for call in captured.calls:
        outcome.changes.update(call.normalisers)
        outcome.forks.update([call.fork_reason] if call.fork_reason else [])


def breaks(log: Sequence[Logged]) -> int:
    """How many prompts of a dialogue do not start with the prompt and the reply before them."""
    wholes = [(*entry.prompt_ids, *entry.ids) for entry in log]
    return sum(entry.prompt_ids[: len(before)] != before for before, entry in zip(wholes, log[1:], strict=False))


def check_traces(log: Sequence[Logged], traces: Sequence[Trace], accounting: Accounting) -> None:
    """Every trace is what the policy read and sampled; every sampled token is trained once, or counted as excluded.

    Raises:
        AssertionError: it is not so.
    """
    entries = {entry.request_id: entry for entry in log}
    for trace in traces:
        last = entries[trace.call_ids[-1]]
        whole = np.array([*last.prompt_ids, *last.ids])
        mask, logprobs = np.zeros(len(whole), np.uint8), np.zeros(len(whole), np.float32)
        for call_id in trace.call_ids:
            entry, start = entries[call_id], len(entries[call_id].prompt_ids)
            assert whole[:start].tolist() == list(entry.prompt_ids)
            assert whole[start : start + len(entry.ids)].tolist() == entry.ids
            mask[start : start + len(entry.ids)] = 1
            logprobs[start : start + len(entry.ids)] = entry.logprobs
        prompt = len(trace.prompt_ids)
        assert [*trace.prompt_ids, *trace.response_ids] == whole.tolist()
        assert trace.loss_mask.tolist() == mask[prompt:].tolist()
        assert trace.response_logprobs.tolist() == logprobs[prompt:].tolist()
    trained = [call_id for trace in traces for call_id in trace.call_ids]
    assert len(set(trained)) == len(trained)
    assert accounting.trained == sum(len(entries[call_id].ids) for call_id in trained)
    assert accounting.sampled == sum(len(entry.ids) for entry in log) == accounting.trained + sum(accounting.excluded.values())


def _is_odd(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    return bool(tokenizer.encode(text, add_special_tokens=False).ids != list(ids))
