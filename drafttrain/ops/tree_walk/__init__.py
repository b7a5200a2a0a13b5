"""Which path of a tree, or how much of a chain, the target keeps, decided on the device."""

from drafttrain.ops.tree_walk.dispatch import Family, Walk, chain_family, walk_by_match, walk_by_rejection

__all__ = ["Family", "Walk", "chain_family", "walk_by_match", "walk_by_rejection"]
