"""What the papers measure of a network."""

from wnfused.diagnostics.norms import Norms, layer_norms

__all__ = ["Norms", "layer_norms"]
