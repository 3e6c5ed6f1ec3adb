"""Causal grouped-query attention without positions: the definition. Formula: Vaswani et al. 2017, equation 1.

Float32 throughout, but for what `attend_rounded` says. A query's bits depend on its own keys only: not on later ones,
nor on the queries beside it.
"""

import math

import torch
from torch import Tensor

from kernels.elementary.reference import exp, total

PRODUCTS_AT_ONCE = 1 << 21  # elements; bounds the memory that a tile of queries takes


def attend(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    """softmax(q k / sqrt(D)) v, where query i is token `first` + i and sees tokens 0..first + i.

    query [M, heads, D], key and value [T, kv_heads, D] with T >= first + M -> [M, heads, D]. Head h reads kv head
    h // (heads / kv_heads).
    """
    count, heads, size = query.shape
    tokens, kv_heads, _ = key.shape
    query = query.reshape(count, kv_heads, heads // kv_heads, size)
    tile = max(1, PRODUCTS_AT_ONCE // (heads * size * tokens))
    tiles = [
        _attend_tile(
            query[start : start + tile], key[: first + start + tile], value[: first + start + tile], first + start
        )
        for start in range(0, count, tile)
    ]
    return torch.cat(tiles).flatten(1, 2)


def _attend_tile(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    """query [M, kv_heads, heads / kv_heads, D] -> the same shape. What is summed over stands first in memory."""
    products = query.permute(3, 0, 1, 2).unsqueeze(4) * key.permute(2, 1, 0).contiguous()[:, None, :, None]
    scores = total(products, dim=0) * (1.0 / math.sqrt(query.shape[3]))  # [M, kv_heads, heads / kv_heads, T]
    position = torch.arange(len(key))
    hidden = position[None, :] > first + position[: len(query), None]
    scores.masked_fill_(hidden[:, None, None, :], -math.inf)
    shares = exp(scores - scores.amax(dim=3, keepdim=True))
    mixed = total(shares.permute(3, 0, 1, 2).contiguous().unsqueeze(4) * value[:, None, :, None], dim=0)
    return mixed / total(shares, dim=3).unsqueeze(3)


def attend_rounded(query: Tensor, key: Tensor, value: Tensor, first: int, page_tokens: int) -> Tensor:
    """`attend` as a sweep computes it: query and shares rounded to BF16, the softmax carried from page to page.

    Shapes as for `attend`. A page's shares are relative to the largest score up to that page, so where the pages begin
    matters to the rounding; sums and products are float32 in whatever order torch takes.
    """
    count, heads, size = query.shape
    kv_heads = key.shape[1]
    query = query.bfloat16().float().reshape(count, kv_heads, heads // kv_heads, size)
    position = first + torch.arange(count)
    best = torch.full(query.shape[:3], -math.inf)
    sums = torch.zeros(query.shape[:3])
    mixed = torch.zeros_like(query)
    for start in range(0, first + count, page_tokens):
        page = slice(start, min(start + page_tokens, first + count))
        scores = torch.einsum("mgad,tgd->mgat", query, key[page]) * (math.log2(math.e) / math.sqrt(size))
        hidden = torch.arange(page.start, page.stop)[None, :] > position[:, None]
        scores = scores.masked_fill(hidden[:, None, None, :], -math.inf)
        new_best = torch.maximum(best, scores.amax(dim=3))
        shares = torch.exp2(scores - new_best.unsqueeze(3))
        decay = torch.exp2(best - new_best)
        sums = sums * decay + shares.sum(dim=3)
        mixed = mixed * decay.unsqueeze(3) + torch.einsum("mgat,tgd->mgad", shares.bfloat16().float(), value[page])
        best = new_best
    return (mixed / sums.unsqueeze(3)).reshape(count, heads, size)


def attend_all(query: Tensor, key: Tensor, value: Tensor, tile_keys: int) -> Tensor:
    """softmax(q k / sqrt(D)) v, each row over all rows, as vision.py computes it: shares rounded to BF16, the softmax
    carried from one tile of keys to the next. All [T, heads, D] -> the same shape."""
    best = torch.full((*query.shape[:2], 1), -math.inf)
    sums, mixed = torch.zeros_like(best), torch.zeros_like(query)
    for start in range(0, len(key), tile_keys):
        some = slice(start, start + tile_keys)
        scores = torch.einsum("mhd,thd->mht", query, key[some]) * (math.log2(math.e) / math.sqrt(query.shape[2]))
        new_best = torch.maximum(best, scores.amax(dim=2, keepdim=True))
        shares, decay = torch.exp2(scores - new_best), torch.exp2(best - new_best)
        sums = sums * decay + shares.sum(dim=2, keepdim=True)
        mixed = mixed * decay + torch.einsum("mht,thd->mhd", shares.bfloat16().float(), value[some])
        best = new_best
    return mixed / sums
