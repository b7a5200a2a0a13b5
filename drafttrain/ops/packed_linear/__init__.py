"""Matrix products with few rows against weights laid out for them, on CPUs."""

from drafttrain.ops.packed_linear.dispatch import Matrix, PackedWeight, linear, pack, pack_tree
from drafttrain.ops.packed_linear.modules import PackedProduct, is_packed, pack_linears, packed_product

__all__ = [
    "Matrix",
    "PackedProduct",
    "PackedWeight",
    "is_packed",
    "linear",
    "pack",
    "pack_linears",
    "pack_tree",
    "packed_product",
]
