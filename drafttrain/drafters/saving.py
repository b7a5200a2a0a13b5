"""A trained draft on disk: a folder with `model.safetensors` and `draft.json`. Nothing here unpickles.

`draft.json` holds the family's config, the resolved sizes and the identity of the target, so that a draft
loads without its recipe and a foreign target is refused by what it is, not by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.config import Eagle3Config, EagleConfig
from drafttrain.drafters.registry import DrafterConfig, drafter_class
from drafttrain.errors import CheckpointError
from drafttrain.files import atomic_folder, read_json, settled, sha256_file, write_json
from drafttrain.modeling.vocab_map import VocabMap

WEIGHTS, META, FORMAT = "model.safetensors", "draft.json", 1
_CONFIG: TypeAdapter[Any] = TypeAdapter(DrafterConfig)
_PIECE = 1 << 20  # elements
# A draft reads these of its target; a target that differs in one of them cannot be served by it.
_VOCABULARY = ("tokenizer_hash", "vocab_size")
_SHAPE = ("hidden_size", "n_layers")
# Keys of configs that say what a draft computes.
_SIZES = frozenset({"hidden_size", "intermediate_size", "num_heads", "num_kv_heads"})
_COMPUTED = _SIZES | {
    "taps",
    "draft_vocab_size",
    "num_layers",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
    "fc_bias",
    "head",
    "bias",
}


@dataclass(frozen=True)
class DraftMeta:
    """What `draft.json` says.

    Attributes:
        config: of the family.
        arch: the resolved sizes, of the form that the family's `saved_arch` gives.
        vocab_size: V of the target.
        target: identity of the target in JSON form; compared by `check_target`.
        provenance: whatever the run adds (recipe, versions, step).
    """

    config: Any
    arch: dict[str, Any]
    vocab_size: int
    target: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Name in the registry."""
        family: str = self.config.family
        return family


def save_draft(
    folder: str | Path,
    drafter: Drafter,
    *,
    target: Mapping[str, Any],
    state: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    provenance: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> None:
    """Write a draft, whole or not at all.

    Args:
        folder: is created; must not exist unless `replace`.
        target: identity of the target, in JSON form.
        state: the gathered state dict where the parameters are sharded; default: the drafter's own.
        dtype: of the floating-point weights on disk; default: as they are.
        replace: swap with what is there.

    Raises:
        CheckpointError: the state lacks tensors, has others or of other shapes (as shards have), or holds
            NaN.
    """
    tensors = drafter.saved_names(dict(drafter.state_dict() if state is None else state))
    _, tied = _expected(drafter)
    tensors = {name: _ready(tensor, dtype) for name, tensor in tensors.items() if name not in tied}
    check_state(drafter, tensors, where=folder)
    meta = {
        "format": FORMAT,
        "family": drafter.family,
        "config": drafter.config.model_dump(mode="json"),
        "arch": drafter.saved_arch(),
        "vocab_size": drafter.vocab_map.vocab_size,
        "draft_vocab_size": drafter.vocab_map.size,
        "tie_word_embeddings": bool(tied),
        "target": dict(target),
        "provenance": dict(provenance or {}),
    }
    try:
        with atomic_folder(folder, replace) as partial:
            save_file(tensors, partial / WEIGHTS, metadata={"format": "pt", "family": drafter.family})
            write_json(partial / META, meta)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot be written: {error}",
            where=folder,
            remedy="free some space and run the same command again: the draft before is whole",
        ) from error


def _ready(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().to("cpu")
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def _expected(drafter: Drafter) -> tuple[dict[str, torch.Size], set[str]]:
    """Names and full shapes of what is stored, and second names of tied weights, which are not.

    A twin on the meta device is asked, which shards or wrappers cannot mislead.
    """
    twin = type(drafter).from_saved(drafter.config, drafter.saved_arch(), drafter.vocab_map, "meta")
    shapes, tied, seen = {}, set(), set()
    for name, tensor in twin.saved_names(twin.state_dict(keep_vars=True)).items():
        if id(tensor) in seen:
            tied.add(name)
        else:
            shapes[name] = tensor.shape
        seen.add(id(tensor))
    return shapes, tied


def check_state(drafter: Drafter, tensors: Mapping[str, Tensor], where: str | Path | None = None) -> None:
    """Assert that stored names and shapes are exactly the family's, and the values finite.

    Raises:
        CheckpointError: naming the differences.
    """
    expected, _ = _expected(drafter)
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise CheckpointError(f"tensors missing: {missing or 'none'}, unknown: {extra or 'none'}", where=where)
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(shape)}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(
            f"tensors of the wrong shape: {'; '.join(wrong)}",
            where=where,
            remedy="sharded parameters must be gathered before they are saved",
        )
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not _is_finite(tensor)]
    if broken:
        raise CheckpointError(f"NaN or Inf in {', '.join(broken)}", where=where, remedy="lower the learning rate")


