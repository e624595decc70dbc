"""What is asserted in the rig is told as in a test; and the real vLLM."""

from collections.abc import Iterator

import pytest

from polar.engines.embedded.models import resolve
from tests.e2e.vllm_server import vllm_server

pytest.register_assert_rewrite("tests.e2e.harnesses.rig")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real vLLM with SmolLM2, which parses tool calls."""
    limits = ["--max-model-len", "4096", "--max-num-seqs", "8"]
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with vllm_server(resolve("smollm2"), tmp_path_factory.mktemp("vllm") / "log", *limits, *tools) as url:
        yield url
