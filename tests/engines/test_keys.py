"""The embedded engine behind a key: its routes are for the process that started it, not for who shares its loopback."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from polar.engines.keys import key_from_environment
from polar.engines.launch import EngineProcess, embedded_engine
from polar.engines.protocol import ResolvedSampling
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError

CONTROLS = (
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/tokenize",
    "/no/such/route",
)
QUESTIONS = ("/is_paused", "/v1/models", "/metrics", "/health/")
PROMPT = np.array([1, 4093, 198, 1780, 314, 260, 3575], np.int32)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[EngineProcess]:
    async with embedded_engine("smollm2", log=tmp_path / "engine.log") as started:
        yield started


async def answer(url: str, method: str, path: str, authorization: str) -> tuple[int, str]:
    headers = {"Authorization": authorization} if authorization else None
    async with aiohttp.ClientSession() as http, http.request(method, url + path, headers=headers) as response:
        return response.status, await response.text()


async def test_the_key_opens_what_is_closed_without_it(process: EngineProcess) -> None:
    assert len(process.key) >= 32
    refusal = (
        401,
        '{"error":{"message":"the engine\'s key is missing or wrong","type":"Unauthorized","param":null,"code":401}}',
    )
    for authorization in ("", "Bearer ", "Bearer another", f"Basic {process.key}", process.key, f"Bearer {process.key} ä"):
        for path in CONTROLS:
            assert await answer(process.url, "POST", path, authorization) == refusal
        for path in QUESTIONS:
            assert await answer(process.url, "GET", path, authorization) == refusal
        assert await answer(process.url, "GET", "/health", authorization) == (200, "")
    engine = VllmEngine(process.url, process.key)
    assert Path((await engine.info()).model_path) == process.model_dir
    parts = [part async for part in engine.generate("r1", PROMPT, ResolvedSampling(max_tokens=4))]
    assert parts[-1].versions[0].policy_version == 0
    assert len(await engine.score(PROMPT)) == len(PROMPT) - 1
    await engine.abort("r1")
    await engine.pause()
    await engine.reload_weights(str(process.model_dir))
    await engine.update_version(7)
    await engine.reset_prefix_cache()
    await engine.resume()
    await engine.close()
    assert (await answer(process.url, "GET", "/is_paused", f"bearer {process.key}"))[0] == 200
    # What others can read of it:
    assert process.key.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert process.key not in await asyncio.to_thread(process.log.read_text)
    assert process.key not in repr(process)


@pytest.mark.parametrize(("given", "key"), [("", ""), ("secret", "secret"), (" secret\r\n", "secret")])
def test_the_key_is_what_the_environment_says(given: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_ENGINE_KEY", given)
    assert key_from_environment() == key
    monkeypatch.delenv("POLAR_ENGINE_KEY")
    assert key_from_environment() == ""


@pytest.mark.parametrize("given", ["two\nlines", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_ENGINE_KEY", given)
    with pytest.raises(UsageError, match="POLAR_ENGINE_KEY: expected one line of printable ASCII characters") as caught:
        key_from_environment()
    assert given not in str(caught.value)
