"""EAGLE-3 (arXiv 2503.01840) with the switches of 3.1 (arXiv 2605.09992)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from drafttrain.drafters.arch import DraftArch
from drafttrain.drafters.base import DraftCache, DraftOutput
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.eagle.initialise import initialise, norm_weight
from drafttrain.drafters.eagle.layer import EagleLayer, LayerWeights
from drafttrain.modeling.blocks import RMSNorm
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import FeatureSpec
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.ops.packed_linear import Matrix, linear
from drafttrain.ops.recompute import normed_linear, rms_norm


class Eagle3Weights(NamedTuple):
    """Packed weights in the compute dtype."""

    fc: Matrix
    fc_norms: tuple[Tensor, ...]
    layers: tuple[LayerWeights, ...]
    norm: Tensor


class Eagle3Drafter(EagleDrafter[Eagle3Weights]):
    """Taps -> fc -> one decoder layer that also reads the token's embedding -> norm -> head over the draft
    vocabulary.

    State dict: fc, fc_norm.{i} or input_norm where switched on, midlayer.*, (layers.{i}.* beyond the first),
        norm,
    lm_head, d2t, t2d.
    """

    family = "eagle3"
    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        arch: DraftArch,
        vocab_map: VocabMap,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(arch, device)
        if vocab_map.vocab_size != arch.vocab_size:
            raise ValueError(
                f"the vocabulary map is for {vocab_map.vocab_size} tokens, the target has {arch.vocab_size}"
            )
        self.config = config
        self.feature_spec = FeatureSpec.of(config.taps_for(arch.target_layers))
        self.feature_spec.check(arch.target_layers)
        self.max_depth = config.depth
        self.n_layers = config.num_layers
        n_taps, eps = len(self.feature_spec.taps), arch.rms_norm_eps
        width = n_taps * arch.target_hidden_size
        self.input_norm = RMSNorm(width, eps, device) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(arch.target_hidden_size, eps, device) for _ in range(n_taps))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(width, arch.hidden_size, bias=False, device=device)
        self.midlayer = EagleLayer(
            arch, reads_embedding=True, norm_before_residual=config.norm_before_residual, device=device
        )
        more = {str(i): EagleLayer(arch, reads_embedding=False, device=device) for i in range(1, config.num_layers)}
        self.layers = nn.ModuleDict(more)
        self.norm = RMSNorm(arch.hidden_size, eps, device)
        self.lm_head = nn.Linear(arch.hidden_size, vocab_map.size, bias=False, device=device)
        self.lm_head.weight.requires_grad_(config.train_head)
        self.register_buffer("d2t", vocab_map.d2t.clone().to(device))
        self.register_buffer("t2d", vocab_map.t2d.clone().to(device))
        self._map: VocabMap | None = None

    @classmethod
    def from_text_config(
        cls, config: Eagle3Config, text: Any, vocab_map: VocabMap | None, device: torch.device | str | None
    ) -> Eagle3Drafter:
        """Build for a target; the state dict's names are those of serving engines."""
        arch = cls.arch_for(config, text, config.hidden_size)
        drafter = cls(config, arch, vocab_map or VocabMap.full(arch.vocab_size), device)
        initialise(drafter)
        return drafter

    @classmethod
    def from_saved(
        cls,
        config: Eagle3Config,
        arch: dict[str, Any],
        vocab_map: VocabMap,
        device: torch.device | str | None,
    ) -> Eagle3Drafter:
        """Build from the saved sizes."""
        return cls(config, DraftArch.model_validate(arch), vocab_map, device)

    @torch.no_grad()
    def init_from_target(self, target: CausalLM) -> None:
        """Head rows and final norm, the layers and fc, each as the config says."""
        self._check_width()
        if self.config.init_head == "target":
            self._init_head(target)
        self.init_layers(target)
        if self.config.init_fc == "last":
            self.fc.weight.zero_()
            self.fc.weight[:, -self.arch.hidden_size :].fill_diagonal_(1.0)

    def check_start(self, target: CausalLM) -> None:
        """See `Drafter.check_start`."""
        self._check_width()
        super().check_start(target)

    def _check_width(self) -> None:
        if self.arch.hidden_size == self.arch.target_hidden_size:
            return
        if self.config.init_head == "target":
            raise ValueError("init_head 'target' needs a draft as wide as the target: use init_head 'random'")
        if self.config.init_fc == "last":
            raise ValueError("init_fc 'last' needs a draft as wide as the target")

    def _init_head(self, target: CausalLM) -> None:
        head = target.head()
        ids = self.vocab_map.target_ids.to(head.weight.device)
        self.lm_head.weight.copy_(head.weight[ids].float() * head.scale)
        self.norm.weight.copy_(norm_weight(target.norm, self.arch.hidden_size, target.device, target.dtype))

    @property
    def vocab_map(self) -> VocabMap:  # type: ignore[override]
        """The map in the buffers d2t and t2d, on their device."""
        if self._map is None or self._map.d2t is not self.d2t:
            self._map = VocabMap(self.d2t, self.t2d)
        return self._map

    def _load_from_state_dict(self, *args: Any) -> None:
        # The buffers keep their identity but not their content.
        self._map = None
        super()._load_from_state_dict(*args)

    def all_layers(self) -> list[EagleLayer]:
        """The one that reads taps and tokens, and those beyond it."""
        return [self.midlayer, *cast("Iterable[EagleLayer]", self.layers.values())]

    def head(self, depth: int) -> Head:
        """The trained head, the same at every depth: plain, as engines serve it."""
        return Head(self.lm_head.weight)

    def pack(self, dtype: torch.dtype) -> Eagle3Weights:
        """Cast and concatenate the weights, differentiably."""
        norms: list[nn.Module] = list(self.fc_norm or ()) if self.input_norm is None else [self.input_norm]
        return Eagle3Weights(
            fc=self.fc.weight.to(dtype),
            fc_norms=tuple(norm.get_parameter("weight").to(dtype) for norm in norms),
            layers=tuple(layer.pack(dtype) for layer in self.all_layers()),
            norm=self.norm.weight.to(dtype),
        )

    def read_tokens(self, weights: Eagle3Weights, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The embedding's part of the first layer's q, k and v."""
        return self.midlayer.read_embedding(weights.layers[0], self.embed(tokens, dtype))

    def read_features(self, weights: Eagle3Weights, features: Tensor) -> Tensor:
        """Norms where switched on, then fc."""
        eps = self.arch.rms_norm_eps
        if self.input_norm is not None:
            return normed_linear(features, weights.fc_norms[0], eps, weights.fc)[1]
        if weights.fc_norms:
            parts = features.chunk(len(weights.fc_norms), dim=-1)
            normed = [rms_norm(part, norm, eps) for part, norm in zip(parts, weights.fc_norms, strict=True)]
            features = torch.cat(normed, dim=-1)
        return linear(features, weights.fc)

    def advance(
        self,
        weights: Eagle3Weights,
        state: Tensor,
        from_tokens: Tensor | None,
        positions: Tensor,
        cache: DraftCache,
    ) -> DraftOutput:
        """The layers, then the norm that the head reads behind in every variant."""
        cos, sin = self.rotary(positions, state.dtype)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for index, (layer, packed) in enumerate(zip(self.all_layers(), weights.layers, strict=True)):
            part = from_tokens if index == 0 else None
            state = layer.run(packed, index, state, part, cos, sin, cache, recompute)
        readout = rms_norm(state, weights.norm, self.arch.rms_norm_eps)
        return DraftOutput(hidden=readout if self.config.norm_output else state, readout=readout)
