"""One adapter around any Hugging Face causal LM: body, taps, head. The only place that knows architectures."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drafttrain.errors import TargetError
from drafttrain.modeling.attention import ATTENTION_NAME, register
from drafttrain.modeling.blocks import rope_parameters_of
from drafttrain.modeling.compiled import compile_parts
from drafttrain.modeling.course import Course, Courses
from drafttrain.modeling.fused_block import fuse_blocks, unfuse_blocks
from drafttrain.modeling.head import Head
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.kv_shape import KVShape, MeasuringCache
from drafttrain.modeling.taps import Tap
from drafttrain.ops.decode_attention import shapes_for
from drafttrain.ops.packed_linear import pack_linears

C = TypeVar("C", bound=StaticKVCache)

_log = logging.getLogger(__name__)


@dataclass
class _Tapping:
    """The states that a forward is asked for, and those found so far."""

    wanted: frozenset[Tap]
    found: dict[Tap, Tensor] = field(default_factory=dict)


# Of the forward that this thread runs: another thread may run one of the same model.
_TAPPING: ContextVar[_Tapping | None] = ContextVar("tapping", default=None)


@dataclass
class CausalLMOutput:
    """final: [B, T, H], the state after the last norm. taps: the states asked for, [B, T, H] each."""

    final: Tensor
    taps: dict[Tap, Tensor] = field(default_factory=dict)


class CausalLM(nn.Module):
    """A Hugging Face causal LM split into embedding, blocks, final norm and head.

    Logits are never computed by `forward`: callers apply `lm_head` to the rows they want.

    Attributes:
        context: longest sequence in tokens.
    """

    body: Any
    layers: nn.ModuleList
    norm: nn.Module

    def __init__(self, hf: Any) -> None:
        super().__init__()
        register()
        self.hf = hf
        self.config = hf.config.get_text_config()
        hf.set_attn_implementation(ATTENTION_NAME)
        self._windows = _layer_windows(self.config)
        # Views into `hf`, not submodules of their own: the state dict must hold every tensor once.
        body = find_body(hf)
        vars(self).update(body=body, layers=body.layers, norm=_find_norm(hf, body))
        self.n_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.context, self._bounded = context_of(self.config)
        self._cache_argument = _cache_argument(self.body)
        self._measured: KVShape | None = None
        self._prepared_head: Head | None = None
        self._prepared_version = -1
        self._is_compiled = False
        self.courses = Courses(body)
        self._install_taps()
        self._check_causal()

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding rows included."""
        return int(self.embedding_weight.shape[0]) if self._head_module() is None else int(self.head().weight.shape[0])

    @property
    def embedding_weight(self) -> Tensor:
        """[V, H] input embedding."""
        weight: Tensor = self.hf.get_input_embeddings().weight
        return weight

    @property
    def device(self) -> torch.device:
        """Device of the embedding."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding."""
        return self.embedding_weight.dtype

    def _head_module(self) -> Any:
        return self.hf.get_output_embeddings()

    def head(self) -> Head:
        """The output head with the architecture's scalings."""
        if self._prepared_head is not None:
            return self._prepared_head
        module = self._head_module()
        weight = self.embedding_weight if module is None else module.weight
        scale = getattr(self.config, "logit_scale", None)  # Cohere multiplies
        if scale is None:
            divisor = getattr(self.config, "logits_scaling", None)  # Granite divides
            scale = 1.0 if divisor is None else 1.0 / divisor
        return Head(
            weight,
            getattr(module, "bias", None),
            getattr(self.config, "final_logit_softcapping", None),
            scale,
        )

    def prepare_for_inference(self) -> None:
        """Lay weights out for decoding where the device gains by it (a copy of them); again if they changed since."""
        version = sum(parameter._version for parameter in self.parameters())
        if version != self._prepared_version:
            pack_linears(self.body)
            if not self._is_compiled:
                fuse_blocks(list(self.layers))
            self._prepared_head = None
            self._prepared_head = self.head().prepared()
            self._prepared_version = version

    def compile_forward(self) -> None:
        """Have `torch.compile` fuse what lies between attention and products, from the next forward on and for good.

        Raises:
            EngineError: no compiler for this device.
        """
        if not self._is_compiled:
            unfuse_blocks(list(self.layers))
            compile_parts(list(self.layers), self.norm)
            self._is_compiled = True

    def lm_head(self, features: Tensor) -> Tensor:
        """final features [..., H] -> logits [..., V]."""
        return self.head()(features)

    def final_norm(self, features: Tensor) -> Tensor:
        """The last norm, [..., H] -> [..., H]."""
        normed: Tensor = self.norm(features)
        return normed

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H], what the embedding module gives; some bodies scale or norm it further."""
        embedded: Tensor = self.hf.get_input_embeddings()(ids)
        return embedded

    def new_cache(self, rows: int, length: int) -> StaticKVCache:
        """A cache for `rows` rows of up to `length` tokens, in this model's dtype and device."""
        return self.new_cache_of(StaticKVCache, rows, length)

    def new_cache_of(self, kind: type[C], rows: int, length: int) -> C:
        """The same of a kind of cache."""
        heads, keys, values = self._kv_shape()
        return kind(self.n_layers, heads, keys, rows, length, self.dtype, self.device, values)

    def cache_length(self, length: int) -> int:
        """Length of a cache for rows of `length` tokens: on a CPU some more, so that all of it is read in shapes that
        round alike (`ops.decode_attention`)."""
        if self.device.type != "cpu":
            return length
        shapes = shapes_for(self._kv_shape().widths, self.dtype)
        return length if shapes is None else shapes.keys(length)

    def cache_bytes(self, rows: int, length: int) -> int:
        """What `new_cache` will allocate, in bytes."""
        return self._kv_shape().width * rows * length * self.dtype.itemsize

    def _kv_shape(self) -> KVShape:
        """What each layer hands to a cache, from a forward of one token: configs say it in many ways, or wrongly."""
        if self._measured is None:
            seen, ids = MeasuringCache(), torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            mask = None if len(self._windows) == 1 else dict.fromkeys(self._windows)
            with torch.inference_mode():
                self.body(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=ids,
                    use_cache=True,
                    **{self._cache_argument: seen},
                )
            if not seen.found or max(seen.found) >= self.n_layers:
                raise TargetError(
                    f"{type(self.hf).__name__} caches layers {sorted(seen.found)} in {self.n_layers} blocks",
                    remedy="choose a target with one attention in a block",
                )
            self._measured = seen.shape(self.n_layers)
        return self._measured

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cache: StaticKVCache | None = None,
        taps: Iterable[Tap] = (),
        course: Course | None = None,
        states: Tensor | None = None,
    ) -> CausalLMOutput:
        """Run the body. Several threads may at once, as long as no course is given.

        Args:
            ids: int64 [B, T].
            positions: int64 [B, T] rotary positions; default 0 .. T-1, or the cache's own.
            cache: after `begin`; without one the rows are causal from position 0, right padding harmless.
            taps: states to return besides the final one; those of blocks that are not run are missing.
            course: which part of the body to run; None = all of it.
            states: [B, T, H], what the course's first block reads, where that is not the body's first.
        """
        if positions is None:
            positions = (
                torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if cache is None else cache.positions()
            )
        if self._bounded:
            # A row at its end rides along with wider rounds: what it writes behind the end is never kept.
            positions = positions.clamp(max=self.context - 1)
        kwargs: dict[str, Any] = {}
        if cache is not None:
            kwargs[self._cache_argument] = cache
        mask = self._masks(ids.shape[1], cache, ids.device)
        tapping = _Tapping(frozenset(taps))
        before = _TAPPING.set(tapping)
        try:
            with self.courses.on(course, states):
                output = self.body(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=cache is not None,
                    **kwargs,
                )
        finally:
            _TAPPING.reset(before)
        final = output.last_hidden_state
        if Tap.final in tapping.wanted:
            tapping.found[Tap.final] = final
        return CausalLMOutput(final, tapping.found)

    def _masks(self, n_new: int, cache: StaticKVCache | None, device: torch.device) -> Any:
        """What the body takes as attention_mask: one 4D mask, or one a layer type where layers differ."""
        if len(self._windows) == 1:
            (window,) = self._windows.values()
            return self._mask(n_new, cache, window, device)
        return {kind: self._mask(n_new, cache, window, device) for kind, window in self._windows.items()}

    @staticmethod
    def _mask(n_new: int, cache: StaticKVCache | None, window: int | None, device: torch.device) -> Tensor | None:
        if cache is not None:
            return cache.mask(window)
        if window is None or n_new <= window:
            return None
        index = torch.arange(n_new, device=device)
        return ((index <= index[:, None]) & (index > index[:, None] - window))[None, None]

    def _install_taps(self) -> None:
        def before_block(index: int) -> Any:
            tap = Tap.block(index)

            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                tapping = _TAPPING.get()
                if tapping is not None and tap in tapping.wanted:
                    tapping.found[tap] = args[0] if args else kwargs["hidden_states"]

            return hook

        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(before_block(index), with_kwargs=True)

        def before_norm(_: nn.Module, args: tuple[Any, ...]) -> None:
            tapping = _TAPPING.get()
            if tapping is not None and Tap.pre_norm in tapping.wanted:
                tapping.found[Tap.pre_norm] = args[0]

        self.norm.register_forward_pre_hook(before_norm)

    def _check_causal(self) -> None:
        if getattr(self.config, "use_bidirectional_attention", None) in (True, "all"):
            raise TargetError(
                f"{type(self.hf).__name__} lets tokens see those behind them: config.json says "
                "use_bidirectional_attention",
                remedy="choose a target that generates text; this one embeds it",
            )


