"""What a checkpoint's config says about its formats, held against the tensors that are there. Decides no format.

ModelOpt describes the formats twice, in `hf_quant_config.json` and in config.json's `quantization_config`. Either is
enough, both must agree with the tensors. A description is one algorithm for every linear that is not excluded, or
MIXED_PRECISION with an algorithm for each module that is listed; a module that is not listed is not quantised. Names
may hold wildcards, and a module stands for all below it: `…mixer.experts` for every expert.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.errors import CheckpointError
from services.engine.names import canonical
from services.engine.parsing import parse_json

FILE = "hf_quant_config.json"
KEY = "quantization_config"
MIXED = "MIXED_PRECISION"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8")
FLOAT = "unquantised"


@dataclass(frozen=True)
class Description:
    """`layers`: algorithm by module pattern; empty when `algorithm` holds for all that is not in `excluded`."""

    where: str
    algorithm: str | None
    excluded: tuple[str, ...]
    layers: Mapping[str, str]

    def expected(self, linears: Iterable[str], modules: Mapping[str, list[str]] | None = None) -> dict[str, str]:
        """The algorithm (or FLOAT) of each linear. Raises CheckpointError on names that are no linear of the model.

        `modules`: the linears below each, where `_ancestors` has been asked for them already.
        """
        names = list(linears)
        said = dict.fromkeys(names, FLOAT)
        if self.algorithm not in (None, MIXED):
            said = dict.fromkeys(names, self._known(self.algorithm, "quant_algo"))
        modules = _ancestors(names) if modules is None else modules
        # Shorter names first, so that what is said of one expert wins over what is said of all.
        for pattern, algorithm in sorted(self.layers.items(), key=lambda item: item[0].count(".")):
            covered = _covered(pattern, modules)
            if not covered:
                if canonical(pattern)[0] == "language" and not _is_pattern(pattern):
                    raise CheckpointError(
                        f"{self.where}: lists {pattern} as {algorithm}, expected a linear of this model, found none"
                    )
                continue
            said |= dict.fromkeys(covered, self._known(algorithm, pattern))
        for pattern in self.excluded:
            for name in _covered(pattern, modules):
                if self.layers and said[name] != FLOAT:
                    raise CheckpointError(f"{self.where}: {name} is both listed as {said[name]} and excluded")
                said[name] = FLOAT
        return said

    def _known(self, algorithm: str | None, module: str) -> str:
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                f"{self.where}: {module} is {algorithm!r}; this engine reads {', '.join(ALGORITHMS)} and plain floats"
            )
        return algorithm


def descriptions(folder: Path, config: Mapping[str, Any]) -> list[Description]:
    """What is said in config.json (its content) and in FILE, if anything. Raises CheckpointError if it is damaged."""
    found = []
    path = folder / FILE
    if path.exists():
        try:
            found.append(_parse(FILE, parse_json(path.read_text(encoding="utf-8"))["quantization"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error!r}; fetch the file again") from error
    said = config.get(KEY) or (config.get("llm_config") or config.get("text_config") or {}).get(KEY)
    if said:
        method = said.get("quant_method", "modelopt") if isinstance(said, dict) else said
        if method != "modelopt":
            raise CheckpointError(f"config: {KEY} has quant_method {method!r}; this engine reads ModelOpt's exports")
        found.append(_parse(f"config: {KEY}", said))
    return found


def check(described: Iterable[Description], formats: Mapping[str, str]) -> None:
    """Raise CheckpointError for the first linear whose tensors are not what a description says of it."""
    modules = _ancestors(formats)
    for description in described:
        for name, expected in description.expected(formats, modules).items():
            found = formats[name] if formats[name] in ALGORITHMS else FLOAT
            if found != expected:
                raise CheckpointError(
                    f"tensor {name}.weight: {description.where} says {expected}, expected its tensors, "
                    f"found {_tensors(formats[name])}"
                )


def _tensors(form: str) -> str:
    match form:
        case "NVFP4":
            return "NVFP4 (U8 weight with input_scale)"
        case "W4A16_NVFP4":
            return "W4A16_NVFP4 (U8 weight without input_scale)"
        case "FP8":
            return "FP8 (F8_E4M3 weight)"
    return form


def _parse(where: str, said: Mapping[str, Any]) -> Description:
    try:
        layers = {str(name): str(entry["quant_algo"]) for name, entry in (said.get("quantized_layers") or {}).items()}
        excluded = said.get("exclude_modules") or said.get("ignore") or []
        algorithm = said.get("quant_algo")
        if not layers and algorithm in (None, MIXED):
            layers = _from_groups(said.get("config_groups") or {})
        modules = tuple(map(str, excluded))
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: damaged or of an unknown form: {error!r}") from error
    if algorithm == MIXED and not layers:
        raise CheckpointError(f"{where}: is {MIXED} but lists no layers, expected quantized_layers or config_groups")
    return Description(where, algorithm, modules, layers)


def _from_groups(groups: Mapping[str, Any]) -> dict[str, str]:
    """`config_groups`: targets by what their weights and inputs are; `Linear` as a target means every one."""
    layers: dict[str, str] = {}
    for group in groups.values():
        bits = group["weights"]["num_bits"]
        algorithm = {8: "FP8", 4: "NVFP4" if group.get("input_activations") else "W4A16_NVFP4"}.get(
            bits, f"{bits} bits"
        )
        layers |= {("*" if target == "Linear" else target): algorithm for target in group["targets"]}
    return layers


def _is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def _ancestors(linears: Iterable[str]) -> dict[str, list[str]]:
    """The linears at or below every module, by the module's name; with and without the experts' index."""
    below: dict[str, list[str]] = {}
    for linear in linears:
        for name in {linear, re.sub(r"\.experts\.\d+\.", ".experts.", linear)}:
            words = name.split(".")
            for end in range(1, len(words) + 1):
                below.setdefault(".".join(words[:end]), []).append(linear)
    return below


def _covered(pattern: str, modules: Mapping[str, list[str]]) -> list[str]:
    _, name = canonical(pattern)
    if not _is_pattern(name):
        return modules.get(name, [])
    # A wildcard may stand where a prefix was: it is tried against the names with every prefix as well.
    matcher = re.compile(fnmatch.translate(name)).match
    spelt = ("", "backbone.", "model.", "language_model.backbone.")
    return [
        linear
        for module, linears in modules.items()
        if any(matcher(prefix + module) for prefix in spelt)
        for linear in linears
    ]
