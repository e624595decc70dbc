"""Connecting an engine: each with its own key, and what is no engine refused by name."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.engines.launch import EngineProcess, engine_process
from polar.engines.pool import EnginePool
from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server
from polar.errors import EngineError, UsageError
from polar.rollout import connect
from polar.rollout.connect import Connected, EngineOptions, connected


@asynccontextmanager
async def connecting(engine: str, tmp_path: Path) -> AsyncIterator[Connected]:
    async with connected(EngineOptions(engine), log=tmp_path / "engine.log", note=lambda line: None) as backend:
        yield backend


@dataclass
class Scene:
    """Scripted engines, and what connecting them told."""

    directory: Path
    log: Path
    notes: list[str] = field(default_factory=list)

    def engine(self, **changes: object) -> ScriptedEngine:
        fields: dict[str, object] = {"model_dir": self.directory, **changes}
        tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        return ScriptedEngine(tokenizer, lambda call: Scripted("ok"), **fields)  # type: ignore[arg-type]

    def connected(self, engine: str, **options: object) -> AbstractAsyncContextManager[Connected]:
        fields: dict[str, object] = {"engine": engine, **options}
        return connected(EngineOptions(**fields), log=self.log, note=self.notes.append)  # type: ignore[arg-type]

    async def refused(self, engine: str, **options: object) -> str:
        with pytest.raises(UsageError) as caught:
            async with self.connected(engine, **options):
                pass
        return str(caught.value)


@pytest.fixture
def scene(smollm2_dir: Path, tmp_path: Path) -> Scene:
    return Scene(smollm2_dir, tmp_path / "engine.log")


async def test_the_key_of_an_engine_by_url_is_that_of_the_environment(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    guarded = ScriptedEngine(tokenizer, lambda call: Scripted("ok"), model_dir=smollm2_dir, key="the-key")
    async with scripted_server(guarded) as url:
        with pytest.raises(EngineError, match="set POLAR_ENGINE_KEY to the key that the engine was started with"):
            async with connecting(url, tmp_path):
                pass
        monkeypatch.setenv("POLAR_ENGINE_KEY", "the-key")
        async with connecting(url, tmp_path) as backend:
            assert (await backend.policy.engine.info()).model == "scripted"


async def test_the_embedded_engine_is_asked_with_its_own_key_whatever_the_environment_says(
    engine_command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def scripted(model: str, *, log: Path) -> AsyncIterator[EngineProcess]:
        async with engine_process(engine_command, log=log, key="its-own") as process:
            yield process

    monkeypatch.setattr(connect, "embedded_engine", scripted)
    monkeypatch.setenv("POLAR_ENGINE_KEY", "of-another")
    async with connecting("embedded", tmp_path) as backend:
        assert (await backend.policy.engine.info()).model == "scripted"


@pytest.mark.parametrize(
    "engine", ["http://[::1", "http://", "http://:8000", "http://host:99999", "http://host:port", "ftp://host", "vllm", ""]
)
async def test_what_is_no_engine_is_refused_by_name(engine: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--engine: expected `embedded` or a URL like http://127.0.0.1:8000, got "):
        async with connecting(engine, tmp_path):
            pass


async def test_a_password_in_the_url_and_a_key_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_ENGINE_KEY", "the-key")
    with pytest.raises(UsageError, match="where POLAR_ENGINE_KEY is set") as caught:
        async with connecting("http://me:secret@127.0.0.1:9", tmp_path):
            pass
    assert "secret" not in str(caught.value)


class TestSelfTest:
    async def test_what_it_proved_is_told_in_one_line(self, scene: Scene) -> None:
        async with scripted_server(scene.engine()) as url, scene.connected(url) as backend:
            assert [test.line for test in backend.tested.values()] == ["10 proven"]
        assert scene.notes == ["engine ready: scripted, context 32768 tokens", "self-test: 10 proven"]

    async def test_what_it_fails_is_not_served_and_says_what_to_change(self, scene: Scene) -> None:
        spoilt = scene.engine(probe=lambda call: Scripted("ok", fault="usage_off_by_one"))
        async with scripted_server(spoilt) as url:
            said = await scene.refused(url, accept_unproven=True)
        assert said.startswith(f"the engine at {url} fails its self-test: T08, as many ids as log-probabilities")
        assert "What to do: " in said
        assert "1 failed (T08: " in scene.notes[-1]

    async def test_what_it_cannot_prove_is_served_only_where_that_is_accepted(self, scene: Scene) -> None:
        async with scripted_server(scene.engine()) as url:
            text_only = f"openai+{url}/v1#scripted"
            said = await scene.refused(text_only)
            assert "leaves unproven what training relies on: T08, the ids of prompt and reply are shown" in said
            assert said.endswith("or take it as it is with --accept-unproven")
            async with scene.connected(text_only, accept_unproven=True) as backend:
                assert not backend.policy.info.shows_ids
                assert backend.model_path is None


class TestRenderer:
    async def test_none_has_the_engine_render(self, scene: Scene) -> None:
        async with scripted_server(scene.engine()) as url, scene.connected(url, renderer="none") as backend:
            assert backend.policy.renderer is None
            assert backend.policy.decode is not None
            assert backend.policy.decode([2]) == "<|im_end|>"
        assert scene.notes[0] == "the engine renders; histories that drift fork"

    async def test_where_none_fits_the_engine_renders_and_that_is_said(self, scene: Scene, tmp_path: Path) -> None:
        async with scripted_server(scene.engine()) as url, scene.connected(url, model=str(tmp_path)) as backend:
            assert backend.policy.renderer is None
        assert scene.notes[0].startswith(f"no renderer fits (expected tokenizer_config.json in the model directory {tmp_path}")
        assert scene.notes[0].endswith("so the engine renders; histories that drift fork")

    async def test_a_directory_that_is_named_must_be_there(self, scene: Scene) -> None:
        async with scripted_server(scene.engine()) as url:
            assert "'/nowhere' is no directory here" in await scene.refused(url, model="/nowhere")

    async def test_one_that_is_named_must_be_there(self, scene: Scene) -> None:
        async with scripted_server(scene.engine()) as url:
            assert "nonesuch" in await scene.refused(url, renderer="nonesuch")

    async def test_an_engine_that_takes_messages_only_takes_no_renderer(self, scene: Scene) -> None:
        async with scripted_server(scene.engine()) as url:
            said = await scene.refused(f"openai+{url}/v1#scripted", renderer="chatml")
        assert said == "--renderer chatml: scripted takes messages only, so nothing is rendered here"


class TestRoutes:
    async def test_a_route_is_another_model_that_is_never_trained(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLAR_ROUTE_KEY_BIG_ONE", "of-the-route")
        monkeypatch.setenv("POLAR_ENGINE_KEY", "of-the-policy")
        policy, other = scene.engine(key="of-the-policy"), scene.engine(key="of-the-route")
        async with scripted_server(policy) as url, scripted_server(other) as elsewhere:
            routes = {"big-one": f"openai+{elsewhere}/v1#scripted", "frozen": url}
            with pytest.raises(EngineError):  # the policy's key is for the policy alone
                async with scene.connected(url, routes=routes):
                    pass
            async with scene.connected(url, routes={"big-one": routes["big-one"]}) as backend:
                served = backend.routes["big-one"]
                assert (served.trains, served.renderer, served.engine.name) == (False, None, "openai_text")
        assert scene.notes[-1] == "requests for 'big-one' go to scripted, and are never trained"
        assert other.log == []

    async def test_what_is_no_engine_is_refused_by_the_routes_name(self, scene: Scene) -> None:
        async with scripted_server(scene.engine()) as url:
            assert (await scene.refused(url, routes={"x": "nowhere"})).startswith("--route x: expected `embedded` or a URL")


class TestReplicas:
    async def test_several_urls_are_one_engine(self, scene: Scene) -> None:
        async with (
            scripted_server(scene.engine()) as one,
            scripted_server(scene.engine()) as other,
            scene.connected(f"{one}, {other}") as backend,
        ):
            assert isinstance(backend.policy.engine, EnginePool)
            assert list(backend.tested) == [one, other]
        assert f"self-test of {other}: 10 proven" in scene.notes
        assert scene.notes[-1].startswith(f"replicas: {one} 0 calls, 0% of prompt tokens seen before; {other} 0 calls")

    async def test_all_must_prove_themselves(self, scene: Scene) -> None:
        spoilt = scene.engine(probe=lambda call: Scripted("ok", fault="version_gap"))
        async with scripted_server(scene.engine()) as one, scripted_server(spoilt) as other:
            assert (await scene.refused(f"{one},{other}")).startswith(f"the engine at {other} fails its self-test: W01")

    async def test_the_same_one_twice_is_refused(self, scene: Scene) -> None:
        assert "named twice" in await scene.refused("http://127.0.0.1:9,http://127.0.0.1:9")
