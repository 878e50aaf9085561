"""What is in a model."""

from compressor.graph.skeleton import Skeleton, build_skeleton, load, set_weight, unload
from compressor.graph.units import Linear, ModelGraph, Unit, discover

__all__ = [
    "Linear",
    "ModelGraph",
    "Skeleton",
    "Unit",
    "build_skeleton",
    "discover",
    "load",
    "set_weight",
    "unload",
]
