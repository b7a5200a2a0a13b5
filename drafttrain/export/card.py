"""The model card in an exported folder: how the draft was trained, what it was measured at, how to serve it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from drafttrain.export.forecast import Forecast, describe
from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Engine, Layout
from drafttrain.export.measured import Evidence, Measurement

_NAMES = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1", "medusa": "Medusa", "draft_lm": "draft LM"}
_UNKNOWN = {"name": "unknown", "n_layers": "?", "hidden_size": "?"}


def model_card(
    ir: DraftIR,
    engine: Engine,
    layout: Layout,
    command: str,
    evidence: Evidence,
    recipe: str | None,
    expected: Forecast | None = None,
) -> str:
    """README.md.

    Args:
        command: how this folder is served.
        evidence: what was measured of the draft.
        recipe: the resolved recipe, as YAML.
        expected: what the server's counters should show.
    """
    target = ir.target.get("name", "unknown")
    parts = [
        f"# {_NAMES[ir.family]} draft for {target}",
        f"For {engine.versions}. Speculative decoding with it gives the same output as {target} alone, faster.",
        "## Serve",
        f"```\n{command}\n```",
        _serving_notes(ir, engine),
        *([] if expected is None else ["## Expected in the server", _bullets(describe(expected, engine.name))]),
        "## Measured",
        _measured(evidence.rows, evidence.in_training),
        "## Trained",
        _trained(ir),
    ]
    if layout.notes:
        parts += ["## Converted", _bullets(layout.notes)]
    if recipe is not None:
        parts += ["## Recipe", f"```yaml\n{recipe.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _serving_notes(ir: DraftIR, engine: Engine) -> str:
    lines = [
        "Serve it with the very target that it was trained for: "
        f"weights {_short(ir.target.get('weights_hash'))}, vocabulary {_short(ir.target.get('tokenizer_hash'))}."
    ]
    if ir.family == "medusa":
        lines.append(f"It has {ir.heads} heads: more draft tokens a round are an error.")
    if engine.name == "vllm":
        lines.append(
            "vLLM's counters compare to the table below: mean length = 1 + accepted / drafts; "
            "per position = accepted at i / drafts."
        )
    return "\n".join(lines)


def _measured(rows: list[Measurement], in_training: Mapping[str, Any] | None) -> str:
    parts = []
    if rows:
        table = [
            "| suite | K | T | batch | tau | per position | accepted / proposed | speed-up |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            cells = [
                row.suite,
                str(row.k),
                f"{row.temperature:g}",
                str(row.batch),
                _with_interval(row.tau, row.tau_ci),
                " / ".join("-" if p is None else f"{p:.2f}" for p in row.per_position),
                "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}",
                _with_interval(row.speedup, row.speedup_ci),
            ]
            table.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(table))
        places = sorted({f"{row.hardware}, {row.date[:10]}" for row in rows})
        parts.append(
            f"Measured in drafttrain's own engine ({'; '.join(places)}), speed-up over that engine without drafting. "
            "Acceptance carries over to a server, speed-up depends on it."
        )
    if in_training is not None:
        parts.append(
            f"While training, on held-out prompts (greedy, K={in_training['k']}): tau {in_training['tau']:.2f} "
            f"at step {in_training['step']}."
        )
    return "\n\n".join(parts) or "Not measured yet: run `drafttrain eval` on the run and export it again."


def _trained(ir: DraftIR) -> str:
    source = ir.provenance
    versions = source.get("versions") or {}
    git = source.get("git") or {}
    hardware = source.get("hardware") or {}
    facts = {
        "recipe": source.get("recipe"),
        "optimiser steps": source.get("step"),
        "target": "{name} ({n_layers} blocks, hidden {hidden_size})".format_map({**_UNKNOWN, **ir.target}),
        "taps": ", ".join(str(tap) for tap in ir.taps) or None,
        "draft vocabulary": f"{ir.vocab_map.size} of {ir.vocab_map.vocab_size} tokens",
        "share of training labels in it": _percent(source.get("coverage")),
        "share of held-out answers in it": _percent(source.get("held_out_coverage")),
        "parameters": f"{sum(t.numel() for t in ir.tensors.values()):,}, {str(ir.dtype).removeprefix('torch.')}",
        "data": ", ".join(f"{name} (SHA-256 {_short(digest)})" for name, digest in (source.get("data") or {}).items()),
        "processes": source.get("world_size"),
        "hardware": ", ".join(hardware.get("gpus") or []) or hardware.get("cpu"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "drafttrain revision": git.get("commit") and git["commit"] + (" (changed)" if git.get("dirty") else ""),
        "date": source.get("time"),
    }
    return _bullets(f"{name}: {value}" for name, value in facts.items() if value)


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"


def _short(digest: Any) -> str:
    return str(digest)[:12] if digest else "unknown"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
