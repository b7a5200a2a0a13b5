"""`drafttrain features serve RECIPE|TARGET`: run the target here for drafts that train elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.cli.common import Subparsers, positive

if TYPE_CHECKING:
    from drafttrain.targets.config import TargetConfig


def register(actions: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the action to the group `features`."""
    parser = actions.add_parser(
        "serve",
        help="run the target here for drafts that train elsewhere",
        description="Answer the feature requests of training runs with features.source=stream. Every caller must show "
        "the token. Nothing is encrypted: listen beyond loopback in a network that you trust, or behind a tunnel. "
        "SIGTERM ends it after the forward that is running.",
    )
    parser.add_argument("what", metavar="RECIPE|TARGET", help="a recipe, a run's folder, or a model as in target.model")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, such as target.device=cuda:1")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=_port, default=8700, help="0 takes a free one (default 8700)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of a TARGET; default: by machine")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the token; made where it does not exist. Default: DRAFTTRAIN_FEATURES_TOKEN, else the cache folder",
    )
    parser.add_argument("--batch-tokens", type=positive, default=8192, metavar="N", help="of one forward (8192)")
    parser.add_argument("--queue", type=positive, default=16, metavar="N", help="requests that may wait (16)")
    parser.set_defaults(run=run)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError("must be from 0 to 65535")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    config = _target(arguments)

    import signal
    import threading

    from rich.console import Console

    from drafttrain.features.server import FeatureServer, ServerLimits
    from drafttrain.features.wire import find_token
    from drafttrain.targets.load import load_target

    console = Console()
    token, found = find_token(arguments.token_file, make=True)
    console.print(f"loading the target {config.model} ({config.dtype})", highlight=False, soft_wrap=True, markup=False)
    target = load_target(config)
    target.prepare_for_inference()
    limits = ServerLimits(batch_tokens=arguments.batch_tokens, queue=arguments.queue)
    server = FeatureServer(target, token, host=arguments.host, port=arguments.port, limits=limits)

    def stop(number: int, frame: object) -> None:
        # Stopping waits for the loop that this handler interrupts.
        threading.Thread(target=server.stop).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    console.print(
        f"serving features at {server.url}; the token is in {found}", highlight=False, soft_wrap=True, markup=False
    )
    server.serve()
    console.print(f"served {server.served:,} tokens", highlight=False)
    return 0


def _target(arguments: argparse.Namespace) -> TargetConfig:
    """The target of a recipe, or the one that is named."""
    from drafttrain.errors import RecipeError
    from drafttrain.recipe.load import load_recipe
    from drafttrain.recipe.schema import RESOLVED
    from drafttrain.targets.config import AUTO, TargetConfig
    from drafttrain.targets.native import settled

    path = Path(arguments.what).expanduser()
    if path.suffix in (".yaml", ".yml") or (path / RESOLVED).is_file():
        if arguments.dtype is not None:
            raise RecipeError("the recipe says the dtype", where="--dtype", remedy="give target.dtype=... in its place")
        return load_recipe(arguments.what, arguments.overrides).target
    if arguments.overrides:
        raise RecipeError("overrides are of a recipe", where=arguments.overrides[0], remedy="use --dtype")
    return settled(TargetConfig(model=arguments.what, dtype=arguments.dtype or AUTO))
