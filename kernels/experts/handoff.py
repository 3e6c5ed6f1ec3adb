"""Hand-off between a CUDA graph and the host thread that runs the experts: flags and data in page-locked mapped memory.

One exchange per MoE layer. Memory (all host memory mapped into the GPU's address space except `turn`):

    turn       int32, device   how many exchanges the GPU has begun; only `post_kernel` writes it
    posted     int32, mapped   GPU -> host: request number `turn` is complete in `ids` and `x`
    planned    int32, mapped   host -> GPU: `plan` holds the GPU's work of request number `turn`; one flag for each
                               wave, where the bytes of some experts are announced before those of others
    finished   int32, mapped   host -> GPU: the host's results of request number `turn` are in `host_y`
    stop       int32, device   1 = a wait ran out of time: nothing is posted any more, every later wait passes at once
    stopped    int32, mapped   GPU -> host: the same
    waited     int64, mapped   GPU -> host: nanoseconds that the last wait for results took

Order: data is written first, then a barrier, then the flag with a release store at system scope; the reader spins with
acquire loads. A number is never reused, so a late answer to an old request can't be taken for a new one. Each wait is
bounded by the GPU's nanosecond clock: when the host is dead or stalled the graph runs to its end with `stop` set, and
the GPU is never wedged. Kernels that change what outlives the layer (the residual stream, a sequence's state) read
`stop` and leave it alone. So when the host has answered after all, `stop` is cleared and the token goes on from the
wait that gave up, as if that had only taken long; the number and the mapped data are still those of that request.
"""

import triton
import triton.language as tl


@triton.jit
def _store_release(address, value):
    tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;",
        "=r,l,r",
        [address, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_acquire(address):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def nanoseconds(anchor):
    return tl.inline_asm_elementwise(
        "{ .reg .u64 t; mov.u64 t, %globaltimer; add.u64 $0, t, $1; }",
        "=l,l",
        [anchor],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def post_kernel(
    turn,
    stop,
    posted,
    layer,
    ids,
    x,
    host_ids,
    host_x,
    IDS: tl.constexpr,
    IDS_PADDED: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_PADDED: tl.constexpr,
):
    """Copies ids int32 [IDS], the layer's number and x float32 [VALUES] to mapped memory, then announces them."""
    if tl.load(stop) == 0:
        at = tl.arange(0, IDS_PADDED)  # one program; IDS_PADDED > IDS
        words = tl.where(at < IDS, tl.load(ids + at, mask=at < IDS, other=0), layer)
        tl.store(host_ids + at, words, mask=at <= IDS)
        value = tl.arange(0, VALUES_PADDED)
        tl.store(host_x + value, tl.load(x + value, mask=value < VALUES), mask=value < VALUES)
        number = tl.load(turn) + 1
        tl.debug_barrier()
        tl.store(turn, number)
        _store_release(posted.to(tl.int64), number)


@triton.jit
def wait_kernel(
    turn,
    flag,
    stop,
    stopped_there,
    timeout_ns,
    waited,
    plan,
    plan_here,
    PLAN: tl.constexpr,
    PLAN_PADDED: tl.constexpr,
):
    """Waits until the host has answered this turn, then copies PLAN int64 words from mapped to device memory.

    Where the wait ran out of time the words are zero: no item, and nothing of the host's memory is read any more.
    """
    number = tl.load(turn)
    stopped = tl.load(stop)
    zero = number.to(tl.int64) * 0
    begin = nanoseconds(zero)
    seen = _load_acquire(flag.to(tl.int64))
    while (seen != number) & (stopped == 0):
        seen = _load_acquire(flag.to(tl.int64))
        stopped = (nanoseconds(zero) - begin > timeout_ns).to(tl.int32)
    tl.debug_barrier()
    if stopped != 0:
        tl.store(stop, stopped)
        _store_release(stopped_there.to(tl.int64), stopped)
    tl.store(waited, nanoseconds(zero) - begin)
    if PLAN > 0:
        at = tl.arange(0, PLAN_PADDED)
        words = tl.load(plan + at, mask=at < PLAN, other=0, volatile=True)
        tl.store(plan_here + at, tl.where(stopped != 0, 0, words), mask=at < PLAN)
