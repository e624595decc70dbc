"""The real vLLM proves itself, and is found out where it is started to tell something else. Run by `make test-all`."""

import time
from collections.abc import Iterator

import pytest

from polar.engines.embedded.models import resolve
from polar.engines.proofs import SelfTest
from polar.engines.renderers import load_renderer
from polar.engines.self_test import self_test
from polar.engines.vllm import VllmEngine
from tests.e2e.vllm_server import vllm_server

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

QUICK = 30.0  # seconds that a self-test may take on shared cores; on idle ones it takes about one


@pytest.fixture(scope="module")
def processed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a vLLM in bfloat16 that tells processed log-probabilities."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    flags = ("--logprobs-mode", "processed_logprobs", "--dtype", "bfloat16")
    with vllm_server(resolve("smollm2"), log, *flags) as url:
        yield url


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a vLLM that tells logits where log-probabilities are asked for."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm_server(resolve("smollm2"), log, "--logprobs-mode", "raw_logits") as url:
        yield url


async def proved(url: str, *, chat: bool = False) -> SelfTest:
    engine = VllmEngine(url)
    started = time.monotonic()
    try:
        test = await self_test(engine, await engine.info(), None if chat else load_renderer(resolve("smollm2")))
        assert test.logprobs_mode in (None, engine.logprobs_mode)
    finally:
        await engine.close()
    assert time.monotonic() - started < QUICK
    return test


async def test_it_proves_everything(vllm: str) -> None:
    test = await proved(vllm)
    assert test.line == "10 proven"
    assert test.logprobs_mode == "raw"


async def test_in_chat_mode_it_proves_what_it_renders(vllm: str) -> None:
    test = await proved(vllm, chat=True)
    assert (test.of("failed"), test.doubts) == ((), ())
    assert test.logprobs_mode == "raw"


async def test_processed_log_probabilities_are_found_out_even_in_half_precision(processed: str) -> None:
    for chat in (False, True):
        test = await proved(processed, chat=chat)
        assert (test.of("failed"), test.doubts) == ((), ())
        assert test.logprobs_mode == "processed"


async def test_logits_are_refused(logits: str) -> None:
    assert {"L02", "L03"} & {proof.code for proof in (await proved(logits)).of("failed")}
