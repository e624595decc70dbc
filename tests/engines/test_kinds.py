"""Which engine `--engine` means."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from polar.engines.kinds import Address, address, open_engine
from polar.engines.llama_cpp import LlamaCppEngine
from polar.engines.openai_text import OpenAITextEngine
from polar.engines.protocol import Engine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError

URL = "http://127.0.0.1:8000"


@asynccontextmanager
async def owned_by(owner: str, status: int = 200) -> AsyncIterator[str]:
    """A server that lists one model of `owner`."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": owner}]}, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (URL, Address(None, URL)),
        (f"vllm+{URL}", Address("vllm", URL)),
        (f"sglang+{URL}", Address("sglang", URL)),
        (f"llama_cpp+{URL}", Address("llama_cpp", URL)),
        ("openai+https://host/v1#org/model-1", Address("openai", "https://host/v1", "org/model-1")),
    ],
)
def test_a_kind_stands_before_the_url_and_a_model_behind_it(text: str, meant: Address) -> None:
    assert address(text) == meant


@pytest.mark.parametrize("text", ["openai+https://host/v1", f"vllm+{URL}#model", f"{URL}#model"])
def test_a_model_is_named_for_a_provider_and_for_nobody_else(text: str) -> None:
    with pytest.raises(UsageError, match="expected a model behind # in an openai"):
        address(text)


def test_an_unknown_kind_is_no_url() -> None:
    with pytest.raises(UsageError, match=r"expected `embedded` or a URL .*, got 'tgi\+http"):
        address(f"tgi+{URL}")


@pytest.mark.parametrize(
    ("where", "client"),
    [
        (Address("vllm", URL), VllmEngine),
        (Address("sglang", URL), SglangEngine),
        (Address("llama_cpp", URL), LlamaCppEngine),
        (Address("openai", URL, "m"), OpenAITextEngine),
    ],
)
async def test_a_named_kind_is_not_asked_for(where: Address, client: type[Engine]) -> None:
    engine = await open_engine(where, "")
    assert isinstance(engine, client)
    await engine.close()


@pytest.mark.parametrize(
    ("owner", "client"), [("vllm", VllmEngine), ("polar", VllmEngine), ("sglang", SglangEngine), ("llamacpp", LlamaCppEngine)]
)
async def test_a_bare_url_is_what_answers_there(owner: str, client: type[Engine]) -> None:
    async with owned_by(owner) as url:
        engine = await open_engine(Address(None, url), "")
        assert isinstance(engine, client)
        await engine.close()


async def test_a_server_that_nobody_knows_is_refused_with_the_kinds_there_are() -> None:
    async with owned_by("library") as url:
        with pytest.raises(UsageError, match=r"owned by library\); say what it is: vllm\+URL, sglang\+URL"):
            await open_engine(Address(None, url), "")


async def test_where_nothing_can_be_found_out_vllms_client_will_say_what_is_wrong() -> None:
    async with owned_by("vllm", status=401) as guarded:
        for url in (guarded, "http://127.0.0.1:9"):
            engine = await open_engine(Address(None, url), "")
            assert isinstance(engine, VllmEngine)
            await engine.close()
