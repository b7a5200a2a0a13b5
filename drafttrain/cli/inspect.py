"""`drafttrain inspect RECIPE [key=value ...]`: training samples, with the supervised tokens coloured."""

from __future__ import annotations

import argparse

from drafttrain.cli.common import Subparsers, add_recipe, chat_of, recipe_of


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="show training samples with the supervised tokens coloured",
        description="Tokenise a recipe's conversations as training does, and show some with their loss mask: context "
        "is dim, the first token of an answer (which the target writes itself) yellow, labels green and cyan.",
    )
    add_recipe(parser)
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="how many to show (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    parser.add_argument("--color", action="store_true", help="colours even where the output is no terminal")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show samples, then the counts of the whole corpus."""
    recipe = recipe_of(arguments)

    import random

    from rich.console import Console

    from drafttrain.corpus.dataset import build_corpus
    from drafttrain.corpus.inspect import corpus_table, inspect_samples
    from drafttrain.modeling.causal_lm import context_of
    from drafttrain.recipe.conversations import present_conversations
    from drafttrain.targets.load import load_text_config

    conversations = present_conversations(recipe)
    chat = chat_of(recipe)
    text = load_text_config(recipe.target)
    context, _ = context_of(text)
    corpus = build_corpus(
        conversations,
        chat,
        max_length=recipe.data.within(context).max_length,
        vocab_size=text.vocab_size,
        supervise=recipe.data.supervise,
    )
    count = max(0, min(arguments.samples, len(corpus.samples)))
    chosen = random.Random(arguments.seed).sample(corpus.samples, count)
    console = Console(force_terminal=True if arguments.color else None)
    console.print(inspect_samples(chosen, chat.tokenizer))
    console.print(corpus_table(corpus))
    if note := recipe.data.cut_note(context):
        console.print(note, highlight=False)
    return 0
