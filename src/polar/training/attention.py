"""Attention over packed trees, inside stock `transformers` models.

A token attends to the tokens before it in its own node and to all of the nodes above. Positions count from the root, so each
sequence sees exactly what it would see alone. The layout travels as a keyword argument of the model, through every layer, also
where activations are computed anew in the backward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from polar.training.batch import Layout
from polar.trajectory.forest import NONE

NAME = "polar_tree"


@dataclass(frozen=True)
class Segment:
    """Nodes that follow one another without a branch, as one: queries `start` to `end`.

    Attributes:
        above: int64[p], the tokens of all that it hangs below; None for a root.
        mask: bool[end - start, p + end - start], who attends whom; None for a root, which is plainly causal.
    """

    start: int
    end: int
    above: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class Tree:
    """A layout as the attention uses it, made once for all layers.

    Attributes:
        segments: on a CPU, where each is computed apart.
        blocks: on a GPU, the block-sparse mask; None on a CPU.
    """

    segments: tuple[Segment, ...]
    blocks: Any = None


def plan(layout: Layout, device: torch.device) -> Tree:
    """What the attention needs of a layout."""
    if device.type != "cuda":
        return Tree(tuple(_segments(layout)))
    return Tree((), _blocks(torch.from_numpy(layout.reach).to(device)))


def _segments(layout: Layout) -> Iterator[Segment]:
    bounds, parents = layout.bounds.tolist(), layout.parents.tolist()
    children = np.bincount(layout.parents[layout.parents != NONE], minlength=len(parents))
    paths: dict[int, Tensor] = {}  # of the nodes at which something branches: all that is above what hangs below
    node = 0
    while node < len(parents):
        first = node
        while children[node] == 1:
            node += 1  # an only child follows its parent
        start, end = bounds[first], bounds[node + 1]
        above = None if parents[first] == NONE else paths[parents[first]]
        own = torch.arange(start, end)
        paths[node] = own if above is None else torch.cat([above, own])
        yield Segment(start, end, above, None if above is None else _mask(len(above), end - start))
        node += 1


def _mask(above: int, length: int) -> Tensor:
    return torch.ones(length, above + length, dtype=torch.bool).tril(above)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`transformers`' attention interface: query [1, heads, n, d], key and value [1, kv heads, n, d] to [1, n, heads, d]."""
    tree: Tree = kwargs["tree"]
    query, key = query.to(value.dtype), key.to(value.dtype)  # some models norm them in float32, whatever else is computed in
    if query.device.type == "cuda":
        return _block_sparse(query, key, value, tree, scaling), None
    apply: Any = _BySegment.apply
    out: Tensor = apply(query, key, value, tree.segments, scaling)
    return out.transpose(1, 2), None


class _BySegment(Function):
    """Each segment apart, again in the backward pass: nothing of what segments share is held more than once."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scaling: float | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.segments, ctx.scaling = segments, scaling
        return torch.cat([_attend(each, _parts(each, query, key, value), scaling) for each in segments], 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
        for each in ctx.segments:
            own = slice(each.start, each.end)
            parts = [part.detach().requires_grad_() for part in _parts(each, query, key, value)]
            with torch.enable_grad():
                out = _attend(each, parts, ctx.scaling)
            to_query[:, :, own], *shared = torch.autograd.grad(out, parts, grad[:, :, own])
            for total, part in zip((to_key, to_value), shared, strict=True):
                total[:, :, own] += part[:, :, -(each.end - each.start) :]
                if each.above is not None:
                    total.index_add_(2, each.above, part[:, :, : len(each.above)].float())
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None, None


def _parts(each: Segment, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries of a segment, keys and values of all that it attends."""
    own = slice(each.start, each.end)
    shared = [key[:, :, own], value[:, :, own]]
    if each.above is not None:
        shared = [
            torch.cat([whole.index_select(2, each.above), part], 2) for whole, part in zip((key, value), shared, strict=True)
        ]
    return [query[:, :, own], *shared]


def _attend(each: Segment, parts: Sequence[Tensor], scaling: float | None) -> Tensor:
    query, key, value = parts
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=each.mask, is_causal=each.mask is None, scale=scaling)


def attends(reach: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether token `query` attends token `key`: it comes no earlier, and hangs below the node of `key`."""
    return (key <= query) & (query < reach[key])


def _blocks(reach: Tensor) -> Any:
    """The mask by blocks of tokens, of which most are left out. Compiled, so that no dense mask exists on the way."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return attends(reach, query, key)

    compiled: Any = torch.compile(create_block_mask, dynamic=True)
    return compiled(mask, None, None, len(reach), len(reach), device=reach.device.type)


def _block_sparse(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scaling: float | None) -> Tensor:
    """The same on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=True)
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = compiled(query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2)


def register() -> None:
    """Make `NAME` known to `transformers`; doing it twice is fine."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
