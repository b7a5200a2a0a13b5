"""Memory of one rank: what is known to the byte, and estimates that say so.

B rows of T tokens, K depths, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.eagle1 import Eagle1Drafter
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.lora import adapters
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.features.sources import taps_with_final
from drafttrain.losses.fused import SLAB, block_logits, chunk_logits
from drafttrain.modeling.head import Head
from drafttrain.recipe.schema import Recipe
from drafttrain.training.ahead import batches_ahead
from drafttrain.training.launch import Launch
from drafttrain.training.plan.activations import kept_bytes, kv_heads_of
from drafttrain.training.plan.layout import Layout
from drafttrain.training.plan.products import head_dim
from drafttrain.training.strategies.base import bucket_elements

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2}
Phase = Literal["always", "features", "training", "updating", "measuring", "saving"]
"""When: all the time, while the target runs, from the draft's forward into its backward, from the end of that to the
optimiser's step, in measurements, while a checkpoint is written. All but the first take turns."""


@dataclass(frozen=True)
class Item:
    """A part of a rank's memory.

    Attributes:
        exact: it follows from parameter counts alone.
        phase: when it is there.
    """

    name: str
    nbytes: int
    exact: bool
    phase: Phase = "always"


def peak(items: Sequence[Item]) -> int:
    """Bytes of what is always there and of the largest of the phases that take turns."""
    sums = dict.fromkeys(get_args(Phase), 0)
    for item in items:
        sums[item.phase] += item.nbytes
    always = sums.pop("always")
    return always + max(sums.values())


def memory_items(
    recipe: Recipe, drafter: Drafter, target: nn.Module, layout: Layout, ranks: int, on_cpu: bool
) -> list[Item]:
    """All parts of one rank's memory; drafter and target may be on the meta device."""
    found = [
        *_target_items(recipe, target, layout, ranks, on_cpu),
        *_draft_items(recipe, drafter, layout.launch, ranks, on_cpu),
        *_batch_items(recipe, drafter, target, layout, on_cpu),
    ]
    return [item for item in found if item.nbytes]


