"""A real gateway before a scripted policy, in one event loop."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from polar.engines.renderers import load_renderer
from polar.engines.scripted import Logged, Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.served import Served, served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import Gateway, gateway
from polar.specs import HarnessProfile, SamplingSpec
from polar.store.captured import read_captured
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured

Script = Callable[[ScriptedCall], Scripted]


@dataclass
class Stand:
    """What a test works with."""

    gateway: Gateway
    engine: ScriptedEngine
    capture: Path
    renderer: Renderer

    @property
    def log(self) -> list[Logged]:
        return self.engine.log

    async def open(self, profile: HarnessProfile = HarnessProfile(), sampling: SamplingSpec = SamplingSpec()) -> tuple[str, str]:
        """A new session: (session_id, key)."""
        opened = await self.gateway.sessions.open(task_id="t", profile=profile, sampling=sampling)
        return opened.session_id, opened.key

    def client(self, key: str) -> openai.AsyncOpenAI:
        """The real SDK, which knows the session by its path."""
        return openai.AsyncOpenAI(base_url=f"{self.gateway.base_url(key)}/v1", api_key="any", max_retries=0)

    async def post(self, key: str, body: object) -> int:
        """Status of a bare request to Chat Completions."""
        url = f"{self.gateway.base_url(key)}/v1/chat/completions"
        async with aiohttp.request("POST", url, json=body) as reply:
            return reply.status

    async def captured(self, session_id: str) -> Captured:
        await self.gateway.sessions.freeze(session_id)
        return read_captured(self.capture, session_id)


Serve = Callable[..., AbstractAsyncContextManager[Stand]]


@pytest.fixture(scope="session")
def policy_tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def policy_renderer(smollm2_dir: Path) -> Renderer:
    return load_renderer(smollm2_dir)


@pytest.fixture
def serve(smollm2_dir: Path, policy_tokenizer: Tokenizer, policy_renderer: Renderer, tmp_path: Path) -> Serve:
    """`async with serve(script) as stand`; with `chat` the engine renders, without `decode` nobody reads its ids."""

    @asynccontextmanager
    async def start(
        script: Script,
        *,
        port: int = 0,
        max_model_len: int = 32_768,
        chat: bool = False,
        decode: bool = True,
        routes: Mapping[str, Served] = MappingProxyType({}),
    ) -> AsyncIterator[Stand]:
        engine = ScriptedEngine(policy_tokenizer, script, model_dir=smollm2_dir, max_model_len=max_model_len)
        async with scripted_server(engine) as url:
            client = VllmEngine(url)
            try:
                policy = await served(client, policy_renderer)
                if chat:
                    policy = replace(policy, renderer=None, decode=policy_renderer.decode if decode else None)
                async with gateway(policy, tmp_path / "capture.db", port=port, routes=routes) as running:
                    yield Stand(running, engine, tmp_path / "capture.db", policy_renderer)
            finally:
                await client.close()

    return start
