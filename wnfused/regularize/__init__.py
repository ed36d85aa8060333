"""Orthogonal regularisation: penalties, retractions and proxies, on tensors and over whole models.

- ``Regularizer``: a penalty over all layers, ``regularizer.loss(model)``
- ``soft``, ``gain_adjusted``, ``double_soft``, ``mutual_coherence``, ``srip``: penalties, one number a matrix
- ``retract_``: a retraction of all layers, after an optimiser's step
- ``qr_retraction``, ``polar_retraction``, ``singular_value_margin``: the nearest ways back to orthogonal matrices
- ``cayley_step``: a descent step that never leaves them
- ``orthogonal_proxy``: torch's own parametrisation by orthogonal matrices

Source: Hlav 2019, "Dynamic Isometry As a Consequence of Weight Orthogonality"; Bansal, Chen & Wang 2018, "Can We Gain
More from Orthogonality Regularizations in Training Deep CNNs?".
"""

from wnfused.regularize.hard import (
    cayley_step,
    orthogonal_proxy,
    polar_retraction,
    qr_retraction,
    singular_value_margin,
)
from wnfused.regularize.model import Regularizer, retract_
from wnfused.regularize.penalties import double_soft, gain_adjusted, mutual_coherence, soft, srip

__all__ = [
    "Regularizer",
    "cayley_step",
    "double_soft",
    "gain_adjusted",
    "mutual_coherence",
    "orthogonal_proxy",
    "polar_retraction",
    "qr_retraction",
    "retract_",
    "singular_value_margin",
    "soft",
    "srip",
]