def find_body(hf: Any) -> Any:
    """The part of a Hugging Face causal LM that holds embedding, blocks and final norm.

    Raises:
        TargetError: none is recognised.
    """
    body = getattr(hf, hf.base_model_prefix, hf)
    for name in ("language_model", "text_model", "decoder"):
        body = getattr(body, name, body)
    if not hasattr(body, "layers") or not hasattr(hf.config.get_text_config(), "hidden_size"):
        raise _not_recognised(hf, "no list of decoder layers")
    return body


def _find_norm(hf: Any, body: Any) -> nn.Module:
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
        module = getattr(body, name, None)
        if isinstance(module, nn.Module):
            return module
    raise _not_recognised(hf, "no final norm")


def _not_recognised(hf: Any, what: str) -> TargetError:
    name = type(hf).__name__
    if getattr(hf, "_is_stateful", False):
        return TargetError(
            f"{name} keeps a recurrent state, out of which rejected draft tokens cannot be taken",
            remedy="choose a target whose layers are full or sliding attention",
        )
    return TargetError(
        f"{name} has {what} that drafttrain recognises",
        remedy="Llama, Qwen, Mistral, Gemma, Phi and their relatives are supported; docs/targets.md lists them",
    )


def context_of(config: Any) -> tuple[int, bool]:
    """Tokens of the longest text, and whether a position behind it does harm.

    Behind its first length longrope turns all positions otherwise, those of cached keys and of a batch's other rows
    too: what is generated would depend on what is generated beside it. "dynamic" does so behind the context, and
    learnt positions end there.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 2**31)
    if not getattr(config, "rope_parameters", None):
        return longest, True
    rope = rope_parameters_of(config)
    if rope["rope_type"] == "longrope":
        longest = min(longest, int(rope["original_max_position_embeddings"]))
    return longest, rope["rope_type"] in ("longrope", "dynamic")


def _cache_argument(body: Any) -> str:
    # transformers 5.2x renamed the argument; the old name is deprecated, the new one unknown to older releases.
    names = inspect.signature(inspect.unwrap(type(body).forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


def _sliding_window(config: Any) -> int | None:
    """The window, None where the architecture knows none: transformers keeps keys that nothing reads."""
    window: int | None = getattr(config, "sliding_window", None)
    kind = type(config)
    known = "sliding_window" in inspect.signature(kind.__init__).parameters or hasattr(kind, "sliding_window")
    if window is None or known or not kind.__module__.startswith("transformers."):
        return window
    _log.warning("config.json: sliding_window has no effect in %s: left out", kind.__name__)
    return None


def _layer_windows(config: Any) -> dict[str, int | None]:
    """Layer type -> sliding window. One entry where all layers are alike."""
    window, kinds = _sliding_window(config), getattr(config, "layer_types", None)
    if kinds is None:
        use = getattr(config, "use_sliding_window", True)
        return {"full_attention": window if use else None}
    windows: dict[str, int | None] = {}
    for kind in dict.fromkeys(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise TargetError(
                f"layers of type {kind!r} are not supported by the bundled engine",
                remedy="choose a target whose layers are full or sliding attention",
            )
        windows[kind] = window if kind == "sliding_attention" else None
    return windows
