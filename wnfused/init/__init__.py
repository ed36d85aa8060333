"""Initialisation: schemes by name, one file each, for a layer or a whole model; batched orthogonal matrices."""

from wnfused.init import arpit2019, torch_default
from wnfused.init.layer import reset_layer_, reset_stage_
from wnfused.init.orthogonal import orthogonal_batched
from wnfused.init.registry import Entry, Report, initialize, schemes
from wnfused.init.roles import Role, find_roles

__all__ = [
    "Entry",
    "Report",
    "Role",
    "arpit2019",
    "find_roles",
    "initialize",
    "orthogonal_batched",
    "reset_layer_",
    "reset_stage_",
    "schemes",
    "torch_default",
]
