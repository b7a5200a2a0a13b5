"""The draft that an engine makes of a folder, silent defaults and silent losses included.

An importer asks what was meant and refuses what is unclear; this asks what will run. As of vLLM 0.32,
and where the others differ, SGLang 0.5.23 and TensorRT-LLM 1.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.arch import DraftArch
from drafttrain.drafters.base import Drafter
from drafttrain.errors import CheckpointError, UserError
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.layer_ids import inputs_read
from drafttrain.export.doctor.rules.config import architecture, model_type, no_family, quantised_draft
from drafttrain.export.doctor.rules.rotary import styles
from drafttrain.export.doctor.rules.taps import norm_before_fc
from drafttrain.export.doctor.shapes import HARMLESS, expected_shapes, medusa_counts
from drafttrain.export.ir import DraftIR, Norms
from drafttrain.export.rebuild import check_ir, drafter_of
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap


class Unserved(UserError):
    """An engine would not run this folder, or fill a part of it with chance."""


@dataclass(frozen=True)
class Served:
    """A draft as it runs. `embedding`: its own [V, H], or None for the target's."""

    ir: DraftIR
    embedding: Tensor | None = None

    def drafter(self, target: CausalLM) -> Drafter:
        """In the target's dtype and device, bound to it."""
        drafter = drafter_of(self.ir, target.device, target.dtype)
        embedding = target.embedding_weight
        if self.embedding is not None:
            embedding = self.embedding.to(target.device, target.dtype)
        drafter.bind(embedding, target.head())
        return drafter


def as_served(case: Case, target: CausalLM, depth: int) -> Served:
    """What the engine runs.

    Args:
        target: that it drafts for.
        depth: draft tokens a round.

    Raises:
        Unserved: why nothing sensible would run.
    """
    for fatal in (no_family, architecture, model_type, quantised_draft):
        for finding in fatal(case):
            raise Unserved(finding.what)
    try:
        served = _BUILD[str(case.draft.family)](case, target, depth)
        check_ir(served.ir, case.draft.folder)
        served.drafter(target)
    except KeyError as error:
        raise Unserved(f"config.json has no {error}") from None
    except CheckpointError as error:
        raise Unserved(error.what) from None
    except (ValueError, TypeError, RuntimeError) as error:
        raise Unserved(str(error).strip().splitlines()[0]) from None
    return served


def _eagle3(case: Case, target: CausalLM, depth: int) -> Served:
    draft, flat = case.draft, case.draft.flat
    _need(flat.get("hidden_act", "silu") in ("silu", "swish"), f"hidden_act {flat.get('hidden_act')}")
    arch = _arch(case, target)
    taps = _taps(case, target.n_layers)
    _need(case.taps_in_fc == len(taps), f"fc reads {case.taps_in_fc} states, the engine hands over {len(taps)}")
    tensors = _known(case, optional=("lm_head.weight",))
    rows = case.rows
    if rows is None:
        said = draft.number("draft_vocab_size") or target.vocab_size
        _need(said == target.vocab_size, "there is no lm_head, and the target's has other rows")
        tensors["lm_head.weight"] = target.head().weight.detach().cpu()
        rows = said
    said = draft.number("draft_vocab_size") or draft.number("vocab_size") or target.vocab_size
    _need(said == rows, f"the config has room for {said} rows of lm_head, {rows} are stored")
    norms = Norms(
        before_fc=norm_before_fc(case),
        per_tap=bool(flat.get("fc_norm")),
        output=bool(flat.get("norm_output")),
        # The others' residual is the raw state, whatever is written.
        before_residual=case.engine == "vllm" and bool(flat.get("norm_before_residual")),
    )
    width = arch.target_hidden_size
    if norms.before_fc:
        tensors.setdefault("input_norm.weight", torch.ones(len(taps) * width))
    if norms.per_tap:
        for index in range(len(taps)):
            tensors.setdefault(f"fc_norm.{index}.weight", torch.ones(width))
    ir = _ir(case, tensors, arch, depth, taps=taps, vocab_map=_vocab_map(case, rows, target.vocab_size), norms=norms)
    return Served(ir, draft.tensor("embed_tokens.weight") if "embed_tokens.weight" in draft.tensors else None)


def _eagle1(case: Case, target: CausalLM, depth: int) -> Served:
    draft = case.draft
    _need("lm_head.weight" not in draft.tensors, "lm_head.weight is stored, and the engine has no place for it")
    tensors = _known(case)
    tensors.pop("fc.bias", None)  # vLLM drops it
    bias = False
    if case.engine == "sglang" and "fc.bias" in draft.tensors:
        tensors["fc.bias"], bias = draft.tensor("fc.bias"), True
    ir = _ir(case, tensors, _arch(case, target), depth, taps=(Tap.final,), bias=bias)
    return Served(ir, draft.tensor("embed_tokens.weight") if "embed_tokens.weight" in draft.tensors else None)


