"""Load a target or its tokenizer from the embedded default, a folder, a GGUF file or a hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.errors import TargetError, UserError
from drafttrain.files import read_object
from drafttrain.modeling.causal_lm import find_body
from drafttrain.targets import embedded
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import TargetIdentity, template_hash, tokenizer_hash, weights_fingerprint
from drafttrain.targets.model import TargetModel, stop_ids
from drafttrain.targets.native import settled
from drafttrain.targets.quantised import check_quantisation, check_scales
from drafttrain.targets.quiet import no_bars

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_IN_LAYER = re.compile(r"(?P<list>\D+)\.(?P<index>\d+)\.")
_PREDICTOR = ".eh_proj."
"""In layers behind the model's own, with which DeepSeek and GLM predict further tokens."""


@dataclass(frozen=True)
class _Place:
    """What to hand to `from_pretrained`."""

    source: str
    gguf_file: str | None
    folder: Path | None


Build = Callable[[Callable[[], Any], torch.device], Any]
"""(loads the Hugging Face model, device) -> that model, ready to run."""


def load_target(
    config: TargetConfig,
    build: Build | None = None,
    wrap: Callable[[Any, Any, TargetIdentity], TargetModel] = TargetModel,
    *,
    blocks: bool = True,
) -> TargetModel:
    """Load weights and tokenizer, frozen, on the device asked for.

    Args:
        build: calls the loader it is given and places what that gives; default: whole, on the device.
        wrap: makes the target of model, tokenizer and identity.
        blocks: whether to load them, too; without, the model is embedding, final norm and head.

    Raises:
        TargetError: not found, unreadable, an unsupported architecture, weights that contradict the config,
            remote code without leave, or a forward that is not finite.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = settled(config)
    place = _locate(config)
    device = resolve_device(config.device)
    whole_config = _load_config(config)  # a fault in it would be reported as the tokenizer's, which reads it too
    _check_generation_config(place)
    tokenizer = load_tokenizer(config)
    if place.folder is not None:
        check_quantisation(whole_config, _weight_files(config, place), config.model, blocks=blocks)
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype), **_common(config, place)}
    if place.gguf_file:
        from transformers import GgufConfig

        # Without it the weights stay packed: slow forwards, and nothing can be saved.
        options["quantization_config"] = GgufConfig(dequantize=True)

    def load() -> Any:
        if blocks:
            loaded: Any = AutoModelForCausalLM.from_pretrained(place.source, output_loading_info=True, **options)
            hf, found = loaded
            _require_all(found, place)
            _require_no_further(found, hf, int(hf.config.get_text_config().num_hidden_layers), place)
            check_scales(found["unexpected_keys"], place.source)
            return hf
        return _without_blocks(AutoConfig.from_pretrained(place.source, **_common(config, place)), place, options)

    with _explained(config, "weights"), no_bars():
        hf: Any = (build or _whole)(load, device)
    if place.folder is None:  # what a hub has is here only now
        check_quantisation(whole_config, _weight_files(config, place), config.model, blocks=blocks)
    rows = int(hf.get_input_embeddings().weight.shape[0])
    identity = _identity(config, place, tokenizer, hf.config.get_text_config(), rows)
    return wrap(hf, tokenizer, identity)


def _whole(load: Callable[[], Any], device: torch.device) -> Any:
    return load().to(device)


def _require_all(found: dict[str, Any], place: _Place) -> None:
    """Refuse a checkpoint that lacks tensors: transformers fills them with random numbers and goes on."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise TargetError(
            f"its weights lack {', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}",
            where=place.source,
            remedy="the checkpoint is incomplete, or its config.json is another model's: fetch it again",
        )


