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


def _weights(ours: nn.Module, theirs: Any, names: tuple[str, ...], fused: str) -> list[tuple[Tensor, Tensor]]:
    """Pairs of our weight and a block's, of matrices of its own or of the one in which it keeps them together."""
    own = [getattr(ours, name).weight for name in names]
    if hasattr(theirs, fused):
        return list(zip(own, getattr(theirs, fused).weight.split([len(weight) for weight in own]), strict=True))
    return [(weight, getattr(theirs, name).weight) for weight, name in zip(own, names, strict=True)]


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
        attention = _weights(layer.self_attn, block.self_attn, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        for our, their in attention:
            our[:, -their.shape[1] :].copy_(their)
        layer.self_attn.o_proj.weight.copy_(block.self_attn.o_proj.weight)
        for our, their in _weights(layer.mlp, block.mlp, ("gate_proj", "up_proj"), "gate_up_proj"):
            our.copy_(their)
        layer.mlp.down_proj.weight.copy_(block.mlp.down_proj.weight)
        before_attention = block.input_layernorm
        # Attention and MLP that stand side by side read one norm.
        after = (getattr(block, f"{name}_layernorm", None) for name in ("pre_feedforward", "post_attention"))
        before_mlp = next((norm for norm in after if norm is not None), before_attention)
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
