"""Tests of the Triton kernels themselves: on a GPU where there is one, else in Triton's interpreter.

The interpreter is chosen before triton is imported and for a whole process, so without a GPU these files are left out
of an ordinary run; ``tests/test_triton.py`` runs each of them in a process with TRITON_INTERPRET=1.
"""

import os

import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() else ["test_*.py"]