def _require_no_further(found: dict[str, Any], hf: Any, n_layers: int, place: _Place) -> None:
    """Refuse a config that says fewer layers than the weights hold: transformers runs the shorter model."""
    body = find_body(hf)
    ours = next(name for name, module in hf.named_modules() if module is body.layers)
    held = n_layers
    predictors: set[int] = set()
    for name in found["unexpected_keys"]:
        match = _IN_LAYER.match(name)
        # A checkpoint of the body alone has names without the body's own.
        if match is None or not f".{ours}".endswith(f".{match['list']}"):
            continue
        held = max(held, int(match["index"]) + 1)
        if _PREDICTOR in name:
            predictors.add(int(match["index"]))
    while held - 1 in predictors:
        held -= 1
    if held > n_layers:
        raise TargetError(
            f"num_hidden_layers is {n_layers}, and its weights hold {held} layers: the rest would be left out",
            where=f"{place.source}/{place.gguf_file or 'config.json'}",
            remedy=f"set it to {held}, or save the shorter model as a checkpoint of its own (save_pretrained)",
        )


def _without_blocks(config: Any, place: _Place, options: dict[str, Any]) -> Any:
    """The model with no blocks, and a config that says how many there are; their weights are not read."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", None):
        raise TargetError(
            "its blocks have embeddings of their own, which cannot be read without them",
            where=place.source,
            remedy="use target.placement=whole",
        )
    true = {name: getattr(text, name) for name in ("num_hidden_layers", "layer_types") if hasattr(text, name)}
    text.num_hidden_layers = 0
    if true.get("layer_types"):
        text.layer_types = []
    options = {**options, "config": config, "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(place.source, **options)
    hf, found = loaded
    _require_all(found, place)
    _require_no_further(found, hf, int(true["num_hidden_layers"]), place)
    for name, value in true.items():
        setattr(hf.config.get_text_config(), name, value)
    return hf


def load_identity(config: TargetConfig) -> TargetIdentity:
    """What `load_target` would say that the target is, without loading its weights.

    Raises:
        TargetError: no config, no tokenizer or no weight files.
    """
    text = load_text_config(config)
    return _identity(config, _locate(config), load_tokenizer(config), text, int(text.vocab_size))


def weight_files(config: TargetConfig) -> list[Path]:
    """The files that hold the target's weights.

    Raises:
        TargetError: there are none.
    """
    return _weight_files(config, _locate(config))


def _identity(config: TargetConfig, place: _Place, tokenizer: Any, text: Any, vocab_size: int) -> TargetIdentity:
    return TargetIdentity(
        name=config.model,
        weights_hash=weights_fingerprint(_weight_files(config, place)),
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(tokenizer),
        vocab_size=vocab_size,
        tokenizer_size=len(tokenizer),
        hidden_size=int(text.hidden_size),
        n_layers=int(text.num_hidden_layers),
    )


def checkpoint(config: TargetConfig) -> Path | str | None:
    """What a serving engine loads of the target: a folder, or a hub name; None for a GGUF file."""
    if config.model == embedded.NAME:
        return embedded.embedded_folder()
    path = Path(config.model).expanduser()
    if config.gguf_file or path.suffix == ".gguf":
        return None
    return path.resolve() if path.is_dir() else config.model


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer alone.

    Raises:
        TargetError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    place = _locate(config)
    source = config.tokenizer or place.source
    options = _common(config, place)
    if config.tokenizer:
        options.pop("gguf_file", None)
    with _explained(config, "tokenizer"):
        return AutoTokenizer.from_pretrained(source, **options)


def load_text_config(config: TargetConfig) -> Any:
    """The target's text config alone; reads no weights."""
    return _load_config(config).get_text_config()


def _load_config(config: TargetConfig) -> Any:
    from transformers import AutoConfig

    place = _locate(config)
    with _explained(config, "config"):
        return AutoConfig.from_pretrained(place.source, **_common(config, place))


def _check_generation_config(place: _Place) -> None:
    """One that cannot be read would be left out without a word, and with it the ids that end a turn."""
    file = None if place.folder is None else place.folder / "generation_config.json"
    if file is not None and file.exists():
        try:
            read_object(file)
        except UserError as error:
            raise TargetError(error.what, where=file, remedy="fetch it again, or remove it") from None


