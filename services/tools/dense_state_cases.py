"""What `thimble bench dense` measures, part two: the kernels around the linears, and linears that end in a state."""

import math
from collections.abc import Callable
from functools import partial

import torch

import kernels.attention.gpu as attention
import kernels.mamba.gpu as mamba
import kernels.mamba.reference as mamba_reference
import kernels.norm.reference as norm_reference
import kernels.router.gpu as router
import kernels.router.reference as router_reference
import kernels.sampling.reference as sampling_reference
from kernels.attention.pages import Pages, qkv
from kernels.linear.gpu import Norm, Tiling
from kernels.linear.octets import from_octets, to_octets
from kernels.sampling.gpu import Sampler
from services.tools.dense_cases import (
    EPS,
    EXPERTS,
    HIDDEN,
    SET_BYTES,
    SIZES,
    TOKENS,
    VOCABULARY,
    Case,
    Dense,
    check_rows,
    relative_error,
    sweep,
)

Tensor = torch.Tensor

HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, TOP_K = 32, 2, 128, 64, 22
TAPS = 4


def slots_of(dense: Dense) -> Tensor:
    return torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=dense.device)


def in_proj_case(dense: Dense, form: str) -> Case:
    first, rows_of = dense.linear(form, SIZES.rows, HIDDEN)
    sets = max(2, SET_BYTES // first.size_bytes)
    weights = [first, *(dense.linear(form, SIZES.rows, HIDDEN)[0] for _ in range(sets - 1))]
    plain_x, plain_weight = dense.randn(TOKENS, HIDDEN), dense.randn(HIDDEN, scale=0.2) + 1.0
    x, norm = to_octets(plain_x), Norm(to_octets(plain_weight), EPS)
    conv_weight, conv_bias = dense.randn(SIZES.channels, TAPS, scale=0.5), dense.randn(SIZES.channels, scale=0.1)
    states, slots = dense.randn(sets, TOKENS, SIZES.channels, TAPS - 1), slots_of(dense)
    before = states[0].clone()
    out = torch.empty(TOKENS, SIZES.rows, device=dense.device)

    def launch(which: int, rows: slice, configuration: Tiling | None) -> None:
        mamba.in_proj(
            x[rows], norm, weights[which], SIZES, conv_weight, conv_bias, states[which], slots[rows], out[rows],
            configuration,
        )  # fmt: skip

    def reset() -> None:
        out.fill_(torch.nan)
        states[0].copy_(before)

    def compare(tokens: int) -> float:
        assert torch.isfinite(out[:tokens]).all(), "an output was not written"
        at = torch.cat([check_rows(SIZES.rows), torch.tensor([SIZES.inner, SIZES.inner + SIZES.channels - 1])])
        exact = norm_reference.rms_norm(plain_x[:tokens].cpu(), plain_weight.cpu(), EPS).double()
        exact = (exact @ rows_of(at.to(dense.device)).double().T).float()
        channel = at - SIZES.inner
        for index in torch.nonzero((channel >= 0) & (channel < SIZES.channels)).flatten().tolist():
            c = int(channel[index])
            for token in range(tokens):
                past = before[slots[token], c : c + 1].cpu()
                one = exact[token : token + 1, index : index + 1]
                exact[token, index] = mamba_reference.causal_conv(
                    one, past, conv_weight[c : c + 1].cpu(), conv_bias[c : c + 1].cpu()
                )
                assert torch.allclose(states[0][slots[token], c].cpu(), past[0], rtol=1e-3, atol=1e-3)
        return relative_error(out[:tokens, at.to(dense.device)], exact)

    return Case(f"in_proj {form}", first.size_bytes, sets, launch, reset, compare, [out], sweep(form, HIDDEN))


def update_case(dense: Dense) -> Case:
    sets = 32
    state_bytes = SIZES.inner * SIZES.state * 4
    projected = dense.randn(TOKENS, SIZES.rows)
    states = dense.randn(sets, TOKENS, SIZES.heads, SIZES.head_dim, SIZES.state)
    before = states[0].clone()
    a, d, dt_bias = -dense.randn(SIZES.heads).exp(), dense.randn(SIZES.heads), dense.randn(SIZES.heads)
    norm_weight, slots = dense.randn(SIZES.inner, scale=0.2) + 1.0, slots_of(dense)
    y, out = dense.randn(TOKENS, SIZES.inner), dense.randn(TOKENS, SIZES.inner)
    arrived = torch.zeros(TOKENS, SIZES.groups, dtype=torch.int32, device=dense.device)

    def launch(which: int, rows: slice, configuration: Tiling | None) -> None:
        part = mamba.UPDATE_PART if configuration is None else configuration.tile
        warps = mamba.UPDATE_WARPS if configuration is None else configuration.warps
        mamba.update(
            projected[rows], SIZES, a, d, dt_bias, states[which], slots[rows], norm_weight, EPS, y[rows], arrived[rows],
            out[rows], part=part, warps=warps,
        )  # fmt: skip

    def reset() -> None:
        y.fill_(torch.nan)
        out.fill_(torch.nan)
        states[0].copy_(before)

    def compare(tokens: int) -> float:
        group = SIZES.groups * SIZES.state
        z, x, b, c, dt = torch.split(projected.cpu(), [SIZES.inner, SIZES.inner, group, group, SIZES.heads], dim=1)
        worst = 0.0
        for token in range(tokens):
            state = before[slots[token]].cpu()
            exact = mamba_reference.selective_scan(
                x[token].view(1, SIZES.heads, -1), dt[token : token + 1], b[token].view(1, SIZES.groups, -1),
                c[token].view(1, SIZES.groups, -1), a.cpu(), d.cpu(), dt_bias.cpu(), state,
            ).flatten(1)  # fmt: skip
            normed = norm_reference.gated_group_rms_norm(
                exact, z[token : token + 1], norm_weight.cpu(), SIZES.inner // SIZES.groups, EPS
            )
            worst = max(
                worst,
                relative_error(y[token], exact[0]),
                relative_error(states[0][slots[token]], state),
                relative_error(from_octets(out)[token], normed[0]),
            )
        return worst

    candidates = [Tiling(part, warps, False) for part in (16, 32, 64) for warps in (2, 4, 8)]
    return Case(
        "state update", 2 * state_bytes, sets, launch, reset, compare, [y, out], candidates, more_bytes=2 * state_bytes
    )


def fill(pages: Tensor, values: Tensor) -> None:
    for part, value in zip(torch.split(pages, 256), torch.split(values, 256), strict=True):
        part.copy_(value)


def make_pages(dense: Dense, count: int, dtype: torch.dtype) -> Pages:
    shape = (count, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
    keys = torch.empty(shape, dtype=dtype, device=dense.device)
    values = torch.empty(shape, dtype=dtype, device=dense.device)
    fill(keys, dense.randn(*shape))
    fill(values, dense.randn(*shape))
    return Pages(keys, values) if dtype == torch.bfloat16 else Pages(keys, values, 0.5, 0.25)


def qkv_case(dense: Dense) -> Case:
    shapes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    made = [dense.linear("BF16", rows, HIDDEN) for rows in shapes]
    size_bytes = sum(linear.size_bytes for linear, _ in made)
    sets = SET_BYTES // size_bytes
    weights = [[linear for linear, _ in made]]
    weights += [[dense.linear("BF16", rows, HIDDEN)[0] for rows in shapes] for _ in range(sets - 1)]
    plain_x, plain_weight = dense.randn(TOKENS, HIDDEN), dense.randn(HIDDEN, scale=0.2) + 1.0
    x, norm, pages = to_octets(plain_x), Norm(to_octets(plain_weight), EPS), make_pages(dense, 16, torch.bfloat16)
    tables = torch.arange(16, dtype=torch.int32, device=dense.device).flip(0).view(TOKENS, 4)
    lengths = torch.tensor([1, 65, 128, 200], dtype=torch.int32, device=dense.device)
    query = torch.empty(TOKENS, shapes[0], device=dense.device)

    def launch(which: int, rows: slice, configuration: Tiling | None) -> None:
        q, k, v = weights[which]
        qkv(x[rows], norm, (q, k, v), pages, tables[rows], lengths[rows], query[rows], configuration)

    def reset() -> None:
        for poisoned in (query, pages.keys, pages.values):
            poisoned.fill_(torch.nan)

    def compare(tokens: int) -> float:
        source = norm_reference.rms_norm(plain_x[:tokens].cpu(), plain_weight.cpu(), EPS).double()
        every = torch.arange(shapes[1], device=dense.device)
        exact = source @ made[0][1](check_rows(shapes[0]).to(dense.device)).double().T
        worst = relative_error(query[:tokens].cpu()[:, check_rows(shapes[0])], exact)
        for token in range(tokens):
            page, offset = divmod(int(lengths[token]) - 1, PAGE_TOKENS)
            for where, (_, rows_of) in ((pages.keys, made[1]), (pages.values, made[2])):
                exact = source[token] @ rows_of(every).double().T
                # Rounded to 8 bits: an error of 2^-9 at most in each, half a unit more where the two round apart.
                assert relative_error(where[tables[token, page], offset].flatten().float(), exact) < 2e-3
        return worst

    return Case("q k v BF16", size_bytes, sets, launch, reset, compare, [query], sweep("BF16", HIDDEN))


def attend_case(dense: Dense, tokens_before: int, dtype: torch.dtype) -> Case:
    count = tokens_before // PAGE_TOKENS
    size_bytes = 2 * tokens_before * KV_HEADS * HEAD_DIM * dtype.itemsize
    sets = max(2, min(64, SET_BYTES // (TOKENS * size_bytes)))
    pages = make_pages(dense, sets * TOKENS * count, dtype)
    order = torch.randperm(sets * TOKENS * count, device=dense.device, generator=dense.generator)
    tables = order.int().view(sets, TOKENS, count)
    lengths = tokens_before - 7 * torch.arange(TOKENS, dtype=torch.int32, device=dense.device)
    query = dense.randn(TOKENS, HEADS * HEAD_DIM, scale=2.0)
    workspace = attention.Workspace(TOKENS, HEADS, HEAD_DIM, tokens_before, PAGE_TOKENS, dense.device)
    out = torch.empty(TOKENS, HEADS * HEAD_DIM, device=dense.device)

    def launch(which: int, rows: slice, configuration: Tiling | None) -> None:
        chosen = {} if configuration is None else {"warps": configuration.warps, "stages": configuration.tile}
        attention.attend(query[rows], pages, tables[which][rows], lengths[rows], workspace, out[rows], **chosen)

    def reset() -> None:
        for poisoned in (out, workspace.mixed, workspace.best, workspace.total):
            poisoned.fill_(torch.nan)

    def compare(tokens: int) -> float:
        worst = 0.0
        for token in range(tokens):
            length = int(lengths[token])
            key, value = (
                half.view(torch.uint8)[tables[0, token].long()].view(half.dtype).flatten(0, 1)[:length].float().double()
                * scale
                for half, scale in ((pages.keys, pages.key_scale), (pages.values, pages.value_scale))
            )
            q = query[token].double().view(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            scores = torch.einsum("kgd,tkd->kgt", q, key) / math.sqrt(HEAD_DIM)
            exact = torch.einsum("kgt,tkd->kgd", scores.softmax(dim=2), value).flatten()
            worst = max(worst, relative_error(from_octets(out)[token], exact))
        return worst

    name = f"attend {tokens_before} {'BF16' if dtype == torch.bfloat16 else 'FP8'}"
    candidates = [Tiling(stages, warps, False) for stages in (1, 2, 3) for warps in (4, 8)]
    return Case(name, size_bytes, sets, launch, reset, compare, [out], candidates, size_bytes, bound=2e-5)


def choose_case(dense: Dense) -> Case:
    logits, bias = dense.randn(TOKENS, EXPERTS, scale=2.0), dense.randn(EXPERTS, scale=0.1)
    ids = torch.empty(TOKENS, TOP_K, dtype=torch.int32, device=dense.device)
    weights = torch.empty(TOKENS, TOP_K, device=dense.device)

    def launch(which: int, rows: slice, configuration: Tiling | None) -> None:
        router.choose(logits[rows], bias, TOP_K, 5.0, True, ids[rows], weights[rows])

    def reset() -> None:
        ids.fill_(-1)
        weights.fill_(torch.nan)

    def compare(tokens: int) -> float:
        exact_ids, exact = router_reference.choose(logits[:tokens].cpu(), bias.cpu(), TOP_K, 5.0, True)
        assert torch.equal(ids[:tokens].cpu(), exact_ids)
        return relative_error(weights[:tokens], exact)

    return Case("choose experts", EXPERTS * 4, 1, launch, reset, compare, [weights])


def sample_case(dense: Dense, greedy: bool) -> Case:
    logits = dense.randn(TOKENS, VOCABULARY, scale=3.0)
    sampler = Sampler(TOKENS, VOCABULARY, dense.device)
    parameters = [(0.7, 0.95), (1.0, 1.0), (0.0, 1.0), (1.5, 0.5)]
    sampler.parameters.copy_(torch.tensor(parameters, dtype=torch.float64))
    sampler.seeds.copy_(torch.tensor([[5, 77], [1 << 40, 3], [0, 0], [-9, 1 << 33]]))

    def launch(which: int, rows: slice, configuration: Tiling | None) -> None:
        (sampler.greedy if greedy else sampler.sample)(logits[rows])

    def reset() -> None:
        sampler.drawn.fill_(-7)

    def compare(tokens: int) -> float:
        for token in range(tokens):
            temperature, top_p = (0.0, 1.0) if greedy else parameters[token]
            seed, position = sampler.seeds[token].tolist()
            exact = sampling_reference.sample(logits[token].cpu(), temperature, top_p, seed, position)
            assert int(sampler.drawn[token]) == exact, (token, sampler.drawn.tolist(), exact)
        return 0.0

    return Case("greedy" if greedy else "sample", VOCABULARY * 4, 1, launch, reset, compare, [])


def state_cases(dense: Dense) -> dict[str, Callable[[], Case]]:
    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    return {
        **{f"in_proj {form}": partial(in_proj_case, dense, form) for form in ("FP8", "NVFP4", "BF16")},
        "state update": partial(update_case, dense),
        "q k v BF16": partial(qkv_case, dense),
        "attend 4096 BF16": partial(attend_case, dense, 4096, bf16),
        "attend 32768 BF16": partial(attend_case, dense, 32768, bf16),
        "attend 32768 FP8": partial(attend_case, dense, 32768, e4m3),
        "choose experts": partial(choose_case, dense),
        "greedy": partial(sample_case, dense, True),
        "sample": partial(sample_case, dense, False),
    }
