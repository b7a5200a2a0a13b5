"""Layer ids of an EAGLE-3 checkpoint, which have three conventions, as canonical taps."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.export.foreign.parts import Reading
from drafttrain.export.tap_ids import KEY
from drafttrain.export.trtllm import CAPTURED, OPTIONS, SPECULATIVE, read_options
from drafttrain.modeling.taps import FeatureSpec, Tap

_REMEDY = "say which states are meant with --taps, such as --taps 2,16,29 (inputs of blocks)"


def read_taps(reading: Reading, count: int, n_layers: int, given: Sequence[int | str] | None) -> tuple[Tap, ...]:
    """The states that the draft reads.

    Top-level ids are vLLM's, inputs of layers. Nested ones are SGLang's and SpecForge's, outputs, one lower, but
    vLLM reads nested ones, too, in its own sense. Without ids the default is meant.

    Args:
        count: states that fc has room for.
        n_layers: blocks of the target.
        given: by the user, in the form of recipes; nothing is read then.

    Raises:
        CheckpointError: ids that contradict each other or the width of fc, or could be meant either way.
    """
    beside = _trtllm_ids(reading)
    nested = (reading.config.get("eagle_config") or {}).get(KEY)
    top = reading.config.get(KEY)
    default = [2, n_layers // 2, n_layers - 3]
    if given is not None:
        try:
            taps = FeatureSpec.of(given).taps
            FeatureSpec(taps).check(n_layers)
        except ValueError as error:
            raise reading.error(f"--taps: {error}") from None
    elif top is not None:
        inputs = _ids(reading, top, KEY)
        if nested is not None and sorted(_ids(reading, nested, f"eagle_config.{KEY}")) not in (
            sorted(inputs),
            sorted(i - 1 for i in inputs),
        ):
            raise reading.error(f"{KEY} {top} and eagle_config.{KEY} {nested} mean different states", _REMEDY)
        taps = _from_inputs(reading, inputs, n_layers)
    elif nested is not None:
        outputs = _ids(reading, nested, f"eagle_config.{KEY}")
        if sorted(outputs) == sorted(default):
            raise reading.error(
                f"eagle_config.{KEY} {nested} could be inputs of layers (vLLM: the default) or outputs (SGLang)",
                _REMEDY,
            )
        reading.notes.append(f"eagle_config.{KEY} {nested}: outputs of layers, as SGLang and SpecForge count")
        taps = _from_inputs(reading, [i + 1 for i in outputs], n_layers)
    elif beside is not None:
        reading.notes.append(f"{OPTIONS}: {CAPTURED} {beside}, outputs of layers")
        taps = _from_inputs(reading, [i + 1 for i in beside], n_layers)
    else:
        if min(default) < 0 or len(set(default)) != 3:
            raise reading.error(f"names no layer ids, and the default needs a target of more than {n_layers}", _REMEDY)
        taps = tuple(Tap.block(i) for i in default)
        reading.notes.append(f"taps: the default of all engines, {', '.join(map(str, taps))}")
    if len(taps) != count:
        raise reading.error(f"fc.weight reads {count} states, the layer ids name {len(taps)}", _REMEDY)
    return taps


def _trtllm_ids(reading: Reading) -> list[int] | None:
    """TensorRT-LLM has the ids in the server's config, which exports have beside the checkpoint."""
    try:
        options = read_options(reading.where)
    except ValueError as error:
        raise reading.error(str(error)) from None
    ids = None if options is None else options[SPECULATIVE].get(CAPTURED)
    return None if ids is None else _ids(reading, ids, CAPTURED)


def _ids(reading: Reading, value: object, key: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise reading.error(f"config.json: {key} is {value!r}, not a list of numbers")
    return value


def _from_inputs(reading: Reading, inputs: Sequence[int], n_layers: int) -> tuple[Tap, ...]:
    wrong = [i for i in inputs if not 0 <= i <= n_layers]
    if wrong:
        raise reading.error(f"layer ids {wrong} do not exist in a target of {n_layers} layers", _REMEDY)
    # An engine concatenates in the order of the layers, however the ids are written.
    return tuple(Tap.pre_norm if i == n_layers else Tap.block(i) for i in sorted(inputs))
