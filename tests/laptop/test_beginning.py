"""Weights to begin with: without any training, a sequence that comes again is told on."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from polar.laptop.beginning import begin
from polar.laptop.recipe import LAPTOP, ROPE_THETA

VOCABULARY, LENGTH = 1_472, 100


def fresh() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=LAPTOP.hidden,
            intermediate_size=LAPTOP.intermediate,
            num_hidden_layers=LAPTOP.layers,
            num_attention_heads=LAPTOP.heads,
            num_key_value_heads=LAPTOP.heads,
            head_dim=LAPTOP.hidden // LAPTOP.heads,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=False,
        )
    )


@torch.no_grad()
def told_on(model: Qwen3ForCausalLM, between: int) -> float:
    """Share of a sequence's tokens that are the likeliest when it comes again, a token that says itself again aside."""
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))
    once, other = ids[:LENGTH], ids[LENGTH : LENGTH + between]
    logits = model(torch.cat([once, other, once])[None]).logits[0, -LENGTH:-1]
    logits[torch.arange(LENGTH - 1), once[:-1]] = -torch.inf
    return float((logits.argmax(-1) == once[1:]).float().mean())


def test_a_sequence_that_comes_again_is_told_on_near_and_far() -> None:
    model = fresh()
    assert told_on(model, 0) < 0.01
    begin(model)
    assert told_on(model, 0) > 0.1
    assert told_on(model, 600) > 0.02
