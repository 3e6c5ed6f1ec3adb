"""A model shape so small that a whole state is a few hundred bytes, and states with recognisable content."""

from collections.abc import Iterable, Sequence

import torch

from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool
from services.engine.snapshots.memory import Memory
from services.engine.snapshots.payload import Loader, PayloadFormat
from services.engine.state import State

CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    layers=("mamba", "moe", "attention", "mamba", "attention"),
    norm_eps=1e-5,
    context_tokens=1000,
    attention_heads=2,
    kv_heads=1,
    head_dim=2,
    mamba_heads=2,
    mamba_head_dim=1,
    mamba_state=2,
    mamba_groups=1,
    conv_kernel=4,
    experts=4,
    experts_per_token=2,
    expert_width=16,
    latent_size=32,
    shared_width=8,
    routed_scale=1.0,
    norm_topk=True,
)


def feed(state: State, count: int, seed: int = 0) -> None:
    """What a model step leaves behind, with random content."""
    config, generator = state.config, torch.Generator().manual_seed(seed)
    state.reserve(count)
    for layer in range(len(config.attention_layers)):
        key, value = torch.randn(2, count, config.kv_heads, config.head_dim, generator=generator)
        state.write_kv(layer, key, value)
    state.conv.copy_(torch.randn(state.conv.shape, generator=generator))
    state.ssm.copy_(torch.randn(state.ssm.shape, generator=generator))
    state.ids += torch.randint(config.vocab_size, (count,), generator=generator).tolist()


def fed(pool: PagePool, tokens: int, seed: int = 0) -> State:
    state = State(CONFIG, pool)
    feed(state, tokens, seed)
    return state


def dump(form: PayloadFormat, state: State) -> tuple[list[bytes], list[bytes]]:
    """The chunks of the own part, and the blocks."""
    own = Memory().take(form.own_bytes(state.tokens))
    form.dump(state, own.data)
    return list(own), [form.dump_block(state, number) for number in range(form.blocks(state.tokens))]


def load(form: PayloadFormat, chunks: Iterable[bytes], blocks: Sequence[bytes], pool: PagePool) -> State:
    """A new state from a payload. If it is refused, its pages are back in the pool."""
    state = State(form.config, pool)
    try:
        loader = Loader(form, state)
        for chunk in chunks:
            loader.feed(chunk)
        for number, block in enumerate(blocks):
            loader.put_block(number, block)
        loader.finish()
    except BaseException:
        state.release()
        raise
    return state


def equal(one: State, other: State) -> bool:
    """Ids, fixed tensors and every key and value, to the bit."""
    return (
        one.ids == other.ids
        and torch.equal(one.conv, other.conv)
        and torch.equal(one.ssm, other.ssm)
        and all(
            torch.equal(mine, theirs)
            for layer in range(len(one.config.attention_layers))
            for mine, theirs in zip(one.read_kv(layer, one.tokens), other.read_kv(layer, other.tokens), strict=True)
        )
    )
