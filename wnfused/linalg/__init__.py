"""Factorisations of many small matrices at once: orthogonal factors, eigenvectors, singular vectors."""

from wnfused.linalg.eigen import symmetric_eigh
from wnfused.linalg.orthogonal import orthogonal_batched
from wnfused.linalg.singular import economy_svd

__all__ = ["economy_svd", "orthogonal_batched", "symmetric_eigh"]
