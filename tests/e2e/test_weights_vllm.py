"""New weights into the real vLLM while a real harness works on it: no call fails, and each token knows its weights.

Needs `make vllm`; run by `make test-all`.
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polar import harnesses, sandboxes
from polar.engines.protocol import ResolvedSampling
from polar.engines.renderers import load_renderer
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError
from polar.gateway.gateway import gateway
from polar.paths import cache_dir
from polar.rollout.folder import RunFolder
from polar.specs import Float32Array, HarnessSpec, Int32Array, SamplingSpec, Task, Timeouts, VersionSpan
from polar.store.captured import read_captured
from polar.tokens.tree import TokenTree
from polar.training.batch import Layout
from polar.training.config import ModelSpec
from polar.training.policy import Policy, load_policy
from polar.training.weights import Publisher
from tests import qwen3
from tests.e2e.harnesses.rig import beside, harness_process, live
from tests.e2e.test_qwen3_vllm import CALLS
from tests.e2e.vllm_server import vllm_server

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]
PROMPT = np.arange(100, 140, dtype=np.int32)


@pytest.fixture(scope="module")
def model(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an output matrix of its own: of a tied one, vLLM 0.32 on a CPU goes on with a copy that no reload changes."""
    place = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(qwen3.tiny_model(cache_dir), place)
    auto: Any = AutoModelForCausalLM
    untied = auto.from_pretrained(place, dtype=torch.float32)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    untied.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm_server(model, log, "--max-model-len", "32768", "--max-num-seqs", "4") as url:
        yield url


@pytest.fixture(scope="module")
def adapting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM that takes adapters, two of them in one batch."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm_server(model, log, "--max-model-len", "4096", "--max-num-seqs", "4", "--enable-lora", "--max-loras", "2") as url:
        yield url


def logprobs(policy: Policy, prompt: Int32Array, ids: Int32Array) -> Float32Array:
    """What the trainer says of `ids` behind `prompt`; float32[n]."""
    whole = np.concatenate([prompt, ids]).astype(np.int64)
    size, first = len(whole), len(prompt)
    layout = Layout(
        ids=whole,
        positions=np.arange(size),
        bounds=np.asarray([0, size]),
        parents=np.asarray([-1], np.int32),
        reach=np.full(size, size),
        predictors=np.arange(first - 1, size - 1),
        targets=whole[first:],
        trained=np.arange(len(ids)),
    )
    with torch.no_grad():
        found: Float32Array = policy(layout).logprobs.numpy()
    return found


