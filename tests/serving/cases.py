"""Tiny targets and drafts for a real server: briefly fitted, so that acceptance is neither none nor all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.engine.generation import TargetGenerator
from drafttrain.export.write import export_draft
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import weights_fingerprint
from drafttrain.targets.load import weight_files
from tests.draft_support import packed
from tests.support import tiny_hf

VOCAB, LAYERS, NEW, K = 256, 8, 48, 3
SHARE = 0.4


@dataclass(frozen=True)
class Tiny:
    """A tiny Llama, the folder that it lies in, prompts for it, and its own greedy continuations of other prompts."""

    target: CausalLM
    folder: Path
    prompts: list[list[int]]
    documents: list[torch.Tensor]

    @property
    def identity(self) -> dict[str, object]:
        """As a run writes it into a draft."""
        return {
            "name": str(self.folder),
            "weights_hash": weights_fingerprint(weight_files(TargetConfig(model=str(self.folder)))),
            "tokenizer_hash": "t" * 64,
            "vocab_size": self.target.vocab_size,
            "hidden_size": self.target.hidden_size,
            "n_layers": self.target.n_layers,
        }


def tiny(folder: Path, **changes: object) -> Tiny:
    """A target of eight blocks with an untied head, saved as a checkpoint."""
    hf = tiny_hf(
        "llama",
        seed=5,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,  # a head dimension of 32: the CPU kernels have none below
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.15,
        **changes,
    )
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            # Blocks that say less than the embedding: the next token mostly follows from the last one, so that a
            # draft can learn something in a few steps.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(SHARE)
    hf.save_pretrained(folder)
    target = CausalLM(hf).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 16, (8,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    answers = {said.prompt: said.tokens for said in TargetGenerator(target).generate(prompts, max_new_tokens=NEW)}
    documents = [torch.tensor(prompt + answers[i]) for i, prompt in enumerate(prompts)]
    return Tiny(target, folder, prompts, documents)


def fitted(
    config: DrafterConfig,
    tiny: Tiny,
    steps: int,
    vocab_map: VocabMap | None = None,
    *,
    lr: float = 3e-3,
    spread: bool = True,
    length: int = 64,
) -> Drafter:
    """A draft after a few steps on the target's own answers.

    Args:
        spread: the weights first, norms included, so that every part of a draft that is hardly trained matters.
        length: of the rows, at least that of the longest document.
    """
    torch.manual_seed(0)
    draft = build_drafter(config, tiny.target.config, vocab_map)
    init_from_target(draft, tiny.target)
    if steps == 0:
        return draft.eval()
    with torch.no_grad():
        for name, weight in draft.named_parameters() if spread else ():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "lm_head" not in name and "embed" not in name and draft.family != "draft_lm":
                weight.add_(0.05 * torch.randn_like(weight))
    batch = packed(tiny.target, [[ids] for ids in tiny.documents], draft.feature_spec.taps, length=length)
    optimiser = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        loss = torch.zeros(())
        for out in draft.unroll(batch, min(draft.max_depth, K)):
            logits = draft.head(out.depth)(out.readout[:, : -out.offset])
            real = batch.segments[:, out.offset :] >= 0
            labels = torch.where(real, draft.vocab_map.to_draft[batch.tokens[:, out.offset :]], -1)
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return draft.eval()


def exported(draft: Drafter, tiny: Tiny, run: Path, engine: str = "vllm") -> Path:
    """Save a draft as a run does, export it, return the export's folder."""
    save_draft(run / "draft", draft, target=tiny.identity)
    (written,) = export_draft(run, [engine], k=K)
    return written.folder
