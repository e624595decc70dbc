"""Seven real harnesses on the real vLLM: every prompt and every sampled token is that of the wire, over ten turns each.

The model is shaped like Qwen3 and knows nothing (`tests.qwen3`). Random weights call no tools, so a regular expression makes
them sample calls of a harness's own shell, most of them spelled in pieces that no tokenizer would choose. Needs `make vllm`;
run by `make test-all`, and by `make drift-table`, which tells what was seen in `docs/drift.md`.
"""

import asyncio
import functools
import json
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from polar import harnesses, sandboxes
from polar.engines.renderers import load_renderer
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import Gateway, gateway
from polar.paths import cache_dir
from polar.rollout.folder import RunFolder
from polar.rollout.probe import differences
from polar.specs import Float32Array, HarnessProfile, HarnessSpec, Int32Array, SamplingSpec, Task, Timeouts
from polar.store.captured import read_captured
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import build
from tests import qwen3
from tests.drift.probe import breaks
from tests.e2e.harnesses.rig import Seen, beside, branches, exact, harness_process, live, seen
from tests.e2e.vllm_server import vllm_server
from tests.e2e.wire import Tap, tapped
from tests.gateway.conversation import Conversation

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]
TURNS = 10
LIMITS = ("--max-model-len", "65536", "--max-num-seqs", "4")
COMMANDS = "(ls|pwd|date|echo [a-z]{2,8})"  # harmless, whatever is sampled


def calls_of(tool: str, argument: str, others: str = "") -> str:
    """What a whole reply must match: one call of `tool` with a command; `others` are further arguments, as JSON."""
    start, end = f'{{"name": "{tool}", "arguments": {{"{argument}": "', f'"{others}}}}}\n</tool_call>'
    return f"<tool_call>\n{re.escape(start)}{COMMANDS}{re.escape(end)}"


CALLS = {
    "claude_code": calls_of("Bash", "command"),
    "codex": calls_of("exec_command", "cmd"),
    "gemini_cli": calls_of("run_shell_command", "command"),
    "mini_swe_agent": calls_of("bash", "command"),
    "opencode": calls_of("bash", "command", ', "description": "Looks"'),
    "pi": calls_of("bash", "command"),
    "qwen_code": calls_of("run_shell_command", "command"),
}
Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Stand:
    """A real vLLM, and the renderer of its model."""

    url: str
    model: Path
    renderer: Renderer


@pytest.fixture(scope="module")
def stand(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    model = qwen3.tiny_model(cache_dir)
    with vllm_server(model, tmp_path_factory.mktemp("vllm") / "log", *LIMITS) as url:
        yield Stand(url, model, load_renderer(model))


@asynccontextmanager
async def serving(stand: Stand, capture: Path) -> AsyncIterator[tuple[Gateway, Tap]]:
    """A gateway before the tapped engine."""
    async with tapped(stand.url) as (url, tap):
        engine = VllmEngine(url)
        try:
            async with gateway(await served(engine, stand.renderer), capture) as running:
                yield running, tap
        finally:
            await engine.close()


async def end_after(turns: int, tap: Tap) -> None:
    """The policy will never say that it is done: end the harness when it has had its turns, and asks once more."""
    while tap.answered() <= turns:
        await asyncio.sleep(0.05)
    program = harness_process()
    for process in (*program.children(recursive=True), program):
        process.kill()


async def play(name: str, stand: Stand, tmp_path: Path) -> Seen:
    """One session of harness `name`, ended after its turns."""
    harness = harnesses.get(name)
    if not harness.installed(cache_dir()):
        await asyncio.to_thread(harness.install, cache_dir(), lambda _: None)
    sampling = SamplingSpec(max_tokens=256, regex=CALLS[name])
    task = Task("t", "Look around.", {}, HarnessSpec(name), sampling=sampling, timeouts=Timeouts(run=240))
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="run-", dir=tmp_path)))
    async with serving(stand, folder.capture) as (running, tap):
        session = live(task, folder, running, sandboxes.choose("process", tmp_path / "sandboxes"))
        result = await beside(session, end_after(TURNS, tap))
        return seen(result, folder, running, tap.log())


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_ten_turns_on_vllm_are_one_branch_that_equals_the_wire_and_is_not_trained(
    name: str, stand: Stand, tmp_path: Path, record_property: Record
) -> None:
    played = await play(name, stand, tmp_path)
    exact(played)
    ((kind, turns, reason),) = branches(played)
    assert (kind, reason) == ("agent", "")
    assert turns >= TURNS
    assert breaks(played.log) == 0
    odd = sum(not is_canonical(entry.ids, stand.model) for entry in played.log)
    assert odd >= turns // 2, "most of what was sampled is what no tokenizer would encode"
    sampled = sum(len(entry.ids) for entry in played.log)
    cut = [call.sampled for call in played.captured.calls if call.status == "aborted"]  # by the end of the harness, if at all
    accounting = build(played.captured, builder="prefix_merging", status="completed", reward=1.0).accounting
    excluded = {"constrained": sampled - sum(cut)} | ({"aborted": sum(cut)} if cut else {})
    assert (accounting.sampled, accounting.trained, accounting.excluded) == (sampled, 0, excluded)
    row = [name, played.calls[0].dialect, len(played.log[0].prompt_ids), turns, sampled, odd, breaks(played.log), 1]
    record_property("row", json.dumps(row))


async def test_log_probabilities_of_free_sampling_are_those_of_a_plain_forward(stand: Stand, tmp_path: Path) -> None:
    capture = tmp_path / "capture.db"
    async with serving(stand, capture) as (running, tap):
        opened = await running.sessions.open(task_id="t", profile=HarnessProfile(), sampling=SamplingSpec(max_tokens=48))
        client = openai.AsyncOpenAI(base_url=f"{running.base_url(opened.key)}/v1", api_key="any", max_retries=0)
        talk = Conversation(client)
        for turn in range(3):
            await talk.ask(stream=turn % 2 == 0)
            talk.messages.append({"role": "user", "content": "And then?"})
        await running.sessions.freeze(opened.session_id)
        captured = read_captured(capture, opened.session_id)
        assert not list(differences(captured, tap.log()))
    (trace,) = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
    forward = plain_forward(stand.model, np.concatenate([trace.prompt_ids, trace.response_ids]))[len(trace.prompt_ids) - 1 :]
    mask = trace.loss_mask == 1
    assert mask.sum() == sum(len(entry.ids) for entry in tap.log()) >= 100
    delta = np.abs(forward[mask] - trace.response_logprobs[mask])
    assert delta.mean() < 1e-4
    assert delta.max() < 1e-2
    assert np.abs(forward[mask][1:] - trace.response_logprobs[mask][:-1]).mean() > 0.1, "one token off is far off"


def is_canonical(ids: Sequence[int], model: Path) -> bool:
    """Whether these are the ids that the tokenizer gives to their text."""
    tokenizer = _tokenizer(model)
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    return bool(tokenizer.encode(text, add_special_tokens=False).ids == list(ids))


@functools.cache
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def plain_forward(model: Path, ids: Int32Array) -> Float32Array:
    """Log-probability of each of `ids[1:]` given what is before it, by the model library itself; float32[n - 1]."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits = network(tokens[None]).logits[0, :-1]
    scores: Float32Array = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()
    return scores
