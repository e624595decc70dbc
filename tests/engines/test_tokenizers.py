"""A model directory gives its tokenizer, or a clear word on what is missing."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from polar.engines.tokenizers import load_tokenizer
from polar.errors import UsageError


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A byte-level tokenizer of 256 letters with one added token, whose id is 256."""
    loaded = tokenizers.Tokenizer(BPE(vocab={letter: id for id, letter in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    loaded.pre_tokenizer = ByteLevel(add_prefix_space=False)
    loaded.decoder = tokenizers.decoders.ByteLevel()
    loaded.add_special_tokens(["<|im_start|>"])
    loaded.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path, {"eos_token": "<|im_start|>"})
    return tmp_path


def configure(model_dir: Path, config: object) -> None:
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_directory_gives_its_tokenizer_with_its_eos(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.eos_id == tokenizer.token_id("<|im_start|>") == 256
    assert tokenizer.decode(tokenizer.encode_plain("text ü").tolist()) == "text ü"


def test_the_eos_may_be_written_as_an_object_or_be_absent(model_dir: Path) -> None:
    configure(model_dir, {"eos_token": {"content": "<|im_start|>", "lstrip": False}})
    assert load_tokenizer(model_dir).eos_id == 256
    configure(model_dir, {})
    assert load_tokenizer(model_dir).eos_id is None


def test_added_tokens_that_only_the_configuration_lists_are_known(model_dir: Path) -> None:
    tokens = {
        "256": {"content": "<|im_start|>", "special": True},
        "258": {"content": "<think>", "special": False},
        "257": {"content": "<|im_end|>", "special": True},
    }
    configure(model_dir, {"added_tokens_decoder": tokens, "eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.eos_id == tokenizer.token_id("<|im_end|>") == 257
    assert tokenizer.token_id("<think>") == 258
    assert not set(tokenizer.encode_plain("<think><|im_end|>").tolist()) & {256, 257, 258}


def test_two_files_that_contradict_each_other_are_refused(model_dir: Path) -> None:
    configure(model_dir, {"added_tokens_decoder": {"7": {"content": "<|im_start|>"}}})
    with pytest.raises(UsageError, match=r"'<\|im_start\|>' the id 7, but in tokenizer.json it is 256"):
        load_tokenizer(model_dir)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink()
    with pytest.raises(UsageError, match=f"expected {name} in the model directory .*No such file"):
        load_tokenizer(model_dir)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_an_unreadable_file_is_named(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text("{")
    with pytest.raises(UsageError, match=f"expected a Hugging Face tokenizer.*{name}"):
        load_tokenizer(model_dir)