def _target_items(recipe: Recipe, target: Any, layout: Layout, ranks: int, on_cpu: bool) -> Iterator[Item]:
    unit = _BYTES[recipe.target.dtype]
    whole, ends, norms = _sizes(target)
    if layout.placement == "elsewhere":
        yield Item("embedding, head and norm of the target", unit * ends, True)
        return
    if layout.placement == "whole":
        yield Item("target weights", unit * whole, True)
        if on_cpu:
            yield Item("the same laid out for a CPU's kernels", unit * _laid_out(target), True)
        return
    yield Item("target weights, this rank's shard", unit * -(-whole // ranks), True)
    yield Item("embedding, head and norms of the target, whole", unit * (ends + norms), True)
    yield Item("blocks of the target as they are gathered", unit * _block(target), False, "features")


def _sizes(target: Any) -> tuple[int, int, int]:
    """Elements of the target: all, of embedding and head, of norms."""
    whole = sum(p.numel() for p in target.parameters())
    modules = (target.get_input_embeddings(), target.get_output_embeddings())
    ends = {id(module.weight): module.weight.numel() for module in modules if module is not None}
    return whole, sum(ends.values()), sum(p.numel() for p in target.parameters() if p.dim() == 1)


def _laid_out(target: Any) -> int:
    """Elements of the linear layers, of which `prepare_for_inference` makes a copy on a CPU."""
    return sum(module.weight.numel() for module in target.modules() if isinstance(module, nn.Linear))


def _block(target: Any) -> int:
    """Elements of the largest block."""
    blocks = [module for module in target.modules() if isinstance(module, nn.ModuleList)]
    return max((sum(p.numel() for p in block.parameters()) for block in blocks[0]), default=0) if blocks else 0


def gathered_bytes(recipe: Recipe, target: Any, layout: Layout, ranks: int) -> float:
    """What a rank receives of the others in one forward of a target in shards; 0 in other layouts."""
    if layout.placement != "zero3":
        return 0.0
    whole, ends, norms = _sizes(target)
    return (whole - ends - norms) * _BYTES[recipe.target.dtype] * (ranks - 1) / ranks


def _draft_items(recipe: Recipe, drafter: Drafter, launch: Launch, ranks: int, on_cpu: bool) -> Iterator[Item]:
    weights = sum(p.numel() for p in drafter.parameters())
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    part = -(-trained // ranks)
    stage = launch.stage if launch.kind == "zero" else 0
    unit = _BYTES[recipe.training.precision]
    if launch.kind == "fsdp2" or stage == 3:
        yield Item("draft weights, fp32, this rank's shard", 4 * -(-weights // ranks), True)
        yield Item("draft weights, fp32, as they are gathered", 4 * weights, True, "training")
        yield Item("draft weights, fp32, as they are gathered", 4 * weights, True, "updating")
    else:
        yield Item("draft weights, fp32", 4 * weights, True)
    if stage:
        yield Item("the optimiser's copy of its weights, fp32", 4 * part, True)
    yield Item("gradients on their way", 4 * _sent_elements(launch, trained), False, "updating")
    shards = launch.kind == "fsdp2" or stage > 0
    yield Item("Adam moments, fp32", 8 * (part if shards else trained), True)
    # Gradients that are summed over micro-batches, or have a buffer of their own, are there while activations are.
    buffered = stage == 3 or (launch.kind != "zero" and ranks > 1)
    held: Phase = "always" if buffered or recipe.training.accumulation > 1 else "updating"
    own = part if launch.kind == "fsdp2" or stage > 1 else trained
    yield Item("gradients, fp32", 4 * own, True, held)
    packed = trained - _head_elements(drafter)
    yield Item("gradients of packed weights", unit * packed, True, "updating")
    yield Item("packed weights" if unit == 4 else "weights packed in bf16", unit * packed, True, "training")
    yield Item("packed weights" if unit == 4 else "weights packed in bf16", unit * packed, True, "updating")
    merged = sum(one.lora_A.shape[1] * one.lora_B.shape[0] for _, one in adapters(drafter))
    yield Item("sums of weights and adapters", 4 * merged, True, "training")
    if on_cpu:
        yield Item("a checkpoint's copy of weights and moments", 12 * trained, True, "saving")


def _sent_elements(launch: Launch, trained: int) -> int:
    """Elements in buffers while gradients are exchanged. DDP sends them from where they lie."""
    if launch.kind == "replicated":
        return 0
    if launch.kind == "fsdp2":
        return 2 * trained  # whole gradients, and what is scattered of them
    # A flat copy; from stage 1 of a bucket, which is a copy itself; in stage 3 put in order of ranks besides.
    return trained if launch.stage == 0 else (3 if launch.stage == 3 else 2) * bucket_elements(trained)


def _head_elements(drafter: Drafter) -> int:
    """Elements of the heads that are trained; the loss computes their gradients."""
    heads = {id(head.weight): head.weight for head in _own_heads(drafter)}
    return sum(weight.numel() for weight in heads.values() if weight.requires_grad)


def _own_heads(drafter: Drafter) -> list[Head]:
    if isinstance(drafter, Eagle1Drafter) or (isinstance(drafter, MedusaDrafter) and drafter.config.head == "target"):
        return []
    return [drafter.head(depth) for depth in range(drafter.max_depth)]


def _batch_items(recipe: Recipe, drafter: Drafter, target: Any, layout: Layout, on_cpu: bool) -> Iterator[Item]:
    training = recipe.training
    unit, target_unit = _BYTES[training.precision], _BYTES[recipe.target.dtype]
    text: Any = target.config.get_text_config()
    tokens = training.batch_rows * training.row_length
    taps = len(taps_with_final(drafter.feature_spec))
    kept = kept_bytes(drafter, unit, training.gradient_checkpointing)
    features = tokens * taps * text.hidden_size
    ahead = batches_ahead(recipe, on_cpu, layout.placement)
    if layout.placement != "elsewhere" and recipe.features.source in ("online", "hybrid"):
        # Beside the draft it may run at any time.
        when: Phase = "always" if ahead else "features"
        yield Item("a forward of the target", _forward_bytes(text, recipe, taps, target_unit), False, when)
    if ahead:
        yield Item("features of micro-batches made ahead", ahead * features * target_unit, True, "always")
    else:
        yield Item("features of a micro-batch", features * target_unit, True, "features")
    yield Item("features of a micro-batch", features * unit, True, "training")
    yield Item("activations of the draft", tokens * kept.kept, False, "training")
    loss = tokens * kept.readouts + _loss_bytes(recipe, drafter, text, tokens, unit, on_cpu)
    again = tokens * kept.again
    name = "rows of labels, logits of a chunk, gradient of the head"
    yield Item(name if loss >= again else "a layer that is computed again", max(loss, again), False, "training")
    if not drafter.vocab_map.is_full or unit != target_unit:
        rows = drafter.vocab_map.size * text.hidden_size
        yield Item("the target's head over the draft vocabulary", unit * rows, True)
    if recipe.evaluation.prompts:
        weights = sum(p.numel() for p in drafter.parameters())
        measuring = _serving_bytes(text, recipe, weights, target_unit)
        yield Item("measuring acceptance: copy of the draft, cache, logits", measuring, False, "measuring")


def _loss_bytes(recipe: Recipe, drafter: Drafter, text: Any, tokens: int, unit: int, on_cpu: bool) -> int:
    """Of the objective, at most: every token is a label."""
    device = torch.device("cpu" if on_cpu else "cuda")
    depths, size = drafter.max_depth, drafter.vocab_map.size
    hidden = drafter.lm.hidden_size if isinstance(drafter, DraftLM) else int(drafter.saved_arch()["hidden_size"])
    # Rows of every depth, their gradients, and the target's rows.
    rows = tokens * unit * (2 * depths * hidden + text.hidden_size)
    own = _head_elements(drafter)
    shared = 1 if isinstance(drafter, MedusaDrafter) and own else depths
    labels = min(tokens, max(1, min(recipe.loss.chunk_rows, chunk_logits(device) // size) // shared))
    block = min(labels, max(1, block_logits(device) // size))
    chunk = (shared + 1) * labels * size * unit + 6 * block * size * 4
    # The gradient of a head, a slab of it, and the head in the products' dtype.
    head = 4 * own + min(SLAB, size * hidden) * unit + (unit * size * hidden if unit == 2 else 0)
    return int(rows + chunk + head)


def _forward_bytes(text: Any, recipe: Recipe, taps: int, unit: int) -> int:
    """Without gradients: the captured states, one layer's largest intermediates, then the logits of some rows."""
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    logits = min(1024, recipe.data.max_length) * text.vocab_size
    per_token = taps * text.hidden_size + 2 * text.hidden_size + 4 * inner
    return int(max(recipe.features.batch_tokens * per_token, logits) * unit)


def _serving_bytes(text: Any, recipe: Recipe, draft_weights: int, unit: int) -> int:
    """A copy of the draft, the target's cache and the logits of one verification."""
    evaluation = recipe.evaluation
    rows = min(evaluation.batch_size, evaluation.prompts)
    length = recipe.data.max_length + evaluation.max_new_tokens
    cache = 2 * text.num_hidden_layers * kv_heads_of(text) * head_dim(text) * length * rows * unit
    return int(draft_weights * unit + cache + rows * (evaluation.k + 1) * text.vocab_size * 4)
