"""A real harness on the embedded engine while weights change under its call: it notices nothing, and all of it can be trained."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from polar import harnesses, sandboxes
from polar.engines.launch import embedded_engine
from polar.engines.protocol import Generated, ResolvedSampling
from polar.engines.renderers import load_renderer
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import gateway
from polar.paths import cache_dir
from polar.rollout.folder import RunFolder
from polar.specs import HarnessSpec, Int32Array, SamplingSpec, Task, Timeouts, TrainingPolicy
from polar.store.capture import CaptureReader
from polar.store.captured import trained_forest
from polar.training.batch import Batch
from polar.training.config import ModelSpec, TrainConfig
from polar.training.learner import Learner
from polar.training.policy import load_policy
from polar.training.weights import Publisher
from tests import qwen3
from tests.e2e.harnesses.rig import beside, live

TOKENS = 120
UPDATES = {1: 30, 2: 70}  # version and the sampled tokens after which it comes


class Counting(VllmEngine):
    """Says when so many tokens have come."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self._sampled = 0
        self._more = asyncio.Condition()

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        async for piece in super().generate(request_id, prompt_ids, sampling, session_id=session_id):
            async with self._more:
                self._sampled += len(piece.ids)
                self._more.notify_all()
            yield piece

    async def sampled(self, tokens: int) -> None:
        async with self._more:
            await self._more.wait_for(lambda: self._sampled >= tokens)


@pytest.mark.timeout(300)
async def test_pi_works_through_two_updates_and_the_gates_accept_every_token(tmp_path: Path) -> None:
    model = qwen3.tiny_model(cache_dir())
    learner = Learner(load_policy(model, ModelSpec(str(model))), TrainConfig())
    harness = harnesses.get("pi")
    if not harness.installed(cache_dir()):
        await asyncio.to_thread(harness.install, cache_dir(), lambda _: None)
    task = Task("t", "Look.", {}, HarnessSpec("pi"), sampling=SamplingSpec(max_tokens=TOKENS), timeouts=Timeouts(run=200))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    async with embedded_engine(str(model), log=tmp_path / "log") as process:
        engine = Counting(process.url, process.key)
        publisher = Publisher(engine, tmp_path / "weights")

        async def update() -> None:
            for version, after in UPDATES.items():
                await engine.sampled(after)
                with torch.no_grad():
                    for parameter in learner.policy.parameters():
                        parameter.add_(0.01 * torch.randn_like(parameter))
                await publisher.publish(learner.export, version)

        try:
            async with gateway(await served(engine, load_renderer(model)), folder.capture) as running:
                session = live(task, folder, running, sandboxes.choose("process", tmp_path / "sandboxes"))
                result = await beside(session, update())
        finally:
            await engine.close()
    assert (result.status, result.error, result.findings) == ("completed", "", ())
    with closing(CaptureReader.open(folder.capture)) as reader:
        forest = trained_forest(reader, structs.replace(result, reward=1.0), TrainingPolicy())
    metrics = learner.update(Batch(forest, np.asarray([1.0]), version=2))
    assert metrics["tokens_trained"] == result.accounting.trained >= TOKENS
    assert metrics["staleness_max"] == 2
    assert metrics["delta"] < 1e-3, "tokens of the newest weights are exactly theirs, though the call began under others"
    assert metrics["delta_stale"] > 1e-2
