"""`drafttrain features build|verify|info|convert|serve|vllm`: the features of a recipe, stored or served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.cli import feature_server, features_vllm
from drafttrain.cli.common import Subparsers, add_recipe, positive, progress_bars, recipe_of
from drafttrain.files import size_text

if TYPE_CHECKING:
    from drafttrain.features.lock import Part
    from drafttrain.features.reader import StoreReader


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the group."""
    parser = subparsers.add_parser(
        "features",
        help="build, verify, show and convert stores of the target's states, or serve these",
        description="Stores of the target's states, from which drafts are trained with features.source=offline or "
        "hybrid, and servers of them, for features.source=stream and vllm.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    build = actions.add_parser(
        "build",
        help="compute what a recipe's store lacks",
        description="Prompts and answers where they are missing, then the features of every sample. Goes on after a "
        "kill. With --part, several processes or machines build one store at once.",
    )
    add_recipe(build)
    build.add_argument("--part", type=_part, metavar="K/N", help="write the K-th of N shares, K from 1")
    build.set_defaults(run=run_build)
    verify = actions.add_parser(
        "verify",
        help="check every byte of a store",
        description="Compare every shard with its checksums, and, with a recipe, the store with the recipe's target, "
        "tokenizer, template, taps and samples, and some rows with a forward of the target. 1 if anything is wrong.",
    )
    verify.add_argument("store", metavar="STORE", type=Path, help="a store's folder")
    verify.add_argument("recipe", nargs="?", help="what it has to fit")
    verify.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    verify.set_defaults(run=run_verify)
    info = actions.add_parser("info", help="what a store holds, and for what", description="Reads no features.")
    info.add_argument("store", metavar="STORE", type=Path, help="a store's folder")
    info.set_defaults(run=run_info)
    convert = actions.add_parser(
        "convert",
        help="copy a store into another element type, shard size or fewer taps",
        description="Documents are read and written one by one; an interrupted copy goes on.",
    )
    convert.add_argument("store", metavar="STORE", type=Path, help="a store's folder")
    convert.add_argument("out", metavar="OUT", type=Path, help="where the copy goes")
    convert.add_argument("--dtype", choices=("bf16", "fp32", "fp8"), help="element type; default: as it is")
    convert.add_argument("--taps", metavar="2,15,final", help="keep these taps; default: all")
    convert.add_argument("--shard-mib", type=positive, default=256, metavar="N", help="size of a shard (default 256)")
    convert.set_defaults(run=run_convert)
    feature_server.register(actions)
    features_vllm.register(actions)


def _part(text: str) -> Part:
    """K of N, counted from 1."""
    from drafttrain.features.lock import Part

    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError("must be K/N with K from 1 to N, such as 2/8")
    return Part(int(index) - 1, int(count))


def run_build(arguments: argparse.Namespace) -> int:
    """Build the store, or a part of it."""
    recipe = recipe_of(arguments)

    from rich.console import Console

    from drafttrain.features.lock import WHOLE
    from drafttrain.recipe.build import build_features, prepare_store, store_path
    from drafttrain.training.progress import ConsoleReporter

    console = Console()
    report = ConsoleReporter(console)
    store = prepare_store(recipe, report)
    part = arguments.part or WHOLE
    complete = build_features(recipe, store.target, store.identity, store.samples, report, part)
    what = "complete" if complete else f"{part} is written, other parts are not yet"
    console.print(f"{store_path(recipe)}: {what}", soft_wrap=True, highlight=False, markup=False)
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Name every damaged shard; 1 if there is one."""
    from drafttrain.errors import RecipeError, StoreError

    if arguments.recipe is None and arguments.overrides:
        raise RecipeError(
            "overrides are of a recipe", where=arguments.overrides[0], remedy="give the recipe behind the store"
        )
    recipe = None if arguments.recipe is None else recipe_of(arguments)

    from rich.console import Console

    from drafttrain.features.building import open_store, spot_check
    from drafttrain.features.reader import StoreReader
    from drafttrain.features.shard import check_shard
    from drafttrain.features.store import read_manifest, shard_folders
    from drafttrain.recipe.build import prepare_store
    from drafttrain.training.progress import ConsoleReporter

    console = Console()
    read_manifest(arguments.store)
    damaged = []
    folders = shard_folders(arguments.store)
    with progress_bars(console) as progress:
        for done, folder in enumerate(folders, 1):
            try:
                check_shard(folder, "checksum")
            except StoreError as error:
                damaged.append(str(error))
            progress("shards", done, len(folders))
    for message in damaged:
        console.print(message, style="red", markup=False, soft_wrap=True)
    if damaged:
        return 1
    reader = StoreReader(arguments.store, verify="size")
    if recipe is not None:
        store = prepare_store(recipe, ConsoleReporter(console))
        reader = open_store(arguments.store, store.identity, store.samples, "size")
        spot_check(reader, store.target, store.samples)
        console.print(
            f"fits {arguments.recipe}: {len(store.samples)} samples, rows as the target gives them", soft_wrap=True
        )
    console.print(_counts(reader), soft_wrap=True, highlight=False)
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """Print identity, counts and size."""
    from rich.console import Console

    from drafttrain.features.lock import last_writer
    from drafttrain.features.reader import StoreReader

    reader = StoreReader(arguments.store, allow_incomplete=True, verify="size")
    identity = reader.identity
    console = Console()
    for name, value in (
        ("target", f"{identity.target} (weights {identity.weights_hash[:12]}, ran in {identity.compute_dtype})"),
        ("tokenizer, template", f"{identity.tokenizer_hash[:12]}, {identity.template_hash[:12]}"),
        ("taps", f"{', '.join(identity.taps)} of {identity.hidden_size} elements in {identity.dtype}"),
        ("holds", _counts(reader)),
        ("complete", "yes" if reader.complete else "no"),
        ("written last by", last_writer(arguments.store)),
    ):
        console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _counts(reader: StoreReader) -> str:
    counts, size = reader.counts, reader.tokens * reader.identity.bytes_per_token
    shards = f"{counts['shards']:,} shard{'' if counts['shards'] == 1 else 's'}"
    return (
        f"{counts['documents']:,} documents, {counts['tokens']:,} tokens in {shards}, "
        f"{size_text(size)}, {reader.identity.bytes_per_token:,} bytes a token"
    )


def run_convert(arguments: argparse.Namespace) -> int:
    """Copy."""
    from rich.console import Console

    from drafttrain.features.building import convert_store
    from drafttrain.features.config import spell_out
    from drafttrain.features.reader import StoreReader
    from drafttrain.recipe.provenance import copy_provenance

    console = Console()
    with progress_bars(console) as progress:
        convert_store(
            arguments.store,
            arguments.out,
            dtype=spell_out(arguments.dtype),
            taps=arguments.taps.split(",") if arguments.taps else None,
            shard_bytes=arguments.shard_mib << 20,
            progress=lambda done, total: progress("tokens", done, total),
        )
    copy_provenance(arguments.store, arguments.out)
    console.print(_counts(StoreReader(arguments.out, verify="size")), soft_wrap=True, highlight=False)
    return 0