def change(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


async def test_an_update_in_mid_generation_shows_as_spans_and_the_rest_is_of_the_new_weights(
    vllm: str, model: Path, tmp_path: Path
) -> None:
    policy = load_policy(model, ModelSpec(str(model)))
    engine = VllmEngine(vllm)
    try:
        await engine.info()
        publisher = Publisher(engine, tmp_path)
        await publisher.publish(policy.save, 0)
        before, updated = None, False
        ids: list[int] = []
        async for piece in engine.generate("spans", PROMPT, ResolvedSampling(max_tokens=400)):
            ids += piece.ids
            if len(ids) > 40 and not updated:
                before = logprobs(policy, PROMPT, np.asarray(ids, np.int32))
                change(policy)
                spent = await publisher.publish(policy.save, 1)
                updated = True
            if piece.finish:
                spans = piece.versions
        assert before is not None
        assert len(ids) == 400
        assert [span.policy_version for span in spans] == [0, 1]
        assert spent["seconds/publish"] < 10
        fresh: list[int] = []
        told: list[float] = []
        async for piece in engine.generate("fresh", PROMPT, ResolvedSampling(max_tokens=64)):
            fresh += piece.ids
            told += piece.logprobs
        now = logprobs(policy, PROMPT, np.asarray(fresh, np.int32))
        assert np.abs(now - np.asarray(told)).mean() < 1e-3, (
            "the prompt was cached under the old weights, and is not reused (W02)"
        )
        old = load_policy(model, ModelSpec(str(model)))
        assert np.abs(logprobs(old, PROMPT, np.asarray(fresh, np.int32)) - np.asarray(told)).mean() > 1e-2
        assert len(list(tmp_path.iterdir())) == 2, "the newest two are kept"
    finally:
        await engine.close()


async def sampled(engine: VllmEngine, name: str, tokens: int) -> tuple[Int32Array, Float32Array, tuple[VersionSpan, ...]]:
    parts = [part async for part in engine.generate(name, PROMPT, ResolvedSampling(max_tokens=tokens))]
    ids = np.asarray([token for part in parts for token in part.ids], np.int32)
    return ids, np.asarray([value for part in parts for value in part.logprobs], np.float32), parts[-1].versions


async def test_an_adapter_serves_what_begins_and_a_running_call_ends_under_its_own(
    adapting: str, model: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    spec = ModelSpec(str(model), lora_rank=8)
    old, new = load_policy(model, spec), load_policy(model, spec)
    for policy, size in ((old, 0.05), (new, 0.1)):
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, size)
    engine = VllmEngine(adapting)
    try:
        await engine.info()
        publisher = Publisher(engine, tmp_path, "adapter")
        await publisher.publish(old.save_adapter, 1)
        whole = np.concatenate([PROMPT, (await sampled(engine, "first", 16))[0]])
        assert np.abs((await engine.score(whole))[-16:] - logprobs(old, PROMPT, whole[-16:])).max() < 1e-3
        running = asyncio.create_task(sampled(engine, "running", 300))
        await asyncio.sleep(1)
        spent = await publisher.publish(new.save_adapter, 2)
        assert spent["seconds/publish"] < 10
        fresh, told, spans = await sampled(engine, "fresh", 32)
        assert not running.done(), "a call of the new version need not wait for those of the old one"
        assert spans == (VersionSpan(0, 32, 2),)
        assert np.abs(logprobs(new, PROMPT, fresh) - told).max() < 1e-3, "no prefix of the old adapter is reused (W02)"
        assert np.abs(logprobs(old, PROMPT, fresh) - told).mean() > 0.1
        assert len([*engine.adapters]) == 2
        ids, told, spans = await running
        assert spans == (VersionSpan(0, 300, 1),)
        assert np.abs(logprobs(old, PROMPT, ids) - told).max() < 1e-3, "all of it is of the adapter that it began with (W01)"
        await publisher.publish(old.save_adapter, 3)
        assert len([*engine.adapters]) == 1
        async with aiohttp.request("GET", f"{adapting}/v1/models") as reply:
            names = [each["id"] for each in (await reply.json())["data"]]
        assert len(names) == 2, f"those that no call needs are unloaded: {names}"
    finally:
        await engine.close()


async def test_a_vllm_without_adapters_says_how_to_start_it(vllm: str, model: Path, tmp_path: Path) -> None:
    policy = load_policy(model, ModelSpec(str(model), lora_rank=8))
    engine = VllmEngine(vllm)
    try:
        with pytest.raises(EngineError, match="start vLLM with --enable-lora"):
            await Publisher(engine, tmp_path, "adapter").publish(policy.save_adapter, 1)
    finally:
        await engine.close()


async def test_a_harness_at_work_sees_nothing_of_updates(vllm: str, model: Path, tmp_path: Path) -> None:
    policy = load_policy(model, ModelSpec(str(model)))
    harness = harnesses.get("pi")
    if not harness.installed(cache_dir()):
        await asyncio.to_thread(harness.install, cache_dir(), lambda _: None)
    sampling = SamplingSpec(max_tokens=256, regex=CALLS["pi"])
    task = Task("t", "Look around.", {}, HarnessSpec("pi"), sampling=sampling, timeouts=Timeouts(run=240))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    engine = VllmEngine(vllm)
    publisher = Publisher(engine, tmp_path / "weights")

    async def update() -> None:
        for version in range(10, 16):
            change(policy)
            await publisher.publish(policy.save, version)
            await asyncio.sleep(1)
        program = harness_process()
        for process in (*program.children(recursive=True), program):
            process.kill()

    try:
        async with gateway(await served(engine, load_renderer(model)), folder.capture) as running:
            session = live(task, folder, running, sandboxes.choose("process", tmp_path / "sandboxes"))
            result = await beside(session, update())
    finally:
        await engine.close()
    captured = read_captured(folder.capture, result.session_id)
    calls = sorted(captured.calls, key=lambda call: call.ordinal)
    assert len(calls) > 3
    assert {call.status for call in calls[:-1]} == {"ok"}, [call.error for call in calls]
    assert not [call.fork_reason for call in calls if call.fork_reason]
    tree = TokenTree(captured.nodes)
    answered = [choice.node for call in calls[:-1] for choice in call.choices if choice.node is not None]
    versions = [span.policy_version for node in answered for span in tree.nodes[node].versions]
    assert versions == sorted(versions)
    assert len(set(versions)) > 2
