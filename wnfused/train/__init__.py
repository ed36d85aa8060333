"""Training: a configuration in, a folder with checkpoints and ``result.json`` out.

>>> from wnfused.train import TrainConfig, train
>>> train(TrainConfig(depth=100, lr=0.02, batch_size=32), "runs/wrn-100")["test_accuracy"]  # doctest: +SKIP

Needs the ``train`` extra (``pip install --no-build-isolation ".[train]"``) when it is used, not when it is imported.
"""

from wnfused.optional import MissingDependencyError
from wnfused.train.checkpoint import CorruptCheckpointError
from wnfused.train.config import TrainConfig
from wnfused.train.errors import UsageError
from wnfused.train.interruption import InterruptedRun
from wnfused.train.run import train

__all__ = ["CorruptCheckpointError", "InterruptedRun", "MissingDependencyError", "TrainConfig", "UsageError", "train"]
