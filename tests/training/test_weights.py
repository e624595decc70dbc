"""New weights reach an engine whole, or it is not asked to go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.engines.pool import EnginePool
from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError
from polar.training.weights import Publisher


class Faulty(VllmEngine):
    """Fails where it is told to, and can be held while it loads."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.failing = ""
        self.loading, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def pause(self, mode: str = "keep") -> None:
        if self.failing == "pause":
            raise EngineError("it does not pause")
        await super().pause("keep")

    async def reload_weights(self, path: str) -> None:
        self.loading.set()
        await self.go_on.wait()
        if self.failing == "load":
            raise EngineError("half of it is not there")
        await super().reload_weights(path)


@asynccontextmanager
async def replicas(model: Path) -> AsyncIterator[tuple[EnginePool, list[Faulty], list[ScriptedEngine]]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    servers = [ScriptedEngine(tokenizer, lambda call: Scripted("ok")) for _ in range(2)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(scripted_server(server)) for server in servers]
        engines = [Faulty(url) for url in urls]
        pool = EnginePool(dict(zip(urls, engines, strict=True)))
        stack.push_async_callback(pool.close)
        await pool.info()
        yield pool, engines, servers


async def test_a_replica_that_does_not_pause_leaves_none_paused(smollm2_dir: Path, tmp_path: Path) -> None:
    async with replicas(smollm2_dir) as (pool, engines, servers):
        engines[0].failing = "pause"
        with pytest.raises(EngineError, match="it does not pause"):
            await Publisher(pool, tmp_path).load(tmp_path, 1)
        assert all(server.resumed.is_set() for server in servers)


async def test_weights_that_do_not_load_are_never_served(smollm2_dir: Path, tmp_path: Path) -> None:
    async with replicas(smollm2_dir) as (pool, engines, servers):
        engines[0].failing = "load"
        with pytest.raises(EngineError, match="stays paused.*half of it is not there; restart it"):
            await Publisher(pool, tmp_path).load(tmp_path, 1)
        assert not any(server.resumed.is_set() for server in servers)


async def test_all_replicas_have_answered_before_a_fault_is_told(smollm2_dir: Path) -> None:
    async with replicas(smollm2_dir) as (pool, engines, servers):
        engines[0].failing = "load"
        engines[1].go_on.clear()
        telling = asyncio.create_task(pool.reload_weights("/weights/1"))
        await engines[0].loading.wait()
        for _ in range(3):  # the pool asks it too, whether it is alive
            await engines[0].info()
        assert not telling.done()
        engines[1].go_on.set()
        with pytest.raises(EngineError, match="half of it"):
            await telling
        assert [control.path for control in servers[1].controls] == ["/collective_rpc"]


async def test_who_cancels_waits_until_the_weights_are_there(smollm2_dir: Path, tmp_path: Path) -> None:
    async with replicas(smollm2_dir) as (pool, engines, servers):
        engines[0].go_on.clear()
        loading = asyncio.create_task(Publisher(pool, tmp_path).load(tmp_path, 3))
        await engines[0].loading.wait()
        for _ in range(2):
            loading.cancel()
            await asyncio.sleep(0)
        assert not loading.done()
        engines[0].go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert [server.version for server in servers] == ["3", "3"]
        assert all(server.resumed.is_set() for server in servers)
