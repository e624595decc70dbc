"""Tiny models of the shapes that are trained, with random weights, and a directory as an engine would have it."""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3_5TextConfig, Qwen3Config

Kind = Literal["llama", "qwen2", "qwen3", "qwen3.5"]
CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
)
VOCABULARY = 272  # the bytes, the control tokens, and some that no tokenizer gives
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 256,
    "eos_token_id": 258,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}


def tiny(kind: Kind = "qwen3", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of two layers (four of Qwen3.5's), float32."""
    torch.manual_seed(seed)
    shape = {**SHAPE, "num_hidden_layers": 2, **changes}
    config: Any
    match kind:
        case "llama":
            config = LlamaConfig(**{**shape, "tie_word_embeddings": False})
        case "qwen2":
            config = Qwen2Config(**{name: value for name, value in shape.items() if name != "head_dim"})
        case "qwen3":
            config = Qwen3Config(**shape)
        case "qwen3.5":
            linear = {
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            }
            config = Qwen3_5TextConfig(**{**shape, **linear, "num_hidden_layers": 4})
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config)
    for parameter in model.parameters():  # the usual small ones would make every distribution flat
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model


def tokenizer() -> Tokenizer:
    """One token per byte, and the control tokens of Qwen3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return made


def tiny_dir(folder: Path, kind: Kind = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """`tiny`, saved in `folder` with its tokenizer."""
    tiny(kind, seed, **changes).save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}'
    )
    return folder
