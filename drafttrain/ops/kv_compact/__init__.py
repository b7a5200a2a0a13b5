"""Moving a tree's accepted path to the front of its row in a key/value cache."""

from drafttrain.ops.kv_compact.dispatch import kv_compact

__all__ = ["kv_compact"]