def _is_finite(tensor: Tensor) -> bool:
    """In pieces: masks of a whole head would take as much memory again as the draft."""
    return all(bool(piece.isfinite().all()) for piece in tensor.flatten().split(_PIECE))


def read_meta(folder: str | Path) -> DraftMeta:
    """Read `draft.json`.

    Raises:
        CheckpointError: no saved draft, or one of another version.
    """
    path = settled(folder) / META
    if not path.exists():
        raise CheckpointError(
            f"no draft is saved here: there is no {META}",
            where=folder,
            remedy="give the folder of a finished run, or its draft folder",
        )
    raw = read_json(path)
    try:
        if raw["format"] != FORMAT:
            raise CheckpointError(f"format {raw['format']} is not known, only {FORMAT}", where=path)
        config = _CONFIG.validate_python(raw["config"])
        return DraftMeta(config, raw["arch"], raw["vocab_size"], raw["target"], raw["provenance"])
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"not a valid draft description: {error}", where=path) from None


def find_draft(run: str | Path) -> Path:
    """Where a run keeps its draft: the folder itself if it is a saved draft, the best by tau, or the last.

    Raises:
        CheckpointError: there is none.
    """
    places = (Path(run), Path(run) / "best", Path(run) / "draft")
    found = next((place for place in places if (settled(place) / META).exists()), None)
    if found is not None:
        return found
    raise CheckpointError(
        "no draft is saved here" if Path(run).exists() else "no such folder, so no draft is saved here",
        where=run,
        remedy="give the folder of a finished run, or its draft folder",
    )


def read_draft(folder: str | Path) -> tuple[Drafter, DraftMeta, dict[str, Tensor]]:
    """A saved draft as it lies on disk, for tools that do not run it.

    Returns:
        (the draft without memory, on the meta device; its description; its tensors under their stored names,
        on the CPU in the stored dtype, names, shapes and values checked).

    Raises:
        CheckpointError: missing, truncated or foreign files.
    """
    meta, tensors = read_meta(folder), _read_tensors(folder)
    twin = _built(meta, _map_of(tensors, meta, folder), "meta", folder)
    check_state(twin, tensors, folder)
    return twin, meta, tensors


def load_draft(
    folder: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Drafter, DraftMeta]:
    """Load a draft in eval mode. It still has to be bound to its target.

    Args:
        dtype: of the weights; default: as stored.

    Raises:
        CheckpointError: missing, truncated or foreign files.
    """
    meta, tensors = read_meta(folder), _read_tensors(folder)
    drafter = _built(meta, _map_of(tensors, meta, folder), device, folder)
    _fill(drafter, tensors, folder)
    stored = next(t.dtype for t in tensors.values() if t.is_floating_point())
    return drafter.to(dtype or stored).eval(), meta


def _built(meta: DraftMeta, vocab_map: VocabMap, device: torch.device | str | None, where: str | Path) -> Drafter:
    try:
        return drafter_class(meta.family).from_saved(meta.config, meta.arch, vocab_map, device)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(("arch", *map(str, first["loc"])))
        raise CheckpointError(
            f"not a valid draft description: {place}: {first['msg']}", where=Path(where) / META
        ) from None


def weights_sha256(folder: str | Path) -> str:
    """Of a saved draft: which one a result is of."""
    return sha256_file(settled(folder) / WEIGHTS)


def _read_tensors(folder: str | Path) -> dict[str, Tensor]:
    path = settled(folder) / WEIGHTS
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"no {WEIGHTS}",
            where=folder,
            remedy="drafts are stored as safetensors; pickled files are not read",
        ) from None
    except SafetensorError as error:
        raise CheckpointError(
            f"damaged or truncated: {error}",
            where=path,
            remedy="copy it again, or run the training command again: it saves the draft anew from the last checkpoint",
        ) from None


