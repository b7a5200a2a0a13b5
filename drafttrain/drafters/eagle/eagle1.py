"""EAGLE-1 (arXiv 2401.15077), which EAGLE-2 (arXiv 2406.16858) shares, and HASS (arXiv 2408.15766)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafttrain.drafters.arch import DraftArch
from drafttrain.drafters.base import DepthOutput, DraftCache, DraftOutput
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.eagle.config import Eagle1Config
from drafttrain.drafters.eagle.initialise import initialise
from drafttrain.drafters.eagle.layer import EagleLayer, LayerWeights
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.ops.packed_linear import Matrix, linear


class Eagle1Weights(NamedTuple):
    """Packed weights in the compute dtype; fc in its halves for the embedding and for the feature."""

    fc_embedding: Matrix
    fc_feature: Matrix
    fc_bias: Tensor | None
    layer: LayerWeights


class Eagle1Drafter(EagleDrafter[Eagle1Weights]):
    """fc(cat(embedding, feature)) -> one decoder layer without its first norm -> the target's next feature.

    The feature is the target's state after its final norm, so the target's own head reads the prediction.
    State dict: fc, layers.0.*.
    """

    family = "eagle1"
    config: Eagle1Config

    def __init__(self, config: Eagle1Config, arch: DraftArch, device: torch.device | str | None = None) -> None:
        super().__init__(arch, device)
        self.config = config
        self.feature_spec = FeatureSpec((Tap.final,))
        self.vocab_map = VocabMap.full(arch.vocab_size)
        self.max_depth = config.depth
        self.n_layers = 1
        hidden = arch.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias, device=device)
        self.layers = nn.ModuleList([EagleLayer(arch, reads_embedding=False, state_norm=False, device=device)])

    @classmethod
    def from_text_config(
        cls, config: Eagle1Config, text: Any, vocab_map: VocabMap | None, device: torch.device | str | None
    ) -> Eagle1Drafter:
        """Build for a target, always over its whole vocabulary."""
        if vocab_map is not None and not vocab_map.is_full:
            raise ValueError("eagle1 uses the target's own head: a smaller draft vocabulary is not possible")
        drafter = cls(config, cls.arch_for(config, text), device)
        initialise(drafter)
        return drafter

    @classmethod
    def from_saved(
        cls,
        config: Eagle1Config,
        arch: dict[str, Any],
        vocab_map: VocabMap,
        device: torch.device | str | None,
    ) -> Eagle1Drafter:
        """Build from the saved sizes."""
        return cls(config, DraftArch.model_validate(arch), device)

    @torch.no_grad()
    def init_from_target(self, target: CausalLM) -> None:
        """The layer and fc, each as the config says."""
        if self.config.init_fc == "feature":
            self.fc.weight[:, -self.arch.hidden_size :].copy_(torch.eye(self.arch.hidden_size))
        self.init_layers(target)

    @property
    def layer(self) -> EagleLayer:
        """The only one."""
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def all_layers(self) -> list[EagleLayer]:
        """The only one."""
        return [self.layer]

    def head(self, depth: int) -> Head:
        """The target's head, frozen."""
        return self.target_head

    def pack(self, dtype: torch.dtype) -> Eagle1Weights:
        """Cast and concatenate the weights, differentiably."""
        fc, hidden = self.fc.weight.to(dtype), self.arch.hidden_size
        bias = self.fc.bias.to(dtype) if self.config.fc_bias else None
        return Eagle1Weights(fc[:, :hidden].contiguous(), fc[:, hidden:].contiguous(), bias, self.layer.pack(dtype))

    def read_tokens(self, weights: Eagle1Weights, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The embedding's half of fc."""
        return linear(self.embed(tokens, dtype), weights.fc_embedding)

    def read_features(self, weights: Eagle1Weights, features: Tensor) -> Tensor:
        """The state of this family is the feature itself, at every depth."""
        return features

    def advance(
        self,
        weights: Eagle1Weights,
        state: Tensor,
        from_tokens: Tensor | None,
        positions: Tensor,
        cache: DraftCache,
    ) -> DraftOutput:
        """fc and the layer; the result is the predicted feature f_{t+1}, which the head reads, too."""
        cos, sin = self.rotary(positions, state.dtype)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        fused = linear(state, weights.fc_feature, weights.fc_bias)
        if from_tokens is not None:
            fused = fused + from_tokens
        predicted = self.layer.run(weights.layer, 0, fused, None, cos, sin, cache, recompute)
        return DraftOutput(hidden=predicted, readout=predicted)

    def disturb(self, features: Tensor) -> Tensor:
        """Uniform noise while training, so that the draft bears its own errors."""
        noise = self.config.feature_noise
        if not self.training or noise == 0.0:
            return features
        return features + torch.empty_like(features).uniform_(-noise, noise)

    def recur(self, out: DraftOutput) -> Tensor:
        """HASS aligns each step on the draft's own features, without a gradient through them."""
        state = super().recur(out)
        return state.detach() if self.config.detach else state

    def depth_output(self, depth: int, out: DraftOutput) -> DepthOutput:
        """With the predicted feature, for losses on it."""
        return DepthOutput(depth, 2 + depth, out.readout, hidden=out.hidden)
