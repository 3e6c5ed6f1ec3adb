"""What the plan makes of a card: pictures, sequences, chunks and context share what is left beside the weights."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.engine.config import EngineConfig
from services.engine.experts.store import Store
from services.engine.gpu import ledger as ledgers
from services.engine.gpu import plan as planning
from services.engine.gpu.ledger import MIB, longest_context
from services.engine.gpu.plan import plan_device
from services.engine.vision.device import card_bytes
from services.tools import synthetic_vision
from services.tools.synthetic_shapes import SUPER, dense_layout

DENSE = dense_layout(SUPER)


@pytest.mark.parametrize(
    ("card_mib", "settings", "expected"),
    [
        (8151, {}, (True, 2, 17_216)),
        (8151, {"context_tokens": 8192}, (True, 2, 8192)),
        (8151, {"max_sequences": 4}, (False, 4, 2816)),
        (8151, {"max_sequences": 4, "speculation": "off"}, (False, 4, 2368)),
        (7550, {}, (False, 1, 6400)),
        (12_000, {}, (True, 4, 116_864)),
    ],
    ids=str,
)
def test_pictures_are_read_on_a_card_that_has_room_for_them(
    card_mib: int,
    settings: dict[str, Any],
    expected: tuple[bool, int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The context comes first; what pictures take is in the ledger, and what they would take is said."""
    monkeypatch.setattr(planning, "stored_layout", lambda _: DENSE)
    weights = synthetic_vision.holes(tmp_path / "vision.safetensors")
    store = cast(Store, SimpleNamespace(config=SUPER, folder=None, vision=lambda: weights, draft_file=None))
    config = EngineConfig(**settings)
    plan = plan_device(config, store, free_bytes=card_mib * MIB - ledgers.CONTEXT_BYTES)
    print(plan)
    assert (plan.sees, plan.sequences, plan.context_tokens) == expected
    lines = dict(plan.ledger.lines)
    assert plan.ledger.total_bytes <= card_mib * MIB
    assert plan.ledger.wanted.vision_bytes == (card_bytes(weights) if plan.sees else 0)
    shared = ledgers.sweep_room_bytes(SUPER, plan.chunk_tokens)
    own = [size for name, size in lines.items() if name.startswith("vision ring and activations")]
    assert sum(own) == max(0, plan.ledger.wanted.vision_bytes - shared)
    assert ("pictures are read by the processor" in str(plan)) != plan.sees
    if not plan.sees:
        beside = replace(plan.ledger.wanted, vision_bytes=card_bytes(weights))
        assert longest_context(SUPER, DENSE, beside, card_mib * MIB) < 16_384


@pytest.mark.parametrize(
    ("card_mib", "kv", "sequences", "rows", "chunk", "tokens"),
    [
        (8151, "bf16", 2, (1, 2), 2048, 16_576),
        (8151, "fp8", 2, (1, 2, 4), 2048, 27_712),
        (7550, "bf16", 1, (1,), 256, 4352),
        (7550, "fp8", 1, (1,), 256, 8704),
        (7500, "bf16", 1, (1,), 0, 2496),
        (16_000, "bf16", 4, (1, 2, 3, 4), 2048, 131_072),
    ],
)
def test_what_is_automatic_fits_the_card(
    card_mib: int,
    kv: str,
    sequences: int,
    rows: tuple[int, ...],
    chunk: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short prompts' rows and drafts cost context, but never the last of it. A PC of 32 GB, 22.8 of it for experts."""
    monkeypatch.setattr(planning, "stored_layout", lambda _: DENSE)
    store = cast(Store, SimpleNamespace(config=SUPER, folder=None, vision=lambda: None, draft_file=None))
    free_bytes, locked_bytes = card_mib * MIB - ledgers.CONTEXT_BYTES, 22_800_000_000
    plan = plan_device(EngineConfig(kv_format=kv), store, free_bytes, locked_bytes)
    print(plan)
    assert (plan.sequences, plan.ledger.wanted.step_rows, plan.chunk_tokens) == (sequences, rows, chunk)
    assert plan.context_tokens == tokens
    assert plan.ledger.wanted.drafts == (2 in rows)
    assert plan.ledger.total_bytes <= card_mib * MIB
    cramped = tokens < planning.COMFORTABLE_TOKENS
    assert ("thimble repack --dense fp8" in str(plan)) == cramped
    assert ("THIMBLE_ENGINE_KV_FORMAT=fp8 holds" in str(plan)) == (cramped and kv == "bf16")
    if chunk:
        less = plan_device(EngineConfig(kv_format=kv), store, free_bytes, locked_bytes, 2 * ledgers.LOCKED_SHARE)
        assert less.ledger.total_bytes <= card_mib * MIB, "whatever page tables take"
        assert (less.sequences, less.chunk_tokens, less.context_tokens) <= (sequences, chunk, tokens)


@pytest.mark.parametrize(
    ("card_mib", "settings", "chunk", "tokens"),
    [
        (7650, {}, 512, 13_696),  # 256 would leave room for 17,024
        (7750, {}, 1024, 19_840),
        (7550, {"kv_format": "fp8", "context_tokens": 16_384}, 0, 16_384),
        (7550, {"kv_format": "fp8", "context_tokens": 8192}, 256, 8192),
        (7550, {"prefill_chunk_tokens": 128}, 128, 5440),
    ],
    ids=str,
)
def test_chunks_and_context_share_what_is_left_but_what_is_asked_for_is_had(
    card_mib: int, settings: dict[str, Any], chunk: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "stored_layout", lambda _: DENSE)
    store = cast(Store, SimpleNamespace(config=SUPER, folder=None, vision=lambda: None, draft_file=None))
    plan = plan_device(
        EngineConfig(**settings), store, card_mib * MIB - ledgers.CONTEXT_BYTES, locked_bytes=22_800_000_000
    )
    assert (plan.chunk_tokens, plan.context_tokens) == (chunk, tokens)
