"""The store on disk that `thimble repack` writes and the engine reads.

    manifest.json       format, version, model config, fingerprint, sizes; per MoE layer and expert: the block's offset
                        in experts.bin, its XXH64, and the two per-tensor scales that are not in the block
    experts.bin         one block per (MoE layer, expert), laid out by kernels/block.py, page aligned
    dense.safetensors   every other tensor in the checkpoint's own formats, under canonical names
    vision.safetensors  the vision side, where the model has one; see vision/weights.py
    mtp.safetensors     the multi-token-prediction block, where the checkpoint has one that this engine computes; its
                        experts are the last blocks of experts.bin. It drafts, and never changes what is said: the
                        fingerprint does not cover it, and a store without it is as good
    TEXT_FILES          the tokenizer and template, for the api

Owns the manifest's content and one plain way to read a block. Slots, caches and O_DIRECT are not here.

A store whose source says `synthetic` was made by `thimble synth`, without a model: several experts may be the same
block of the file there, so that a large model's shape fits a small disk. No other store may do that.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kernels.block import BlockLayout, Bytes
from services.engine.errors import CheckpointError, StoreError
from services.engine.model_config import ModelConfig
from services.engine.parsing import parse_json
from services.engine.tensorfile import read_header
from services.engine.vision.config import VisionConfig
from services.engine.vision.weights import VisionWeights
from services.engine.weights import DenseWeights, draft_tensors

FORMAT = "thimble-store"
VERSION = 1
MANIFEST = "manifest.json"
EXPERTS = "experts.bin"
DENSE = "dense.safetensors"
VISION = "vision.safetensors"
DRAFT = "mtp.safetensors"
JOURNAL = "repack.journal"  # there while the store is being made
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Block:
    """One expert's place and what is needed to use it. `offset` is in bytes from the start of experts.bin."""

    offset: int
    xxh64: int
    up_scale: float  # weight_scale_2 of up_proj and down_proj, both exactly float32
    down_scale: float


@dataclass(frozen=True)
class DenseFile:
    size_bytes: int
    xxh64: int


@dataclass(frozen=True)
class DraftFile:
    """The multi-token-prediction block; `blocks[e]` is its expert e."""

    file: DenseFile
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class VisionFile:
    size_bytes: int
    xxh64: int
    config: VisionConfig