def _medusa(case: Case, target: CausalLM, depth: int) -> Served:
    draft = case.draft
    heads, layers = draft.number("num_heads") or 5, draft.number("num_hidden_layers") or 1
    stored = medusa_counts(case)
    _need((heads, layers) == stored, f"{stored[0]} heads of {stored[1]} layers are stored, not {heads} of {layers}")
    _need("token_map" not in draft.tensors, "a token map")
    bias = bool(draft.flat.get("medusa_fc_bias"))
    tensors = {
        name: draft.tensor(name)
        for name in draft.tensors
        if name.startswith(("blocks.", "lm_heads.")) and (bias or not name.endswith(".bias"))
    }
    if draft.flat.get("original_lm_head"):
        shared = draft.tensor("lm_heads.0.weight")
        tensors |= {f"lm_heads.{index}.weight": shared for index in range(heads)}
    arch = DraftArch.from_target(target.config)
    return Served(_ir(case, tensors, arch, min(depth, heads), taps=(Tap.final,), layers=layers, heads=heads, bias=bias))


def _lm(case: Case, target: CausalLM, depth: int) -> Served:
    tensors = {name: case.draft.tensor(name) for name in case.draft.tensors}
    config = {key: value for key, value in case.draft.config.items() if key not in ("architectures", "auto_map")}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    ir = _ir(case, tensors, None, 1, layers=int(config["num_hidden_layers"]), lm_config=config)
    return Served(ir)


_BUILD = {"eagle3": _eagle3, "eagle1": _eagle1, "medusa": _medusa, "draft_lm": _lm}


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unserved(otherwise)


def _ir(case: Case, tensors: dict[str, Tensor], arch: DraftArch | None, depth: int, **more: Any) -> DraftIR:
    values: dict[str, Any] = {
        "taps": (),
        "vocab_map": VocabMap.full(case.facts.vocab_size),
        "layers": max(len(case.layer_prefixes()), 1),
        "heads": 1,
        "norms": Norms(),
        "lm_config": None,
        **more,
    }
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    return DraftIR(str(case.draft.family), floats, arch=arch, depth=depth, target={}, **values)


def _arch(case: Case, target: CausalLM) -> DraftArch:
    """From the draft's own config, with transformers' defaults."""
    flat, draft = case.draft.flat, case.draft
    hidden, heads = int(flat["hidden_size"]), int(flat["num_attention_heads"])
    stored, said = len(case.layer_prefixes()), draft.number("num_hidden_layers")
    _need(said is None or said == stored, f"{stored} decoder layers are stored, {said} would be built")
    size = draft.number("vocab_size")
    _need(size in (None, target.vocab_size), f"vocab_size {size}, the target has {target.vocab_size} tokens")
    rope = dict(case.rope) if any(styles(flat)) else {"rope_type": "default", "rope_theta": 10000.0}
    return DraftArch(
        hidden_size=hidden,
        intermediate_size=int(flat["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=draft.number("num_key_value_heads") or heads,
        head_dim=draft.number("head_dim") or hidden // heads,
        rms_norm_eps=float(flat.get("rms_norm_eps") or 1e-6),
        max_position_embeddings=draft.number("max_position_embeddings") or 2048,
        rope_parameters=rope,
        target_hidden_size=draft.number("target_hidden_size") or target.hidden_size,
        target_layers=target.n_layers,
        vocab_size=target.vocab_size,
    )


def _taps(case: Case, n_layers: int) -> tuple[Tap, ...]:
    """In the order in which the target computes them, which is the engine's."""
    ids = inputs_read(case)
    _need(all(0 <= i <= n_layers for i in ids) and len(set(ids)) == len(ids), f"layer ids {ids}")
    return tuple(Tap.pre_norm if i == n_layers else Tap.block(i) for i in sorted(ids))


def _known(case: Case, optional: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors that the engine has a place for; missing norms become ones, as they do there."""
    draft, shapes = case.draft, expected_shapes(case)
    _need(shapes is not None, "its config does not say the sizes")
    assert shapes is not None
    extra = [
        name
        for name in draft.tensors
        if name not in shapes and name not in HARMLESS and not name.endswith("inv_freq") and name not in optional
    ]
    extra = [name for name in extra if not (draft.family == "eagle1" and name == "fc.bias")]
    _need(not extra, f"the engine has no place for {', '.join(extra[:3])}")
    found = {}
    for name, shape in shapes.items():
        if name in ("d2t", "t2d"):
            continue
        if name in draft.tensors:
            found[name] = draft.tensor(name)
        elif "norm" in name:
            found[name] = torch.ones(shape)
        elif name not in optional:
            raise Unserved(f"{name} is missing: it stays as memory happens to be")
    return found


def _vocab_map(case: Case, rows: int, vocab_size: int) -> VocabMap:
    """d2t as it is added up; without one the first ids."""
    if rows == vocab_size:
        _need(case.d2t is None or case.engine != "vllm", "a vocabulary map is stored with a full vocabulary")
        return VocabMap.full(vocab_size)
    ids = torch.arange(rows) if case.d2t is None else case.d2t + torch.arange(case.d2t.numel())
    _need(ids.numel() == rows, f"d2t has {ids.numel()} entries for {rows} rows")
    inside = int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    _need(inside, "d2t maps rows outside the target's vocabulary")
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return VocabMap(ids - torch.arange(rows), mask)
