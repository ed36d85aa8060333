"""Initialisation: schemes by name, one file each, for a layer or a whole model; batched orthogonal matrices."""

from wnfused.init import (  # noqa: F401, each registers its scheme
    arpit2019,
    daneshmand2021,
    glorot2010,
    half_scaling,
    hanin2018,
    he2015,
    mishkin2016,
    salimans2016,
    saxe2014,
    torch_default,
    xiao2018,
    zhang2019,
)
from wnfused.init.layer import reset_layer_, reset_stage_
from wnfused.init.population import initialize_population
from wnfused.init.registry import initialize, schemes
from wnfused.init.report import Entry, Report
from wnfused.init.roles import Role, find_roles
from wnfused.linalg import orthogonal_batched

__all__ = [
    "Entry",
    "Report",
    "Role",
    "find_roles",
    "initialize",
    "initialize_population",
    "orthogonal_batched",
    "reset_layer_",
    "reset_stage_",
    "schemes",
]