@dataclass(frozen=True)
class Store:
    """`blocks[i][e]`: expert e of the i-th MoE layer. Nothing but the manifest is kept in memory."""

    folder: Path
    config: ModelConfig
    layout: BlockLayout
    blocks: tuple[tuple[Block, ...], ...]
    dense_file: DenseFile
    source: dict[str, Any]  # where it was made from; for people
    fingerprint: str  # hex; of the config and every weight
    vision_file: VisionFile | None = None
    draft_file: DraftFile | None = None

    @property
    def experts_path(self) -> Path:
        return self.folder / EXPERTS

    @property
    def synthetic(self) -> bool:
        """Random weights: whatever is measured or said with this store must say so."""
        return self.source.get("synthetic") is True

    @property
    def physical_blocks(self) -> int:
        """Blocks in experts.bin: as many as experts, but for a synthetic store."""
        experts = sum(map(len, self.layers))
        said = self.source.get("physical_blocks", experts) if self.synthetic else experts
        return said if type(said) is int else 0

    @staticmethod
    def open(folder: Path) -> "Store":
        """Raises StoreError if the store is missing, incomplete, damaged, or of another version."""
        manifest = _read_manifest(folder)
        try:
            config = ModelConfig.from_json(manifest["config"])
            blocks = tuple(tuple(parse_block(record) for record in layer["blocks"]) for layer in manifest["layers"])
            layers = tuple(layer["layer"] for layer in manifest["layers"])
            if not isinstance(manifest["source"], dict):
                raise TypeError("source is no object")
            dense = _dense_file(manifest["dense"])
            vision = _vision_file(manifest["vision"]) if "vision" in manifest else None
            draft = _draft_file(manifest["mtp"]) if "mtp" in manifest else None
            store = Store(
                folder, config, config.block, blocks, dense, manifest["source"], manifest["fingerprint"], vision, draft
            )
        except (KeyError, TypeError, ValueError, OverflowError, CheckpointError) as error:
            raise StoreError(f"{folder / MANIFEST}: damaged ({error!r}); run thimble repack again") from error
        store._check(layers)
        return store

    @property
    def layers(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of all MoE layers and, last, of the multi-token-prediction block if there is one."""
        return self.blocks if self.draft_file is None else (*self.blocks, self.draft_file.blocks)

    def read_block(self, layer: int, expert: int) -> Bytes:
        """A block's bytes, uint8 [block_bytes]; `layer` as in `layers`. Raises StoreError if they are damaged."""
        block = self.layers[layer][expert]
        with self.experts_path.open("rb") as file:
            data = np.fromfile(file, np.uint8, self.layout.block_bytes, offset=block.offset)
        where = f"{self.experts_path}: MoE layer {layer}, expert {expert}"
        if len(data) != self.layout.block_bytes:
            raise StoreError(f"{where}: the file ends inside the block; run thimble repack again")
        if xxhash.xxh64_intdigest(data.data) != block.xxh64:
            raise StoreError(f"{where}: the checksum does not match, the bytes have changed; run thimble repack again")
        check_scale_codes(self.layout, data, where)
        return data

    def dense(self) -> DenseWeights:
        """Every other tensor, read when asked for. Raises StoreError if the file does not hold them."""
        try:
            return DenseWeights(read_header(self.folder / DENSE), self.config)
        except CheckpointError as error:
            raise StoreError(f"{error}; the store is damaged, run thimble repack again") from error

    def draft(self) -> DenseWeights | None:
        """The multi-token-prediction block's tensors but its experts', read when asked for. Raises StoreError."""
        if self.draft_file is None:
            return None
        try:
            return DenseWeights(read_header(self.folder / DRAFT), self.config, draft_tensors)
        except CheckpointError as error:
            raise StoreError(f"{error}; the store is damaged, run thimble repack again") from error

    def vision(self) -> VisionWeights | None:
        """The vision side, read when asked for; None if the model has none. Raises StoreError."""
        if self.vision_file is None:
            return None
        try:
            return VisionWeights(self.folder / VISION, self.vision_file.config)
        except CheckpointError as error:
            raise StoreError(f"{error}; the store is damaged, run thimble repack again") from error

    def check_dense(self) -> None:
        """Read all but the experts through and compare checksums. Raises StoreError."""
        draft = self.draft_file.file if self.draft_file else None
        for name, file in ((DENSE, self.dense_file), (VISION, self.vision_file), (DRAFT, draft)):
            if file is None:
                continue
            digest = xxhash.xxh64()
            with (self.folder / name).open("rb") as stream:
                while piece := stream.read(16 << 20):
                    digest.update(piece)
            if digest.intdigest() != file.xxh64:
                raise StoreError(f"{self.folder / name}: the checksum does not match; run thimble repack again")

    def _check(self, layers: tuple[int, ...]) -> None:
        config, where = self.config, self.folder / MANIFEST
        if layers != config.moe_layers or any(len(layer) != config.experts for layer in self.layers):
            raise StoreError(f"{where}: its blocks do not match its config; run thimble repack again")
        physical = self.physical_blocks
        if not 1 <= physical <= len(self.layers) * config.experts:
            raise StoreError(f"{where}: {physical} physical blocks; run thimble synth again")
        size = physical * self.layout.block_bytes
        for number, block in enumerate(block for layer in self.layers for block in layer):
            if block.offset != number % physical * self.layout.block_bytes:
                raise StoreError(f"{where}: block {number} has offset {block.offset}; run thimble repack again")
        sizes = [(EXPERTS, size), (DENSE, self.dense_file.size_bytes)]
        sizes += [(VISION, self.vision_file.size_bytes)] if self.vision_file else []
        sizes += [(DRAFT, self.draft_file.file.size_bytes)] if self.draft_file else []
        for name, wanted in sizes:
            path = self.folder / name
            found = path.stat().st_size if path.exists() else None
            if found != wanted:
                state = "missing" if found is None else f"truncated or replaced: {found} of {wanted} bytes"
                raise StoreError(f"{path}: {state}; run thimble repack again")
        if self.fingerprint != fingerprint(config, self.blocks, self.dense_file, self.vision_file):
            raise StoreError(f"{where}: the fingerprint does not match its content; run thimble repack again")


def manifest_bytes(
    config: ModelConfig,
    blocks: list[list[Block]],
    dense: DenseFile,
    source: dict[str, Any],
    vision: VisionFile | None = None,
    draft: DraftFile | None = None,
) -> bytes:
    """The content of manifest.json for a finished store."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint(config, blocks, dense, vision),
            "source": source,
            "config": config.to_json(),
            "dense": _file_record(dense),
            **({"vision": _vision_record(vision)} if vision else {}),
            **({"mtp": _draft_record(draft)} if draft else {}),
            "layers": [
                {"layer": layer, "blocks": [block_record(block) for block in layer_blocks]}
                for layer, layer_blocks in zip(config.moe_layers, blocks, strict=True)
            ],
        },
        separators=(",", ":"),
    ).encode()


def block_record(block: Block) -> dict[str, Any]:
    """A block as JSON. Floats keep every bit: a float32 is exact as a double, and JSON writes those exactly."""
    return {
        "offset": block.offset,
        "xxh64": f"{block.xxh64:016x}",
        "up_scale": block.up_scale,
        "down_scale": block.down_scale,
    }


def parse_block(record: dict[str, Any]) -> Block:
    """The inverse of `block_record`. Raises ValueError or OverflowError on scales that the arithmetic does not take."""
    scales = (float(record["up_scale"]), float(record["down_scale"]))
    tiny = float(np.finfo(np.float32).tiny)
    if any(not tiny <= scale < np.inf or float(np.float32(scale)) != scale for scale in scales):
        raise ValueError(f"scales {scales}: expected positive normal float32 numbers")
    return Block(int(record["offset"]), int(record["xxh64"], 16), *scales)


def fingerprint(config: ModelConfig, blocks: Any, dense: DenseFile, vision: VisionFile | None = None) -> str:
    """Names the model: 32 hex digits over config, every block's checksum and scales, and the other files' checksums."""
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
    for layer in blocks:
        for block in layer:
            digest.update(json.dumps(block_record(block), sort_keys=True).encode())
    digest.update(f"{dense.size_bytes} {dense.xxh64:016x}".encode())
    if vision is not None:
        digest.update(json.dumps(_vision_record(vision), sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _vision_record(vision: VisionFile) -> dict[str, Any]:
    return {"size_bytes": vision.size_bytes, "xxh64": f"{vision.xxh64:016x}", "config": vision.config.to_json()}


def _draft_record(draft: DraftFile) -> dict[str, Any]:
    return {**_file_record(draft.file), "blocks": list(map(block_record, draft.blocks))}


def _draft_file(record: dict[str, Any]) -> DraftFile:
    return DraftFile(_dense_file(record), tuple(map(parse_block, record["blocks"])))


def _file_record(file: DenseFile) -> dict[str, Any]:
    return {"size_bytes": file.size_bytes, "xxh64": f"{file.xxh64:016x}"}


def _dense_file(record: dict[str, Any]) -> DenseFile:
    return DenseFile(int(record["size_bytes"]), int(record["xxh64"], 16))


def _vision_file(record: dict[str, Any]) -> VisionFile:
    config = VisionConfig.from_json(record["config"])
    return VisionFile(int(record["size_bytes"]), int(record["xxh64"], 16), config)


def check_scale_codes(layout: BlockLayout, block: Bytes, where: str) -> None:
    """Raise StoreError if a block scale is negative or NaN: the expert arithmetic takes them as unsigned integers."""
    for name, begin, end in (
        ("up", layout.up_scales, layout.down_values),
        ("down", layout.down_scales, layout.used_bytes),
    ):
        bad = np.flatnonzero(block[begin:end] >= 0x7F)
        if len(bad):
            code = int(block[begin + bad[0]])
            raise StoreError(f"{where}: {name} scale {bad[0]} has the E4M3 code 0x{code:02x}, negative or NaN")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        what = "its repack was not finished" if (folder / JOURNAL).exists() else "there is no store"
        raise StoreError(f"{path}: not found, {what}; run thimble repack CHECKPOINT {folder}")
    try:
        manifest = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; run thimble repack again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{path}: not the manifest of a Thimble store; run thimble repack")
    if manifest.get("version") != VERSION:
        raise StoreError(
            f"{path}: store version {manifest.get('version')!r}, this build reads {VERSION}; run thimble repack again"
        )
    return manifest
