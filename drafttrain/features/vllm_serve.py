"""How vLLM is started for its states to be the features of a draft; facts of vLLM 0.32, see LOG.md."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from drafttrain.errors import RecipeError, TargetError
from drafttrain.features.config import FeaturesConfig
from drafttrain.modeling.taps import FeatureSpec, Tap, vllm_id
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import checkpoint


def state_ids(spec: FeatureSpec, n_layers: int) -> tuple[int, ...]:
    """vLLM's ids of what a draft reads and of the state before the final norm, in the order of its columns: that of the
    layers, whatever order it is given. It has no id for the state after that norm, which a client computes."""
    return tuple(sorted({vllm_id(tap, n_layers) for tap in (*spec.taps, Tap.pre_norm)}))


def served_name(model: str, ids: Iterable[int]) -> str:
    """The name under which a server offers these states: it does not say otherwise which ones they are."""
    return f"{Path(model).name}-states-{'-'.join(map(str, ids))}"


def max_model_len(longest: int, positions: int | None) -> int:
    """Tokens of the longest document, and one more: the token that every request has to ask for.

    Args:
        positions: of the target (`max_position_embeddings`), behind which vLLM does not go; None where it does not say.

    Raises:
        RecipeError: documents that leave no room for that token.
    """
    if positions is not None and longest >= positions:
        raise RecipeError(
            f"documents may be as long as the target's context, {positions} tokens: vLLM has no room for the one token "
            "more that every request has to ask for",
            where="data.max_length",
            remedy=f"cut them one earlier: data.max_length={positions - 1}",
        )
    return longest + 1


def serve_command(
    target: TargetConfig, features: FeaturesConfig, ids: Iterable[int], max_length: int, url: str
) -> list[str]:
    """The words that start the server at `url`, environment variables first.

    Args:
        ids: of `state_ids`.
        max_length: of `max_model_len`.

    Raises:
        TargetError: a GGUF file.
    """
    ids, place = list(ids), urlsplit(url)
    model = checkpoint(target)
    if model is None:
        raise TargetError("vLLM cannot be given a GGUF file here", where=target.model, remedy="name its checkpoint")
    words = ["vllm", "serve", str(model), "--served-model-name", served_name(target.model, ids)]
    port = place.port or {"https": 443}.get(place.scheme, 80)
    words += ["--host", place.hostname or "127.0.0.1", "--port", str(port), "--dtype", target.dtype]
    words += ["--revision", target.revision] if target.revision and isinstance(model, str) else []
    words += ["--tokenizer", target.tokenizer] if target.tokenizer else []
    words += ["--trust-remote-code"] if target.trust_remote_code else []
    words += ["--max-model-len", str(max_length), "--no-enable-prefix-caching"]
    states = {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": states,
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": features.exchange},
    }
    return [*words, "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]


def command_line(words: Iterable[str], token_file: str | None) -> str:
    """The command as it is typed into a shell, an option a line. The token never stands in it."""
    lines = [""]
    for word in words:
        if word.startswith("--"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {shlex.quote(word)}" if lines[-1] else shlex.quote(word)
    if token_file is not None:
        lines[0] = f'VLLM_API_KEY="$(cat {shlex.quote(token_file)})" {lines[0]}'
    return " \\\n".join(lines)
