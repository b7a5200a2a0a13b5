"""What a run's prompts and answers were made from, so that a folder of other ones is not gone on with."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.readers import files_of
from drafttrain.errors import TargetError, UserError
from drafttrain.files import find_resource, sha256_file, sha256_text
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import weights_fingerprint
from drafttrain.targets.load import weight_files

_FILE, _FOLDER, _WEIGHTS = "sha256", "folder_sha256", "weights"


def origin_of(recipe: Recipe, chat: ChatRenderer) -> dict[str, Any]:
    """Everything that decides the prompts and who answers them; what lies on this disk by content."""
    sources = []
    for source in recipe.data.prompts:
        described = source.model_dump(mode="json")
        path, folder = local_file(source.source), folder_digest(source.source)
        if path is not None:
            described[_FILE] = sha256_file(path)
        if folder is not None:
            described[_FOLDER] = folder
        sources.append(described)
    target = recipe.target.model_dump(mode="json", include={"model", "revision", "gguf_file", "tokenizer"})
    weights = _local_weights(recipe.target)
    return {
        "sources": sources,
        "target": target if weights is None else {**target, _WEIGHTS: weights},
        "template": chat.template_hash,
        "tokenizer": chat.tokenizer_hash,
    }


def same_origin(kept: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether what a run kept comes from what is asked for now, wherever files and target lay then.

    Runs of earlier versions know neither weights nor the content of folders: of those, the places decide.
    """
    by_weights = all(_WEIGHTS in origin["target"] for origin in (kept, now))
    by_folders = any(_FOLDER in source for source in kept["sources"])
    return _without_places(kept, by_weights, by_folders) == _without_places(now, by_weights, by_folders)


def _without_places(origin: dict[str, Any], by_weights: bool, by_folders: bool) -> dict[str, Any]:
    sources = []
    for source in origin["sources"]:
        known = source if by_folders else {key: value for key, value in source.items() if key != _FOLDER}
        # Names stay: prompts may be called by them.
        in_hand = _FILE in known or _FOLDER in known
        sources.append({**known, "source": Path(known["source"]).name} if in_hand else known)
    target = dict(origin["target"])
    weights = target.pop(_WEIGHTS, None)
    # The tokenizer has a hash of its own.
    return {**origin, "sources": sources, "target": weights if by_weights else target}


def _local_weights(config: TargetConfig) -> str | None:
    """Fingerprint of a target that lies on this disk; None of one that is named, or whose weights are elsewhere."""
    with suppress(TargetError, OSError):
        if Path(config.model).expanduser().exists():
            return weights_fingerprint(weight_files(config))
    return None


def local_file(name: str) -> Path | None:
    """The file of prompts or conversations that a recipe names, where it is one of this disk."""
    try:
        path = find_resource(name)
    except UserError:
        return None
    return path if path.is_file() else None


def folder_digest(name: str) -> str | None:
    """SHA-256 over names and contents of what is read of a folder; None of files and of what is not here."""
    try:
        path = find_resource(name)
    except UserError:
        return None
    if not path.is_dir():
        return None
    files = [[file.relative_to(path).as_posix(), sha256_file(file)] for file in files_of(path)]
    return sha256_text(json.dumps(files))
