"""Workloads of the benchmarks that take no time."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is part of the checkout, not of the package

from bench import workloads

LAYER = workloads.LinearLayer(group="linear", name="tiny", features=8, batch=4, peers=("eager", "plain"))
CONV = workloads.ConvLayer(group="conv3x3", name="tiny", channels=4, kernel=3, size=5, batch=2, channels_last=True)
STAGE = workloads.Stage(group="stage", name="tiny", channels=4, size=4, batch=2, blocks=3)
NETWORK = workloads.Network(group="network", name="tiny", depth=16, size=8, batch=2)
