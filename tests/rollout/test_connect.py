"""Connecting an engine: each with its own key, and what is no engine refused by name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.engines.launch import EngineProcess, engine_process
from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server
from polar.errors import EngineError, UsageError
from polar.rollout import connect
from polar.rollout.connect import Connected, connected


@asynccontextmanager
async def connecting(engine: str, tmp_path: Path) -> AsyncIterator[Connected]:
    async with connected(engine, "", log=tmp_path / "engine.log", note=lambda line: None) as backend:
        yield backend


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
            assert (await backend.engine.info()).model == "scripted"


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
        assert (await backend.engine.info()).model == "scripted"


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
