"""Weights that copy before they are trained.

Most of what an agent writes stands in its context already. Models that were trained long enough copy by pairs of attention heads
(Olsson et al., In-context Learning and Induction Heads, arXiv 2209.11895): one head tells each token which token came before it,
a later head finds the token that came after the current one when it was last there. From random weights such pairs appear after
60,000 chats that do nothing but repeat words, or not at all. Here they are written into the first and the last layer, roughly,
and training refines them within some thousand dialogues.
"""

import math
from typing import Any

import torch
from torch import Tensor

PAIRS = 2
ROTATIONS = 4  # the fastest ones, by which a head tells the token before from all others
SPREAD = 0.1  # of embeddings
CONSTANT = 5  # how far the first coordinate of each embedding is above that: what heads that look for places read
QUIET = 0.05  # of random weights in such a head
GAIN = 1.6  # of queries and keys after their norm: softmax is sharp enough to attend to one token
COPIED = 4  # how much louder than an embedding a copied one is


@torch.no_grad()
def begin(model: Any) -> None:
    """Set all weights of a Qwen3 model with at least two layers and `PAIRS` heads a layer, each with its own keys.

    Draws from torch's random state.
    """
    width = model.config.hidden_size
    _randomly(model, width)
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = SPREAD * CONSTANT
    model.lm_head.weight.copy_(embeddings)
    size = model.config.head_dim
    first, last = model.model.layers[0].self_attn, model.model.layers[-1].self_attn
    place = torch.zeros(size)
    place[:ROTATIONS] = 1
    before = _turned(place, model.config.rope_parameters["rope_theta"])
    slow = torch.zeros(2, size // 2)
    slow[:, size // 4 :] = 2
    for head in range(PAIRS):
        own = slice(head * size, (head + 1) * size)
        token, note, copied = (_projection(size, width) for _ in range(3))
        for weight, constant in ((first.q_proj.weight, place), (first.k_proj.weight, before)):
            weight[own] *= QUIET
            weight[own, 0] = constant
        first.v_proj.weight[own] = token
        first.o_proj.weight[:, own] = note.T * SPREAD  # "before this one came …"
        last.q_proj.weight[own] = token * slow.reshape(-1, 1)  # what turns slowly matches at any distance
        last.k_proj.weight[own] = note * slow.reshape(-1, 1)
        last.v_proj.weight[own] = copied
        last.o_proj.weight[:, own] = copied.T * SPREAD * COPIED


def _randomly(model: Any, width: int) -> None:
    """Small enough that layers add to the embeddings, and do not drown them."""
    model.model.embed_tokens.weight.normal_(0, SPREAD)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.q_norm.weight.fill_(GAIN)
        attention.k_norm.weight.fill_(GAIN)
        for reads in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            reads.weight.normal_(0, 1 / math.sqrt(width))
        for writes in (attention.o_proj, mlp.down_proj):
            writes.weight.normal_(0, 0.3 * SPREAD / math.sqrt(writes.in_features))


def _turned(vector: Tensor, theta: float) -> Tensor:
    """What RoPE makes of a vector one place further on: turned keys meet queries that stand one place behind them."""
    half = len(vector) // 2
    angle = theta ** -(torch.arange(half) / half)
    left, right = vector[:half], vector[half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()])


def _projection(size: int, width: int) -> Tensor:
    """Orthonormal rows [size, width] that do not see the first coordinate."""
    columns, _ = torch.linalg.qr(torch.randn(width - 1, size))
    return torch.cat([torch.zeros(size, 1), columns.T], 1)
