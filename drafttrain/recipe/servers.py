"""The servers that a recipe takes features from: before its data is made, and when features are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from drafttrain.corpus.samples import lengths_of
from drafttrain.corpus.types import Sample
from drafttrain.errors import StoreError
from drafttrain.features.client import FeatureClient, Wanted
from drafttrain.features.store import read_manifest
from drafttrain.features.stream import StreamedFeatures
from drafttrain.features.vllm import VllmFeatures
from drafttrain.features.vllm_serve import max_model_len
from drafttrain.features.wire import find_token, given_token
from drafttrain.modeling.causal_lm import context_of
from drafttrain.modeling.taps import FeatureSpec
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.load import load_text_config
from drafttrain.targets.model import TargetModel


def check_servers(recipe: Recipe, store: Path) -> None:
    """Refuse what would else be found behind hours of answers. A server that is not there yet may come meanwhile.

    Args:
        store: of the recipe, if it has one; nobody is asked for what a complete one holds.

    Raises:
        UserError: no token, or one that a server does not take; documents for which vLLM would have no room.
    """
    config = recipe.features
    with suppress(StoreError):
        if config.stores and read_manifest(store).complete:
            return
    if config.exchange is not None:
        longest_for_vllm(recipe)
        VllmFeatures.knock(config, given_token(config.token_file))
    elif config.urls:
        StreamedFeatures.knock(config, find_token(config.token_file)[0])


def longest_for_vllm(recipe: Recipe) -> int:
    """`--max-model-len` of servers for a recipe.

    Raises:
        RecipeError: see `max_model_len`.
    """
    text = load_text_config(recipe.target)
    context, _ = context_of(text)
    return max_model_len(recipe.data.within(context).max_length, getattr(text, "max_position_embeddings", None))


def ask_servers(
    recipe: Recipe,
    spec: FeatureSpec,
    target: TargetModel,
    samples: Sequence[Sample],
    say: Callable[[str], None],
    *,
    want_top1: bool = True,
) -> FeatureClient:
    """A client of the servers, after it has compared them with the target.

    Raises:
        FeatureServerError: see `FeatureClient`.
    """
    config = recipe.features
    wanted = Wanted(spec, target.identity, recipe.target.dtype, top1=want_top1, say=say)
    if config.exchange is not None:
        longest, token = int(lengths_of(samples).max()), given_token(config.token_file)
        vllm = VllmFeatures(config, token, wanted, target=target, model=recipe.target.model, longest=longest)
        vllm.spot_check(target, samples)
        return vllm
    streamed = StreamedFeatures(config, find_token(config.token_file)[0], wanted)
    if target.runs:
        streamed.spot_check(target, samples)
    return streamed
