"""LoRA adapters of a vLLM server: a name for each version, kept while a call runs with it. The server is the scripted engine."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.chat import ChatRequest, Message, TextPart
from polar.engines.protocol import ResolvedSampling
from polar.engines.scripted import Scripted, ScriptedEngine
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError, UsageError
from polar.specs import VersionSpan
from polar.training.weights import Publisher
from tests.engines.servers import ids, logged, serving, stream
from tests.engines.servers import replaying as answering

SAMPLING = ResolvedSampling(max_tokens=1000, stop_token_ids=(2,))
TOKEN_ROUTES = ("/inference/v1/generate", "/inference/v1/abort_requests")


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


async def spans(engine: VllmEngine, request_id: str, chat: bool = False) -> tuple[VersionSpan, ...]:
    if chat:
        request = ChatRequest("", (Message("user", (TextPart("Hi"),)),), stream=True)
        return [part.tokens async for part in engine.chat(request_id, request, SAMPLING)][-1].versions
    return [part async for part in engine.generate(request_id, ids(5, 6), SAMPLING)][-1].versions


def told(scripted: ScriptedEngine) -> list[tuple[str, str]]:
    """Version and direction of what the server was told of adapters."""
    return [
        (control.path.split("/")[2].split("_")[0], json.loads(control.body)["lora_name"].split("-")[1])
        for control in scripted.controls
        if control.path.endswith("_lora_adapter")
    ]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("without", [(), TOKEN_ROUTES])
async def test_a_call_keeps_the_version_that_it_began_with(tokenizer: Tokenizer, without: tuple[str, ...], chat: bool) -> None:
    script = Scripted("word " * 40, delay_per_token=0.005)
    scripted = ScriptedEngine(tokenizer, lambda call: script, without=without)
    async with serving(scripted) as engine:
        await engine.info()
        await engine.load_adapter("/adapters/3", 3)
        running = asyncio.create_task(spans(engine, "r1", chat))
        await logged(scripted, 4)
        scripted.version = "9"  # the server's own word for its weights says nothing of adapters
        await engine.load_adapter("/adapters/4", 4)
        assert list(engine.adapters) == ["/adapters/3", "/adapters/4"], "the old one is still needed"
        script = Scripted("short")
        (new,) = await spans(engine, "r2", chat)
        assert not running.done()
        (old,) = await running
        await engine.load_adapter("/adapters/5", 5)
        assert list(engine.adapters) == ["/adapters/5"]
    first, second = scripted.log
    assert (old, new) == (VersionSpan(0, len(first.ids), 3), VersionSpan(0, len(second.ids), 4))
    assert [name.rsplit("-", 1)[0] for name in (first.model, second.model)] == ["polar-3", "polar-4"]
    assert told(scripted) == [("load", "3"), ("load", "4"), ("load", "5"), ("unload", "3"), ("unload", "4")]


async def test_a_version_that_is_loaded_again_has_another_name(tokenizer: Tokenizer) -> None:
    scripted = ScriptedEngine(tokenizer, lambda call: Scripted("short"))
    async with serving(scripted) as engine:
        for _ in range(2):
            await engine.load_adapter("/adapters/3", 3)
            await spans(engine, "r")
    first, second = (entry.model for entry in scripted.log)
    assert first != second


async def test_a_server_that_takes_no_adapters_is_told_how_to_start(tokenizer: Tokenizer) -> None:
    scripted = ScriptedEngine(tokenizer, lambda call: Scripted("short"), without=("/v1/load_lora_adapter",))
    async with serving(scripted) as engine:
        with pytest.raises(UsageError, match="start vLLM with --enable-lora"):
            await engine.load_adapter("/adapters/3", 3)
        assert (await spans(engine, "r"))[0].policy_version == 0
    refusal = stream(b'{"error":{"message":"LoRA is not enabled","code":500}}').replace(b"200 OK", b"500 No")
    async with answering(refusal) as (engine, _):
        with pytest.raises(EngineError, match="LoRA is not enabled.*start vLLM with --enable-lora"):
            await engine.load_adapter("/adapters/3", 3)


async def test_a_directory_stays_until_no_call_needs_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = Scripted("word " * 100, delay_per_token=0.005)
    scripted = ScriptedEngine(tokenizer, lambda call: script)
    async with serving(scripted) as engine:
        publisher = Publisher(engine, tmp_path, "adapter")
        await publisher.publish(lambda directory: directory.mkdir(), 0)
        running = asyncio.create_task(spans(engine, "r1"))
        await logged(scripted, 4)
        for version in (1, 2, 3):
            await publisher.publish(lambda directory: directory.mkdir(), version)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["000000", "000002", "000003"]
        await engine.abort("r1")
        await running
        await publisher.publish(lambda directory: directory.mkdir(), 4)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000004"]
    assert not [control for control in scripted.controls if control.path.startswith("/pause")], "nobody waits"
