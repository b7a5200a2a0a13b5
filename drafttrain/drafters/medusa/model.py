"""Medusa heads (arXiv 2401.10774)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.arch import DraftArch
from drafttrain.drafters.base import DepthOutput, DraftBatch, DraftCache, Drafter, DraftInputs, DraftOutput
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.modeling.blocks import compute_dtype
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.compiled import compiled
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.ops.packed_linear import pack_linears


class ResidualBlocks(nn.Module):
    """n times x + SiLU(W x + b), each with weights of its own; zero weights make it the identity."""

    def __init__(
        self, hidden: int, n_layers: int, bias: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias, device=device) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDrafter(Drafter):
    """Head i reads the target's state after its final norm at t and predicts x_{t+2+i}; no recurrence, no
    cache.

    State dict: blocks.{i}.layers.{l}.weight [H, H] (and .bias) and, with own heads, lm_heads.{i}.weight [V, H].
    """

    family = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, arch: DraftArch, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config, self.arch = config, arch
        self.feature_spec = FeatureSpec((Tap.final,))
        self.vocab_map = VocabMap.full(arch.vocab_size)
        self.max_depth = config.num_heads
        hidden = arch.target_hidden_size
        self.blocks = nn.ModuleList(
            ResidualBlocks(hidden, config.num_layers, config.bias, device) for _ in range(config.num_heads)
        )
        own = config.num_heads if config.head == "own" else 0
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, arch.vocab_size, bias=False, device=device) for _ in range(own))

    @classmethod
    def from_text_config(
        cls, config: MedusaConfig, text: Any, vocab_map: VocabMap | None, device: torch.device | str | None
    ) -> MedusaDrafter:
        """Build for a target, always over its whole vocabulary. The blocks start as the identity."""
        if vocab_map is not None and not vocab_map.is_full:
            raise ValueError("medusa heads span the target's vocabulary: a smaller draft vocabulary is not possible")
        drafter = cls(config, DraftArch.from_target(text), device)
        for weight in drafter.blocks.parameters():
            nn.init.zeros_(weight)
        for weight in drafter.lm_heads.parameters():
            nn.init.normal_(weight, std=0.02)
        return drafter

    @classmethod
    def from_saved(
        cls,
        config: MedusaConfig,
        arch: dict[str, Any],
        vocab_map: VocabMap,
        device: torch.device | str | None,
    ) -> MedusaDrafter:
        """Build from the saved sizes."""
        return cls(config, DraftArch.model_validate(arch), device)

    def saved_arch(self) -> dict[str, Any]:
        """The resolved sizes, as JSON."""
        return self.arch.model_dump(mode="json")

    @torch.no_grad()
    def init_from_target(self, target: CausalLM) -> None:
        """Own heads start as copies of the target's."""
        if self.config.init_head == "target":
            head = target.head()
            for weight in self.lm_heads.parameters():
                weight.copy_(head.weight.float() * head.scale)

    def bind(self, embedding: Tensor, head: Head) -> None:
        """Keep the target's head; the embedding is not read."""
        if tuple(head.weight.shape) != (self.arch.vocab_size, self.arch.target_hidden_size):
            raise ValueError(
                f"the target's head is {tuple(head.weight.shape)}, this draft was made for "
                f"({self.arch.vocab_size}, {self.arch.target_hidden_size})"
            )
        super().bind(embedding, head)

    def head(self, depth: int) -> Head:
        """Head `depth`: its own, plain as engines serve it, or the target's."""
        if self.config.head == "own":
            weight = self.lm_heads[depth].weight
            assert isinstance(weight, Tensor)
            return Head(weight)
        return self.target_head

    def prepare_for_inference(self) -> None:
        """Eval mode, and the blocks' weights laid out for few rows. Call again after weights change."""
        self.eval()
        pack_linears(self.blocks)

    def compile_training(self) -> None:
        """The blocks; there is no attention."""
        for block in self.blocks:
            block.forward = compiled(block.forward)

    def step(self, inputs: DraftInputs, cache: DraftCache) -> DraftOutput:
        """Head `inputs.depth` on the target's features [B, T, H]; the cache is not used."""
        if inputs.features is None:
            raise ValueError("medusa reads the target's features")
        return DraftOutput(hidden=None, readout=self.read(inputs.features, inputs.depth))

    def read(self, features: Tensor, depth: int) -> Tensor:
        """What head `depth` reads of the target's features [..., H]: the same for trainer, engine and calibration."""
        readout: Tensor = self.blocks[depth](features.to(compute_dtype(next(self.parameters()))))
        return readout

    def unroll(self, batch: DraftBatch, depths: int) -> list[DepthOutput]:
        """The first `depths` heads over all slots."""
        features = batch.features[Tap.final]
        return [DepthOutput(k, 2 + k, self.read(features, k)) for k in range(depths)]