def _map_of(tensors: Mapping[str, Tensor], meta: DraftMeta, where: str | Path) -> VocabMap:
    if "d2t" not in tensors:
        return VocabMap.full(meta.vocab_size)
    try:
        found = VocabMap(tensors["d2t"], tensors["t2d"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"bad vocabulary map: {error}", where=where) from None
    if found.vocab_size != meta.vocab_size:
        raise CheckpointError(
            f"the vocabulary map is over {found.vocab_size} tokens, {META} says {meta.vocab_size}", where=where
        )
    return found


def _fill(drafter: Drafter, tensors: dict[str, Tensor], where: str | Path) -> None:
    """Check the tensors, and load them where the draft is not on the meta device."""
    check_state(drafter, tensors, where)
    if not next(drafter.parameters()).is_meta:
        # Tied weights have a second name that is not stored, hence not strict; `check_state` was.
        drafter.load_state_dict(drafter.loaded_names(tensors), strict=False)


def warm_start(
    config: DrafterConfig, folder: str | Path, device: torch.device | str | None = None
) -> tuple[Drafter, DraftMeta]:
    """A draft in fp32 and train mode that goes on from a saved one.

    The saved draft's vocabulary map, sizes and rotary parameters are kept: rows of its head stand for tokens of
    that map, and rotated with another base its keys would mean other positions.

    Args:
        config: of the same family; says how it is trained on, and must not contradict what it was trained as.
        device: "meta" checks all and keeps no weights.

    Raises:
        CheckpointError: no saved draft, another family, or keys of the config that say otherwise, by name.
    """
    meta, tensors = read_meta(folder), _read_tensors(folder)
    if meta.family != config.family:
        raise CheckpointError(
            f"holds a draft of family {meta.family}, the recipe asks for {config.family}", where=folder
        )
    vocab_map = _map_of(tensors, meta, folder)
    # A draft LM has the sizes of its own Hugging Face config, whatever it was made from.
    contradictions = [] if meta.family == "draft_lm" else _contradictions(config, meta, vocab_map)
    if contradictions:
        raise CheckpointError(
            f"the recipe contradicts the draft that it starts from: {'; '.join(contradictions)}",
            where=folder,
            remedy="set these keys of drafter as saved, or leave out warm_start",
        )
    drafter = _built(replace(meta, config=config), vocab_map, device, folder)
    _fill(drafter, tensors, folder)
    return drafter.train(), meta


def frozen_weights(drafter: Drafter) -> str | None:
    """SHA-256 of the parameters that are not trained; None where all are.

    Checkpoints leave them out: what is trained on top of them, such as adapters, means nothing with others.
    """
    frozen = [(name, parameter) for name, parameter in drafter.named_parameters() if not parameter.requires_grad]
    digest = hashlib.sha256()
    for name, parameter in sorted(frozen, key=lambda entry: entry[0]):
        digest.update(name.encode())
        for piece in parameter.detach().flatten().split(_PIECE):
            digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else None


def draft_shape(config: DrafterConfig, folder: str | Path) -> Drafter | None:
    """The draft that would be trained from `warm_start`, without weights, on the meta device; None where none is saved.

    Raises:
        CheckpointError: a description that cannot be read.
    """
    path = settled(folder) / META
    if not path.exists():
        return None
    meta, size = read_meta(folder), read_json(path).get("draft_vocab_size")
    size = size or meta.vocab_size
    if isinstance(config, Eagle3Config) and config.widen_vocab:
        size = max(size, min(config.draft_vocab_size or 0, meta.vocab_size))
    vocab_map = VocabMap.from_ids(range(size), meta.vocab_size)
    return _built(replace(meta, config=config), vocab_map, "meta", folder).train()


def _contradictions(config: DrafterConfig, meta: DraftMeta, vocab_map: VocabMap) -> list[str]:
    """Keys of a config that change what a draft computes and say otherwise than the saved one's."""
    asked, saved = config.model_dump(), meta.config.model_dump()
    if isinstance(config, Eagle3Config):
        layers = meta.arch["target_layers"]
        asked["taps"], saved["taps"] = ([str(tap) for tap in c.taps_for(layers)] for c in (config, meta.config))
        saved["draft_vocab_size"] = vocab_map.size
        if config.widen_vocab and (config.draft_vocab_size or 0) > vocab_map.size:
            asked["draft_vocab_size"] = None
    if isinstance(config, EagleConfig):
        saved |= {size: meta.arch[size] for size in _SIZES if size in saved}
    return [
        f"{key} is {asked[key]}, saved {saved[key]}"
        for key in sorted(_COMPUTED & set(asked))
        # None leaves it open.
        if asked[key] is not None and asked[key] != saved[key]
    ]


def check_target(
    meta: DraftMeta,
    target: Mapping[str, Any],
    *,
    where: str | Path | None = None,
    other_weights: bool = False,
) -> None:
    """Refuse a target that the draft was not made for, by comparing vocabularies and weights, not names.

    Args:
        target: identity of the target to serve, in JSON form.
        other_weights: allow a target of the same shape and vocabulary with other weights, such as a
            fine-tune.

    Raises:
        CheckpointError: naming what differs.
    """
    fields = list(_VOCABULARY)
    if meta.family != "draft_lm":
        fields += _SHAPE if other_weights else (*_SHAPE, "weights_hash")
    differing = [name for name in fields if meta.target.get(name) != target.get(name)]
    if differing:
        raise CheckpointError(
            f"the draft was made for {meta.target.get('name')}, which differs from {target.get('name')} in "
            f"{', '.join(differing)}",
            where=where,
            remedy="use the target that the draft was trained for, or train one for this target",
        )
