"""Drawing an id from logits on a GPU (or in the interpreter), with the randomness and the order of reference.py.

No sorting: an id's probability is an integer, 2^40 e^((logit - largest) / temperature), so that sums are exact in any
order. The logit at which a running sum from the top passes a target is found digit by digit, four bits of the logit's
ordered bits at a time; each of the 2 * 8 steps is one launch over all logits. The first search finds what `top_p`
keeps, the second the drawn logit; ids with equal logits are then counted, lowest first.
"""

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import exp

Tensor = torch.Tensor

TILE = 1024  # logits a program
WARPS = 4
DIGITS = tl.constexpr(8)  # of 4 bits, of one search
STEPS = 16
FINGERPRINT = "triton-int64 mass 2^40"

_WHOLE = tl.constexpr(2.0**40)
_ID_LIMIT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _masked_logits(logits, allowed, row, at, IDS: tl.constexpr, MASKED: tl.constexpr):
    inside = at < IDS
    values = tl.load(logits + row * IDS + at, mask=inside, other=float("-inf"))
    if MASKED:
        words = tl.load(allowed + row * ((IDS + 31) // 32) + at // 32, mask=inside, other=0)
        values = tl.where(((words >> (at % 32)) & 1) != 0, values, float("-inf"))
    return values


@triton.jit
def _key(values):
    """Logits as integers 0..2^32 - 1 of the same order; a NaN above all."""
    bits = tl.where(values == values, values, float("inf")).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    return tl.where(values == values, tl.where(values == 0.0, 0x80000000, ordered), 0xFFFFFFFF)


@triton.jit
def _value(key):
    """The logit of a key."""
    ordered = (key - 0x80000000).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(values, top, temperature):
    """int64; temperature 0 leaves only the largest."""
    share = exp(tl.div_rn(values - top, tl.where(temperature > 0.0, temperature, 1.0)))
    share = tl.where(temperature > 0.0, share, tl.where(values == top, 1.0, 0.0))
    return (tl.where(share <= 1.0, share, 0.0) * _WHOLE).to(tl.int64)


@triton.jit
def _best(best, row, TILES: tl.constexpr, PADDED: tl.constexpr):
    """Key and id, in one int64, of the row's first id in order."""
    at = tl.arange(0, PADDED)
    return tl.max(tl.load(best + row * TILES + at, mask=at < TILES, other=0), axis=0)


@triton.jit
def _is_usable(best):
    """Whether the largest logit is a finite number."""
    key = best >> 31
    return (key > 0x007FFFFF) & (key < 0xFF800000)  # between those of -inf and of inf


@triton.jit
def best_kernel(logits, allowed, best, IDS: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Program (tile, row) -> best int64 [M, tiles]: the tile's largest key, then its lowest id."""
    row = tl.program_id(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    key = _key(_masked_logits(logits, allowed, row, at, IDS, MASKED))
    tl.store(best + row * tl.num_programs(0) + tl.program_id(0), tl.max((key << 31) + (_ID_LIMIT - at), axis=0))


@triton.jit
def greedy_kernel(best, ids, TILES: tl.constexpr, PADDED: tl.constexpr):
    """ids int32 [M]: the first id in order, -1 where the logits are not usable."""
    row = tl.program_id(0)
    found = _best(best, row, TILES, PADDED)
    tl.store(ids + row, tl.where(_is_usable(found), _ID_LIMIT - (found & _ID_LIMIT).to(tl.int32), -1))


@triton.jit
def _uniform_53(seed, position):
    """53 random bits of Philox 4x32-10, as in the reference."""
    high, low, _, _ = tl.philox(seed, position.to(tl.uint32), (position >> 32).to(tl.uint32), 0, 0)
    return ((high >> 5).to(tl.int64) << 26) + (low >> 6).to(tl.int64)


@triton.jit
def _advance(step, row, states, sums, top_p, TILES: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr):
    """Where the search stands before `step` > 0: digits found so far, mass above them, target.

    sums int64 [M, STEPS, tiles, 16]: mass by next digit, of the logits that begin with the digits found so far.
    """
    before = states + (row * (STEPS + 1) + step - 1) * 3
    prefix, above, target = tl.load(before), tl.load(before + 1), tl.load(before + 2)
    tile = tl.arange(0, PADDED)
    digit = tl.arange(0, 16)
    place = ((row * STEPS + step - 1) * TILES + tile[:, None]) * 16 + digit[None, :]
    mass = tl.sum(tl.load(sums + place, mask=(tile < TILES)[:, None], other=0), axis=0)
    whole = tl.sum(mass, axis=0)
    if step == 1:
        wanted = whole.to(tl.float64) * top_p
        target = tl.maximum(tl.minimum(tl.ceil(wanted).to(tl.int64), whole) - 1, 0)
    above_digit = above + whole - tl.cumsum(mass, axis=0)
    found = tl.maximum(tl.max(tl.where(above_digit + mass > target, digit, -1), axis=0), 0)
    return prefix * 16 + found, tl.sum(tl.where(digit == found, above_digit, 0), axis=0), target


@triton.jit(do_not_specialize=["step"])
def narrow_kernel(
    logits,
    allowed,
    best,
    states,
    sums,
    counts,
    parameters,
    seeds,
    step,
    IDS: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program (tile, row): all programs find the search's next digit, each then sums its tile by the digit after it.

    The step after the last counts, instead, the ids of the tile with the drawn logit.
    """
    row = tl.program_id(1)
    temperature = tl.load(parameters + row * 2).to(tl.float32)
    top = _value(_best(best, row, TILES, PADDED) >> 31)
    prefix = tl.full([], 0, tl.int64)
    above = tl.full([], 0, tl.int64)
    target = tl.full([], 0, tl.int64)
    if step > 0:
        prefix, above, target = _advance(
            step, row, states, sums, tl.load(parameters + row * 2 + 1), TILES, PADDED, STEPS
        )
    if (step == DIGITS) | (step == STEPS):
        each = tl.maximum(_mass(_value(prefix), top, temperature), 1)
        equal = (target - above) // each  # ids of this logit before the one that passes the target
        if step == DIGITS:  # all that top_p keeps: draw from it, and search again
            kept = above + (equal + 1) * each
            uniform = _uniform_53(tl.load(seeds + row * 2), tl.load(seeds + row * 2 + 1))
            drawn = (uniform.to(tl.float64) * kept.to(tl.float64) * (1.0 / 9007199254740992.0)).to(tl.int64)
            prefix, above = prefix * 0, above * 0
            target = tl.where(temperature > 0.0, tl.minimum(drawn, kept - 1), 0)
        else:
            target = equal
    if tl.program_id(0) == 0:
        after = states + (row * (STEPS + 1) + step) * 3
        tl.store(after, prefix)
        tl.store(after + 1, above)
        tl.store(after + 2, target)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = _masked_logits(logits, allowed, row, at, IDS, MASKED)
    key = _key(values)
    if step == STEPS:
        count = tl.sum(((key == prefix) & (at < IDS)).to(tl.int32), axis=0)
        tl.store(counts + row * TILES + tl.program_id(0), count)
    else:
        shift = 28 - 4 * (step % DIGITS)
        ours = tl.where((key >> (shift + 4)) == prefix, (key >> shift) & 15, -1)
        mass = _mass(values, top, temperature)
        digit = tl.arange(0, 16)
        by_digit = tl.sum(tl.where(ours[None, :] == digit[:, None], mass[None, :], 0), axis=1)
        tl.store(sums + ((row * STEPS + step) * TILES + tl.program_id(0)) * 16 + digit, by_digit)


@triton.jit
def pick_kernel(
    logits,
    allowed,
    best,
    states,
    counts,
    ids,
    IDS: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
):
    """ids int32 [M]: of the ids with the drawn logit, the one that as many precede as the search says; or -1."""
    row = tl.program_id(0)
    after = states + (row * (STEPS + 1) + STEPS) * 3
    prefix, wanted = tl.load(after), tl.load(after + 2).to(tl.int32)
    tile = tl.arange(0, PADDED)
    count = tl.load(counts + row * TILES + tile, mask=tile < TILES, other=0)
    until = tl.cumsum(count, axis=0)
    mine = tl.min(tl.where(until > wanted, tile, TILES - 1), axis=0)
    wanted -= tl.sum(tl.where(tile < mine, count, 0), axis=0)
    at = mine * TILE + tl.arange(0, TILE)
    equal = (_key(_masked_logits(logits, allowed, row, at, IDS, MASKED)) == prefix) & (at < IDS)
    nth = tl.cumsum(equal.to(tl.int32), axis=0)
    id = tl.min(tl.where(equal & (nth == wanted + 1), at, IDS - 1), axis=0)
    tl.store(ids + row, tl.where(_is_usable(_best(best, row, TILES, PADDED)), id, -1))


class Sampler:
    """Buffers and launches for `rows` rows of `ids` logits. What a row draws depends on nothing but its own inputs.

    Inputs, written before `sample`: parameters float64 [rows, 2], temperature and top_p; seeds int64 [rows, 2], seed
    and position, as bits. Every call takes logits float32 [rows, ids] and, or None, `allowed` int32 [rows, (ids + 31) /
    32]: bit i of a row allows id i. Output: drawn int32 [rows]; -1 where the largest allowed logit is NaN or infinite,
    from which the reference raises LogitsError.
    """

    def __init__(self, rows: int, ids: int, device: torch.device) -> None:
        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.tiles = triton.cdiv(ids, TILE)
        self.parameters = new(2, dtype=torch.float64)
        self.seeds = new(2)
        self.best = new(self.tiles)
        self.states = new(STEPS + 1, 3)
        self.sums = new(STEPS, self.tiles, 16)
        self.counts = new(self.tiles, dtype=torch.int32)
        self.drawn = new(dtype=torch.int32)

    def greedy(self, logits: Tensor, allowed: Tensor | None = None) -> None:
        """Queue drawn = the lowest id of the largest logit; two launches."""
        rows = logits.shape[0]
        self._find_best(logits, allowed)
        greedy_kernel[(rows,)](self.best, self.drawn, **self._tiles(), num_warps=WARPS)

    def sample(self, logits: Tensor, allowed: Tensor | None = None) -> None:
        """Queue drawn = reference.sample of each row, temperature 0 included; STEPS + 3 launches."""
        rows = logits.shape[0]
        shape = {"IDS": logits.shape[1], "MASKED": allowed is not None, "TILE": TILE, **self._tiles(), "STEPS": STEPS}
        mask = self.best if allowed is None else allowed
        self._find_best(logits, allowed)
        for step in range(STEPS + 1):
            narrow_kernel[(self.tiles, rows)](
                logits,
                mask,
                self.best,
                self.states,
                self.sums,
                self.counts,
                self.parameters,
                self.seeds,
                step,
                **shape,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
        pick_kernel[(rows,)](logits, mask, self.best, self.states, self.counts, self.drawn, **shape, num_warps=WARPS)

    def _find_best(self, logits: Tensor, allowed: Tensor | None) -> None:
        rows, ids = logits.shape
        best_kernel[(self.tiles, rows)](
            logits,
            self.best if allowed is None else allowed,
            self.best,
            IDS=ids,
            MASKED=allowed is not None,
            TILE=TILE,
            num_warps=WARPS,
        )

    def _tiles(self) -> dict[str, int]:
        return {"TILES": self.tiles, "PADDED": triton.next_power_of_2(self.tiles)}
