"""Attention over transformers' paged cache that pays for a shared prompt once.

Stock SDPA sees a packed batch as one sequence under a block-diagonal mask: each request pays for the keys of all of them.
Here a sequence attends to its own keys; and where all sequences decode, those that share their first pages read them once
(as in Hydragen, arXiv 2402.05099). Full causal attention only.
"""

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "polar_paged"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of sequences packed along the token axis, in the form that transformers calls.

    Args:
        query: [1, heads, tokens, dim]. Each sequence's queries are its last tokens.
        key, value: [1, kv_heads, keys, dim]; with `block_table`, those of the new tokens only.
        cu_seq_lens_q, cu_seq_lens_k: [sequences + 1], where each sequence starts; None if there is one.
        block_table: [sequences, pages] of page numbers in `k_cache` and `v_cache`, [pages, page, kv_heads, dim]: every
            sequence has one query. Their keys and values are written to the cache here.

    Returns:
        [1, tokens, heads, dim], and None for the weights.
    """
    if block_table is not None:
        assert k_cache is not None
        assert v_cache is not None
        assert cu_seq_lens_k is not None
        lengths = cu_seq_lens_k.diff().long()
        tables = block_table[:, : -(-int(lengths.max()) // k_cache.shape[1])].long()
        _write(k_cache, key, tables, lengths)
        _write(v_cache, value, tables, lengths)
        return _decode(query[0].transpose(0, 1) * scaling, k_cache, v_cache, tables, lengths)[None], None
    q_starts = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    k_starts = [0, key.shape[2]] if cu_seq_lens_k is None else cu_seq_lens_k.tolist()
    parts = [
        _causal(query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], scaling)
        for q0, q1, k0, k1 in zip(q_starts, q_starts[1:], k_starts, k_starts[1:], strict=False)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    whole = queries == keys
    mask = None if whole else _mask(queries, keys)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, scale=scaling, enable_gqa=True)


@lru_cache(maxsize=32)  # all layers of a step need the same ones
def _mask(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _write(cache: Tensor, new: Tensor, tables: Tensor, lengths: Tensor) -> None:
    pages, offsets = (lengths - 1) // cache.shape[1], (lengths - 1) % cache.shape[1]
    cache[tables.gather(1, pages[:, None])[:, 0], offsets] = new[0].transpose(0, 1)


def _decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """One scaled query per sequence: [sequences, heads, dim] in and out."""
    sequences, heads, dim = query.shape
    grouped = query.view(sequences, k_cache.shape[2], -1, dim)
    output = torch.empty_like(grouped)
    for rows in _groups(tables, lengths, k_cache.shape[1]):
        output[rows] = _decode_group(grouped[rows], k_cache, v_cache, tables[rows], lengths[rows])
    return output.view(sequences, heads, dim)


def _groups(tables: Tensor, lengths: Tensor, page: int) -> list[list[int]]:
    """Sequences that start with the same page. Those twice as long go apart, so that padding at most doubles the work."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (first, length) in enumerate(zip(tables[:, 0].tolist(), lengths.tolist(), strict=True)):
        groups.setdefault((first, (length // page).bit_length()), []).append(row)
    return list(groups.values())


def _decode_group(query: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """Sequences of one group, query and result [sequences, kv_heads, group, dim]: one softmax over the pages that all
    share and the rest of each."""
    page, (sequences, kv_heads, group, dim) = k_cache.shape[1], query.shape
    full = int(lengths.min()) // page
    shared = 0 if sequences == 1 else int((tables[:, :full] == tables[0, :full]).all(0).long().cumprod(0).sum())
    cut = shared * page
    rest = tables[:, shared : -(-int(lengths.max()) // page)].clamp(min=0)  # unused entries are -1, and masked below
    rest_keys = k_cache[rest].view(sequences, -1, kv_heads, dim).permute(0, 2, 3, 1)
    rest_values = v_cache[rest].view(sequences, -1, kv_heads, dim).transpose(1, 2)
    scores = query @ rest_keys
    beyond = cut + torch.arange(scores.shape[-1]) >= lengths[:, None]
    scores.masked_fill_(beyond[:, None, None], -math.inf)
    if not cut:
        return scores.softmax(-1) @ rest_values
    shared_keys = k_cache[tables[0, :shared]].view(cut, kv_heads, dim).permute(1, 2, 0)
    shared_values = v_cache[tables[0, :shared]].view(cut, kv_heads, dim).transpose(0, 1)
    together = query.transpose(0, 1).reshape(kv_heads, -1, dim)  # all queries against the one copy
    shared_scores = (together @ shared_keys).view(kv_heads, sequences, group, cut).transpose(0, 1)
    weights = torch.cat([shared_scores, scores], -1).softmax(-1)
    from_shared = weights[..., :cut].transpose(0, 1).reshape(kv_heads, -1, cut) @ shared_values
    return weights[..., cut:] @ rest_values + from_shared.view(kv_heads, sequences, group, dim).transpose(0, 1)


AttentionInterface.register(NAME, attend)
