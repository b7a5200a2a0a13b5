"""Where the weights of an EAGLE draft start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.drafters.eagle.layer import EagleLayer
from drafttrain.modeling.causal_lm import CausalLM


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Normal matrices (Llama's spread), no biases and unit norms."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=std)
            if child.bias is not None:
                nn.init.zeros_(child.bias)


@torch.no_grad()
def norm_weight(norm: nn.Module, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The factor that a norm effectively applies, whatever its class stores ((1 + w) in Gemma, with or
    without bias).

    An alternating +-1 input has mean 0 and unit scale, so that root mean square and layer norms both pass it
    on times their factor; the difference of both signs removes a bias.

    Returns:
        fp32 [size].
    """
    signs = torch.ones(size, device=device, dtype=dtype)
    signs[1::2] = -1
    plus, minus = norm(signs[None])[0].float(), norm(-signs[None])[0].float()
    weight: Tensor = (plus - minus) / 2 * signs.float()
    return weight


@torch.no_grad()
def layer_from_block(layer: EagleLayer, target: CausalLM, index: int) -> None:
    """Start a draft layer from a block of the target.

    q, k and v take the block's matrices on the state; what they read of the embedding stays random.

    Raises:
        ValueError: no such block, or one whose parts have other names or sizes.
    """
    if not 0 <= index < target.n_layers:
        raise ValueError(f"init_layer: the target has blocks 0..{target.n_layers - 1}, not {index}")
    block: Any = target.layers[index]
    try:
        for name in ("q_proj", "k_proj", "v_proj"):
            ours, theirs = getattr(layer.self_attn, name).weight, getattr(block.self_attn, name).weight
            ours[:, -theirs.shape[1] :].copy_(theirs)
        layer.self_attn.o_proj.weight.copy_(block.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(block.mlp, name).weight)
        before_mlp = getattr(block, "pre_feedforward_layernorm", None) or block.post_attention_layernorm
        before_attention = block.input_layernorm
    except (AttributeError, RuntimeError) as error:
        raise ValueError(
            f"init_layer: block {index} of {type(target.hf).__name__} does not fit "
            f"the draft's layer ({error}); use init_layer 'random' or the target's own sizes"
        ) from None
    size, device, dtype = target.hidden_size, target.device, target.dtype
    layer.post_attention_layernorm.weight.copy_(norm_weight(before_mlp, size, device, dtype))
    state_norm = layer.hidden_norm if layer.reads_embedding else layer.input_layernorm
    if state_norm is not None:
        state_norm.weight.copy_(norm_weight(before_attention, size, device, dtype))
