"""What the EAGLE families share: frozen embedding and head, the unrolled loop, packed weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.arch import DraftArch
from drafttrain.drafters.base import DepthOutput, DraftBatch, DraftCache, Drafter, DraftInputs, DraftOutput
from drafttrain.drafters.eagle.config import EagleConfig
from drafttrain.drafters.eagle.initialise import layer_from_block
from drafttrain.drafters.eagle.layer import EagleLayer
from drafttrain.drafters.unroll_cache import UnrollCache
from drafttrain.modeling.blocks import Rotary, compute_dtype
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.head import Head
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.ops.packed_linear import pack_tree

W = TypeVar("W")


class EagleDrafter(Drafter, Generic[W]):
    """A recurrent draft over features. `W` is the family's set of packed weights."""

    arch: DraftArch
    n_layers: int

    def __init__(self, arch: DraftArch, device: torch.device | str | None) -> None:
        super().__init__()
        self.arch = arch
        self.rotary = Rotary(arch.rope_parameters, arch.head_dim, arch.max_position_embeddings, device)
        self._packed: W | None = None

    def bind(self, embedding: Tensor, head: Head) -> None:
        """Hand over the target's frozen input embedding [V, H_target] and its head."""
        if tuple(embedding.shape) != (self.arch.vocab_size, self.arch.target_hidden_size):
            raise ValueError(
                f"the target's embedding is {tuple(embedding.shape)}, this draft was made for "
                f"({self.arch.vocab_size}, {self.arch.target_hidden_size})"
            )
        super().bind(embedding, head)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the target's embedding, [B, T] -> [B, T, H_target]."""
        if self.bound is None:
            raise RuntimeError(f"{self.family} reads the target's embedding: call bind() first")
        return F.embedding(tokens, self.bound[0]).to(dtype)

    def new_cache(self, rows: int, length: int) -> StaticKVCache:
        """A serving cache for `rows` rows of up to `length` slots, in the draft's dtype and device."""
        weight = next(self.parameters())
        arch = self.arch
        return StaticKVCache(self.n_layers, arch.num_kv_heads, arch.head_dim, rows, length, weight.dtype, weight.device)

    def saved_arch(self) -> dict[str, Any]:
        """The resolved sizes, as JSON."""
        return self.arch.model_dump(mode="json")

    @staticmethod
    def arch_for(config: EagleConfig, text: Any, hidden_size: int | None = None) -> DraftArch:
        """Sizes for a target's Hugging Face text config."""
        return DraftArch.from_target(
            text,
            hidden_size=hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
        )

    @abstractmethod
    def all_layers(self) -> list[EagleLayer]:
        """The layers in the order in which a state passes them."""

    def init_layers(self, target: CausalLM) -> None:
        """Start the layers as the config says."""
        layers = self.all_layers()
        for layer, block in zip(layers, self.config.init_blocks(target.n_layers, len(layers)), strict=False):
            layer_from_block(layer, target, block)

    def check_start(self, target: CausalLM) -> None:
        """See `Drafter.check_start`."""
        self.init_layers(target)

    def compile_training(self) -> None:
        """What stands before and after the attention of each layer."""
        for module in self.modules():
            if isinstance(module, EagleLayer):
                module.compile_training()

    @abstractmethod
    def pack(self, dtype: torch.dtype) -> W:
        """Cast and concatenate the weights, differentiably."""

    def prepare_for_inference(self) -> None:
        """Keep packed weights between steps, until `train()`. Call again after weights change."""
        self.eval()
        with torch.no_grad():
            self._packed = pack_tree(self.pack(next(self.parameters()).dtype))

    def train(self, mode: bool = True) -> EagleDrafter[W]:
        """Switch the mode; training drops packed weights."""
        if mode:
            self._packed = None
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> EagleDrafter[W]:
        # Another dtype or device: what was packed is neither.
        self._packed = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args)

    def weights(self, dtype: torch.dtype) -> W:
        """The packed weights: kept ones when serving, else made from the parameters."""
        if self._packed is not None and not torch.is_grad_enabled():
            return self._packed
        return self.pack(dtype)

    def dtype(self) -> torch.dtype:
        """The dtype the next call computes in."""
        return compute_dtype(next(self.parameters()))

    @abstractmethod
    def read_tokens(self, weights: W, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What depends on the tokens [B, T] alone: [B, T, n]."""

    @abstractmethod
    def read_features(self, weights: W, features: Tensor) -> Tensor:
        """The target's taps, concatenated [B, T, n * H_target] -> the state of depth 0 [B, T, H]."""

    @abstractmethod
    def advance(
        self, weights: W, state: Tensor, from_tokens: Tensor | None, positions: Tensor, cache: DraftCache
    ) -> DraftOutput:
        """One step on states [B, T, H] and the tokens' part [B, T, n]."""

    def step(self, inputs: DraftInputs, cache: DraftCache) -> DraftOutput:
        """One forward of the draft; pure but for the cache."""
        if inputs.features is None:
            raise ValueError(f"{self.family} reads features in every step")
        dtype = self.dtype()
        weights = self.weights(dtype)
        state = inputs.features.to(dtype)
        if inputs.depth == 0:
            state = self.read_features(weights, state)
        from_tokens = self.read_tokens(weights, inputs.tokens, dtype)
        return self.advance(weights, state, from_tokens, inputs.positions, cache)

    def unroll(self, batch: DraftBatch, depths: int) -> list[DepthOutput]:
        """Run `depths` steps over all slots at once (training-time test).

        Slot t of step k reads x_{t+1+k}, sits at rotary position t + k and its readout predicts x_{t+2+k}.
        Near the end of a row there is no such token: the last one stands in, and no label there is
        supervised.
        """
        dtype = self.dtype()
        weights = self.weights(dtype)
        slots = batch.tokens.shape[1]
        taps = [batch.features[tap].to(dtype) for tap in self.feature_spec.taps]
        features = taps[0] if len(taps) == 1 else torch.cat(taps, dim=-1)
        state = self.read_features(weights, self.disturb(features))
        tokens = (
            F.pad(batch.tokens[:, 1:], (0, depths), mode="replicate") if slots > 1 else batch.tokens.expand(-1, depths)
        )
        from_tokens = self.read_tokens(weights, tokens, dtype)
        cache = UnrollCache(batch.segments, self.n_layers)
        outputs = []
        for k in range(depths):
            part = None if from_tokens is None else from_tokens[:, k : k + slots]
            out = self.advance(weights, state, part, batch.positions + k, cache)
            outputs.append(self.depth_output(k, out))
            state = self.recur(out)
        return outputs

    def disturb(self, features: Tensor) -> Tensor:
        """The target's features as training sees them."""
        return features

    def recur(self, out: DraftOutput) -> Tensor:
        """The state that the next unrolled step reads."""
        assert out.hidden is not None
        return out.hidden

    def depth_output(self, depth: int, out: DraftOutput) -> DepthOutput:
        """What the objective sees of one step."""
        return DepthOutput(depth, 2 + depth, out.readout)
