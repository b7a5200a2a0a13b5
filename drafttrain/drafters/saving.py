"""A trained draft on disk: a folder with `model.safetensors` and `draft.json`. Nothing here unpickles.

`draft.json` holds the family's config, the resolved sizes and the identity of the target, so that a draft
loads without its recipe and a foreign target is refused by what it is, not by its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.registry import DrafterConfig, drafter_class
from drafttrain.errors import CheckpointError
from drafttrain.files import atomic_folder, read_json, write_json
from drafttrain.modeling.vocab_map import VocabMap

WEIGHTS, META, FORMAT = "model.safetensors", "draft.json", 1
_CONFIG: TypeAdapter[Any] = TypeAdapter(DrafterConfig)
# A draft reads these of its target; a target that differs in one of them cannot be served by it.
_VOCABULARY = ("tokenizer_hash", "vocab_size")
_SHAPE = ("hidden_size", "n_layers")


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
    if replace:
        _replace(Path(folder), tensors, meta)
    else:
        _write(Path(folder), tensors, meta)


def _replace(final: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    staging = final.with_name(f".{final.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    _write(staging, tensors, meta)
    if final.exists():
        shutil.rmtree(_aside(final), ignore_errors=True)
        final.rename(_aside(final))
    staging.rename(final)
    shutil.rmtree(_aside(final), ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _settled(folder: str | Path) -> Path:
    """The folder, or the one before it if a kill came between the two renames of a replacement."""
    final = Path(folder)
    return _aside(final) if not final.exists() and _aside(final).exists() else final


def _write(folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    try:
        with atomic_folder(folder) as partial:
            save_file(tensors, partial / WEIGHTS, metadata={"format": "pt", "family": str(meta["family"])})
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
    broken = [n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]
    if broken:
        raise CheckpointError(f"NaN or Inf in {', '.join(broken)}", where=where, remedy="lower the learning rate")


def read_meta(folder: str | Path) -> DraftMeta:
    """Read `draft.json`.

    Raises:
        CheckpointError: no saved draft, or one of another version.
    """
    path = _settled(folder) / META
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
    found = next((place for place in places if (_settled(place) / META).exists()), None)
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


def _read_tensors(folder: str | Path) -> dict[str, Tensor]:
    path = _settled(folder) / WEIGHTS
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
    check_state(drafter, tensors, where)
    # Tied weights have a second name that is not stored, hence not strict; `check_state` was.
    drafter.load_state_dict(drafter.loaded_names(tensors), strict=False)


def saved_vocab_map(folder: str | Path) -> VocabMap:
    """The vocabulary map of a saved draft, which a warm start must keep.

    Raises:
        CheckpointError: no saved draft, or no valid map.
    """
    meta = read_meta(folder)
    path = _settled(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in ("d2t", "t2d") if name in names}
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path) from None
    return _map_of(tensors, meta, folder)


def warm_start(drafter: Drafter, folder: str | Path) -> DraftMeta:
    """Fill a fresh draft with the weights of a saved one of the same family, sizes and vocabulary map.

    Raises:
        CheckpointError: another family, other sizes or another map. Rows of the head stand for tokens of the
            map they
            were trained with: under another map they would silently predict the wrong ones.
    """
    meta = read_meta(folder)
    if meta.family != drafter.family:
        raise CheckpointError(
            f"holds a draft of family {meta.family}, the recipe asks for {drafter.family}", where=folder
        )
    if saved_vocab_map(folder) != drafter.vocab_map:
        raise CheckpointError(
            "the saved draft has another vocabulary map (d2t) than the new one",
            where=folder,
            remedy="start from the saved map (`saved_vocab_map`) or leave out warm_start",
        )
    _fill(drafter, _read_tensors(folder), folder)
    return meta


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