def load_stop_ids(config: TargetConfig) -> frozenset[int]:
    """Ids that end a turn or a text, as `TargetModel.stop_ids`; reads no weights."""
    from transformers import GenerationConfig

    place = _locate(config)
    _check_generation_config(place)
    options = _common(config, place)
    options.pop("gguf_file", None)
    try:
        generation: Any = GenerationConfig.from_pretrained(place.source, **options)
    except OSError:  # a checkpoint need not have one
        generation = None
    return stop_ids(generation, load_text_config(config), load_tokenizer(config))


def resolve_device(device: str) -> torch.device:
    """ "auto" is this rank's GPU if there is one, else the CPU. TargetError for a device that is not here."""
    if device != "auto":
        try:
            return torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
            raise TargetError(
                f"no device {device!r} here: {str(error).strip().splitlines()[0]}",
                where="target.device",
                remedy="'auto' takes the rank's GPU if there is one, else the CPU",
            ) from None
    if torch.cuda.is_available():
        # As accelerate counts: a rank that was given one GPU of its machine sees that one alone.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def _locate(config: TargetConfig) -> _Place:
    if config.model == embedded.NAME:
        folder = embedded.embedded_folder()
        return _Place(str(folder), None, folder)
    path = Path(config.model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _Place(str(path.parent), path.name, path.parent)
    if path.is_dir():
        if not (path / "config.json").exists() and not config.gguf_file:
            raise TargetError(
                "the folder has no config.json",
                where=path,
                remedy="give a transformers checkpoint, or a .gguf file",
            )
        return _Place(str(path), config.gguf_file, path)
    if path.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") > 1:
        raise TargetError(
            "no such target folder",
            where=config.model,
            remedy="check the path: a folder with config.json, a .gguf file, or a hub name",
        )
    return _Place(config.model, config.gguf_file, None)


def _common(config: TargetConfig, place: _Place) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision and place.folder is None:
        options["revision"] = config.revision
    if place.gguf_file:
        options["gguf_file"] = place.gguf_file
    return options


def _weight_files(config: TargetConfig, place: _Place) -> list[Path]:
    folder = place.folder
    if folder is not None and place.gguf_file:
        return [folder / place.gguf_file]
    if folder is None:
        from transformers.utils.hub import cached_file

        found = cached_file(config.model, "config.json", revision=config.revision)
        assert found is not None
        folder = Path(found).parent
    for pattern in _WEIGHTS:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    raise TargetError("no weight files", where=folder, remedy=f"expected one of {', '.join(_WEIGHTS)}")


class _explained:
    """Turn the many errors of loading into one that says what to do."""

    def __init__(self, config: TargetConfig, what: str) -> None:
        self.config, self.what = config, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # Readers of weights raise types of their own (safetensors, pickle); all mean that loading failed.
        if not isinstance(error, Exception) or isinstance(error, TargetError):
            return
        text = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = " ".join(text[: 2 if text[0].endswith(":") else 1]) if text else type(error).__name__
        remedy = "give a local folder, or check the name, the revision and that the hub can be reached"
        here = Path(self.config.model).expanduser().is_dir()
        if self.what == "tokenizer" and not self.config.tokenizer and here:
            remedy = "copy the tokenizer's files (tokenizer.json, tokenizer_config.json) into the folder"
        elif self.what != "tokenizer" and here:
            remedy = "the folder is incomplete or damaged, or of a kind that this transformers does not know"
        if "ignore_mismatched_sizes" in str(error):
            first = "tensors have other shapes than its config.json says"
            remedy = "its config.json is another model's: fetch both again"
        if "trust_remote_code" in str(error):
            remedy = "set target.trust_remote_code: true if you trust the code it brings"
        elif isinstance(error, ImportError):
            remedy = "install the package it names"
        raise TargetError(f"cannot load its {self.what}: {first}", where=self.config.model, remedy=remedy) from error
