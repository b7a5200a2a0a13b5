"""Which of the target's states an engine hands to an EAGLE-3 draft: each engine in its own place and numbering."""

from __future__ import annotations

from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.finding import Mend
from drafttrain.export.tap_ids import KEY
from drafttrain.export.trtllm import CAPTURED, OPTIONS

NESTED = f"eagle_config.{KEY}"


def default_inputs(n_layers: int) -> list[int]:
    """Layers whose inputs the engines hand over where no ids are given; those of outputs are one lower."""
    return [2, n_layers // 2, n_layers - 3]


def ids_given(case: Case) -> tuple[list[int] | None, str, int]:
    """(ids that the engine reads, the key that holds them, what must be added to make inputs of layers of them)."""
    if case.engine == "trtllm":
        return case.captured, f"{CAPTURED} in {OPTIONS}", 1
    if case.engine == "sglang":
        return case.nested_ids, NESTED, 1
    return (case.top_ids, KEY, 0) if case.top_ids is not None else (case.nested_ids, NESTED, 0)


def inputs_read(case: Case) -> list[int]:
    """Layers whose inputs the engine hands over, n_layers for the last one's output."""
    ids, _, more = ids_given(case)
    return default_inputs(case.facts.n_layers) if ids is None else [i + more for i in ids]


def ids_mend(case: Case, inputs: list[int]) -> Mend:
    """Layer ids, given as inputs of layers, where the engine reads them."""
    outputs = [i - 1 for i in inputs]
    if case.engine == "trtllm":
        return Mend(options={CAPTURED: outputs})
    if case.engine == "sglang":
        return Mend(keys={NESTED: outputs, "eagle_config.use_aux_hidden_state": True})
    return Mend(keys={KEY: inputs, "num_aux_hidden_states": len(inputs)})
