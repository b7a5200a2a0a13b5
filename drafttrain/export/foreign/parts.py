"""Readers take what they understand out of a checkpoint; what is left over at the end is an error, never dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.drafters.arch import DraftArch
from drafttrain.errors import CheckpointError
from drafttrain.export.foreign.checkpoint import Checkpoint
from drafttrain.export.foreign.target import Target
from drafttrain.export.verify import ConfigView
from drafttrain.modeling.blocks import rope_parameters_of
from drafttrain.targets.stored import EMBEDDING

# Kinds of rotary scaling whose frequencies do not depend on `max_position_embeddings`.
_LENGTH_FREE = ("default", "linear", "llama3")
_OURS_TO_MAKE = "rotary_emb."


@dataclass
class Reading:
    """A checkpoint being read.

    Attributes:
        where: its folder, for messages.
        config: of the draft's layers.
        left: tensors that no reader has taken yet.
        target: what the draft is for.
        notes: what was converted, dropped or assumed.
    """

    where: Path
    config: dict[str, Any]
    left: dict[str, Tensor]
    target: Target
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(checkpoint: Checkpoint, target: Target, prefixes: Sequence[str] = ()) -> Reading:
        """Of a checkpoint whose names may all begin with one of `prefixes`, which is taken off."""
        tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if _OURS_TO_MAKE not in name}
        reading = Reading(checkpoint.folder, dict(checkpoint.config), tensors, target)
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in tensors):
                reading.left = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return reading

    def error(self, what: str, remedy: str | None = None) -> CheckpointError:
        """An error that names the folder."""
        return CheckpointError(what, where=self.where, remedy=remedy)

    def need(self, name: str) -> Tensor:
        """A tensor that must be there; it stays among those left."""
        if name not in self.left:
            raise self.error(f"lacks the tensor {name}")
        return self.left[name]

    def number(self, key: str, default: int | None = None) -> int:
        """A size that config.json must give."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"config.json: {key} is {value!r}, not a number", "add the key to config.json")
        return value

    def drop_zero(self, name: str, what: str) -> None:
        """Take a bias that the family does not have, if it is zero."""
        bias = self.left.pop(name, None)
        if bias is None:
            return
        if bool(bias.any()):
            raise self.error(
                f"{name} is not zero, and {what} has no bias there", "it cannot be imported without changing the draft"
            )
        self.notes.append(f"{name}: dropped, it is zero")

    def drop_copy(self, name: str, names: Sequence[str], what: str) -> None:
        """Take a copy of one of the target's tensors.

        Raises:
            CheckpointError: it differs from the target's, so that the draft was made for another one or has its own.
        """
        copy = self.left.pop(name, None)
        if copy is None:
            return
        same = self.target.stores(names, copy)
        if same is False:
            raise self.error(
                f"{name} is not the {what} of {self.target.config.model}, which this family reads",
                "give the target that the draft was made for; a draft with its own cannot be imported",
            )
        how = "it is the target's" if same else "taken for the target's, which could not be read to compare"
        self.notes.append(f"{name}: dropped, {how}")

    def finish(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was taken, after nothing was left over."""
        left = sorted(set(self.left) - set(kept))
        if left:
            raise self.error(
                f"tensors that are not understood: {', '.join(left[:8])}{', ...' if len(left) > 8 else ''}",
                "nothing is dropped silently: a draft with such parts cannot be imported",
            )
        return dict(kept)

    def drop_target_parts(self) -> None:
        """Take copies of the target's embedding, which EAGLE drafts read and do not own."""
        for name in [name for name in self.left if name.endswith("embed_tokens.weight")]:
            self.drop_copy(name, EMBEDDING, "embedding")

    def layer_arch(self, hidden: int, q_proj: str, gate_proj: str) -> DraftArch:
        """Sizes of a Llama layer: from the tensors where they say it, else from config.json."""
        config, theirs = self.config, self.target.arch
        heads = self.number("num_attention_heads")
        rows = self.need(q_proj).shape[0]
        head_dim = config.get("head_dim") or rows // heads
        if heads * head_dim != rows:
            raise self.error(f"{q_proj} has {rows} rows, config.json says {heads} heads of {head_dim}")
        return DraftArch(
            hidden_size=hidden,
            intermediate_size=self.need(gate_proj).shape[0],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),  # Llama's default
            max_position_embeddings=self._positions(theirs),
            rope_parameters=self._rotary(theirs),
            target_hidden_size=theirs.target_hidden_size,
            target_layers=theirs.target_layers,
            vocab_size=int(self.target.identity["vocab_size"]),
        )

    def _rotary(self, theirs: DraftArch) -> dict[str, Any]:
        values = {"max_position_embeddings": theirs.max_position_embeddings, **self.config}
        found = rope_parameters_of(ConfigView(values))
        if found != theirs.rope_parameters:
            self.notes.append(
                f"rotary parameters: the draft's own, {found}, which differ from the target's, {theirs.rope_parameters}"
            )
        return found

    def _positions(self, theirs: DraftArch) -> int:
        longest = theirs.max_position_embeddings
        own = self.config.get("max_position_embeddings")
        kind = rope_parameters_of(ConfigView({"max_position_embeddings": longest, **self.config}))["rope_type"]
        if not isinstance(own, int) or (own < longest and kind in _LENGTH_FREE):
            self.notes.append(f"max_position_embeddings: {own} -> {longest}, the target's")
            return longest
        return own
