"""Fetch a draft that drafttrain pushed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from drafttrain.errors import UserError
from drafttrain.export.hub.errors import explained
from drafttrain.export.hub.push import ENDPOINT, TOKEN
from drafttrain.export.sidecar import SIDECAR, read_sidecar
from drafttrain.files import atomic_folder

# Nothing that could be code or a pickle.
_FETCHED = ["*.safetensors", "*.gguf", "*.json", "*.md", "*.yaml", "*.yml", "*.txt", "*.jinja", "*.model"]


def pull(repo: str, out: str | Path, revision: str | None = None) -> Path:
    """Fetch a repository's draft into a new folder, whole or not at all.

    Args:
        repo: "owner/name".
        out: must not exist.
        revision: branch, tag or commit; default: the main branch.

    Raises:
        UserError: the folder exists, no such repository, or one that drafttrain did not make.
    """
    final = Path(out)
    if final.exists():
        raise UserError("already exists", where=final, remedy="give another --out, or remove this folder")
    # Without one of the environment none at all: not the one that a login left on the disk.
    token: str | bool = os.environ.get(TOKEN) or False
    with atomic_folder(final) as partial:
        with explained(repo):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=os.environ.get(ENDPOINT), token=token, library_name="drafttrain")
            files = api.list_repo_files(repo, revision=revision)
            if SIDECAR not in files:
                raise UserError(
                    f"holds no {SIDECAR}: drafttrain did not make it",
                    where=repo,
                    remedy="fetch it with any client and take it in: `drafttrain import FOLDER --target MODEL -o RUN`",
                )
            api.snapshot_download(repo, revision=revision, local_dir=partial, allow_patterns=_FETCHED)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        if read_sidecar(partial) is None:
            raise UserError(
                f"its {SIDECAR} is of another version of drafttrain",
                where=repo,
                remedy="use that version, or take the draft in with `drafttrain import`",
            )
    return final
