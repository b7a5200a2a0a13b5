"""`drafttrain features vllm RECIPE`: how vLLM is started for a recipe's features."""

from __future__ import annotations

import argparse

from drafttrain.cli.common import Subparsers, add_recipe, recipe_of


def register(actions: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the action to the group `features`."""
    parser = actions.add_parser(
        "vllm",
        help="print the command with which vLLM serves a recipe's features",
        description="For a recipe with features.exchange: the command for each of features.urls, with the layer ids of "
        "the draft's taps, the dtype, the longest document and that folder. Run it in vLLM's own environment, with "
        "whatever its hardware needs added, such as --tensor-parallel-size. Reads no weights.",
    )
    add_recipe(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the commands."""
    recipe = recipe_of(arguments)

    from rich.console import Console

    from drafttrain.drafters.build import build_drafter
    from drafttrain.drafters.saving import draft_shape
    from drafttrain.errors import RecipeError
    from drafttrain.features.vllm_serve import command_line, serve_command, state_ids
    from drafttrain.recipe.servers import longest_for_vllm
    from drafttrain.targets.load import load_text_config

    features, start = recipe.features, recipe.drafter.warm_start
    if features.exchange is None:
        raise RecipeError(
            f"there is none (features.source is {features.source!r}): nothing is asked of vLLM",
            where="features.exchange",
            remedy="add features.source=vllm 'features.urls=[\"http://127.0.0.1:8000\"]' "
            "features.exchange=/dev/shm/states",
        )
    longest = longest_for_vllm(recipe)
    text = load_text_config(recipe.target)
    try:
        drafter = None if start is None else draft_shape(recipe.drafter, start)
        drafter = drafter or build_drafter(recipe.drafter, text, device="meta")
    except ValueError as error:
        raise RecipeError(str(error), where="drafter") from None
    ids = state_ids(drafter.feature_spec, int(text.num_hidden_layers))
    console = Console()
    for url in features.urls:
        words = serve_command(recipe.target, features, ids, longest, url)
        console.print(command_line(words, features.token_file), markup=False, highlight=False, soft_wrap=True)
    return 0
