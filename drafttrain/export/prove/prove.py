"""Prove one export: the very draft that the bundled engine measures, in a real server."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch

from drafttrain.drafters.saving import find_draft, load_draft
from drafttrain.errors import CheckpointError
from drafttrain.export.ir import DraftIR, ExportError, read_ir
from drafttrain.export.prove.bundled import BundledRun, room, run_bundled
from drafttrain.export.prove.compare import Proof, compare
from drafttrain.export.prove.environment import ServerEnvironment, vllm_environment
from drafttrain.export.prove.server import PLAIN, ServerError, ServerRun, run_vllm, vllm_options
from drafttrain.export.speculators import SPECULATORS
from drafttrain.export.target_head import target_of, with_target_head
from drafttrain.export.verify import CONFIG, verify_export
from drafttrain.export.vllm import METHODS, VLLM
from drafttrain.files import read_json
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import checkpoint

_DRAFT = "draft"
_ROWS = 8


def prove_export(
    ir: DraftIR,
    export: str | Path,
    run: str | Path,
    target: CausalLM,
    target_folder: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    stop_ids: Set[int] = frozenset(),
    environment: ServerEnvironment | None = None,
) -> Proof:
    """Replay prompts greedily in vLLM with and without the draft, and in the bundled engine, and compare.

    Args:
        ir: of `check_export`.
        export: a folder that was exported for vLLM.
        run: the run, or the saved draft, that it was exported from.
        target: what the draft was trained for; its dtype is the server's, too.
        target_folder: the checkpoint that it was loaded from.
        prompts: token ids.
        k: draft tokens a round.
        max_new_tokens: of each output.
        stop_ids: tokens that end an output.
        environment: of the server; default: the cached one, made when it is missing.

    Raises:
        ServerError: the server refuses target or draft.
    """
    bundled = bundled_run(ir, run, target, prompts, k=k, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    environment = environment or vllm_environment()
    runs = {PLAIN: None, _DRAFT: speculative_config(ir, export, k)}
    found = server_runs(
        environment, target, target_folder, prompts, runs, k=k, max_new_tokens=max_new_tokens, stop_ids=stop_ids
    )
    done = {}
    for name, result in found.items():
        if isinstance(result, ServerError):
            raise result
        done[name] = result
    setting = {
        "engine": "vllm",
        "versions": {**environment.versions, "drafttrain torch": torch.__version__},
        "family": ir.family,
        "dtype": _name(target.dtype),
        "export_dtype": _name(ir.dtype),
        "k": k,
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "seconds": {name: {"load": r.load_s, "generate": r.generate_s} for name, r in done.items()},
    }
    return compare(done[PLAIN], done[_DRAFT], bundled, setting)


def find_run(export: str | Path, given: str | Path | None = None) -> Path:
    """What an export was made from: as given, or the run in whose `export/<engine>` it lies.

    Raises:
        CheckpointError: nothing saved there.
    """
    run = Path(given) if given is not None else Path(export).resolve().parent.parent
    try:
        find_draft(run)
    except CheckpointError as error:
        if given is not None:
            raise
        raise CheckpointError(
            f"not known which run this was exported from: {error.what} in {run}",
            where=export,
            remedy="name the run, or the saved draft, with --run",
        ) from None
    return run


def server_target(config: TargetConfig) -> Path | str:
    """The checkpoint that a server loads: a folder, or a name that its hub cache knows.

    Raises:
        ExportError: a GGUF file, which the proof does not serve.
    """
    found = checkpoint(config)
    if found is None:
        raise ExportError(
            "a GGUF target cannot be proven", where=config.model, remedy="give its checkpoint with --target"
        )
    return found


def check_export(export: str | Path, run: str | Path, target: TargetConfig | None = None) -> DraftIR:
    """The draft in the export's dtype, after the export was found to hold it bit by bit.

    Args:
        target: what the run's recipe says; default: the one that the draft names.

    Raises:
        ExportError: no export that vLLM loads, or one of another draft.
    """
    folder = Path(export)
    if not (folder / CONFIG).is_file():
        raise ExportError("holds no export", where=folder, remedy="make it with `drafttrain export RUN --to vllm`")
    config = read_json(folder / CONFIG)
    dtype = getattr(torch, str(config.get("dtype")), None)
    ir = read_ir(run, dtype if isinstance(dtype, torch.dtype) else None)
    ir = with_target_head(ir, target or target_of(ir))
    speculators = config.get("speculators_config")
    try:
        if speculators is None:
            layout = VLLM.layout(ir)
        else:
            # How it is served is the folder's own to say; the rest must be this draft's.
            layout = SPECULATORS.layout(ir)
            layout.config["speculators_config"] = speculators
        verify_export(folder, ir, layout)
    except ExportError as error:
        raise ExportError(
            f"is not what {find_draft(run)} exports to now: {error.what}",
            where=folder,
            remedy="export that draft again, or name the one that this was made from with --run",
        ) from None
    return ir


def speculative_config(ir: DraftIR, export: str | Path, k: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for an export."""
    return {"method": METHODS[ir.family], "model": str(Path(export).resolve()), "num_speculative_tokens": k}


def bundled_run(
    ir: DraftIR,
    run: str | Path,
    target: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    stop_ids: Set[int] = frozenset(),
) -> BundledRun:
    """The bundled engine with the run's draft, its weights rounded as those of the export are."""
    drafter, _ = load_draft(find_draft(run), target.device, ir.dtype)
    drafter = drafter.to(target.dtype)
    drafter.bind(target.embedding_weight, target.head())
    return run_bundled(target, drafter, prompts, k=k, max_new_tokens=max_new_tokens, rows=_ROWS, stop_ids=stop_ids)


def server_runs(
    environment: ServerEnvironment,
    target: CausalLM,
    target_folder: str | Path,
    prompts: Sequence[Sequence[int]],
    runs: dict[str, dict[str, Any] | None],
    *,
    k: int,
    max_new_tokens: int,
    stop_ids: Set[int] = frozenset(),
) -> dict[str, ServerRun | ServerError]:
    """The runs in a server whose context has room for the rounds at the end."""
    length = max(map(len, prompts)) + max_new_tokens + room(k)
    options = vllm_options(target_folder, _name(target.dtype), length, _ROWS)
    return run_vllm(environment, options, prompts, max_new_tokens, runs, stop_ids)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
