"""What ``wnfused info`` tells: versions, backends and why one is missing, the processor, threads. Torch alone."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

import torch

import wnfused
from wnfused.dispatch import backend_module, requested
from wnfused.init.registry import options_of
from wnfused.train.data import names

EXTRAS = ("lightning", "scikit-learn", "rich", "matplotlib", "triton")


def collect() -> dict[str, Any]:
    """The facts. ``backends`` holds None for an available backend, otherwise the reason, and under ``cuda`` that of the
    CUDA kernels of ``native``; ``autograd_nodes`` holds None where layers record theirs in C++, otherwise why they are
    Python's; ``layer_calls`` None where Python calls layers in C++, otherwise why by torch's op objects."""
    return {
        "wnfused": wnfused.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "instruction_set": _instruction_set(),
        "threads": torch.get_num_threads(),
        "backends": {**wnfused.backend_status(), "cuda": _cuda()},
        "autograd_nodes": backend_module("native_autograd").unavailable(),
        "layer_calls": backend_module("native_entry").unavailable(),
        "requested_backend": requested(),
        "extras": {name: _version(name) for name in EXTRAS},
        "init_schemes": list(wnfused.init.schemes()),
        "init_options": {scheme: options_of(scheme) for scheme in wnfused.init.schemes()},
        "data": names(),
    }


def as_json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=2)


def as_text(facts: dict[str, Any]) -> str:
    """One fact a line."""
    cuda = facts["cuda"] or "none, a CPU build"
    lines = [
        ("wnfused", facts["wnfused"]),
        ("python", facts["python"]),
        ("torch", f"{facts['torch']} (CUDA: {cuda})"),
        ("GPUs", ", ".join(facts["devices"]) or "none"),
        ("CPU", f"{facts['instruction_set']}, {facts['threads']} threads"),
    ]
    names = {"native": "native on CPU", "cuda": "native on CUDA"}
    order = sorted(facts["backends"], key=lambda name: name not in names)  # the two of one backend together
    lines += [(f"backend {names.get(name, name)}", facts["backends"][name] or "available") for name in order]
    lines.append(("layers' autograd", _way("recorded", "by Python", facts["autograd_nodes"])))
    lines.append(("layers' calls", _way("made", "through torch's dispatcher", facts["layer_calls"])))
    if facts["requested_backend"]:
        lines.append(("WNFUSED_BACKEND", facts["requested_backend"]))
    lines += [(name, version or "not installed") for name, version in facts["extras"].items()]
    lines += [("init schemes", ", ".join(facts["init_schemes"]))]
    lines += [(f"  {scheme}", _options(options)) for scheme, options in facts["init_options"].items() if options]
    lines += [("data sets", ", ".join(facts["data"]))]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _options(options: dict[str, Any]) -> str:
    """As ``--init-option`` takes them, at their defaults."""
    return ", ".join(f"{option}={default}" for option, default in options.items())


def _way(done: str, otherwise: str, reason: str | None) -> str:
    """How small layers are run: in C++, or for a reason in a way that takes some microseconds more each time."""
    return f"{done} {otherwise}, slower for small layers: {reason}" if reason else f"{done} in C++, the fast way"


def _instruction_set() -> str:
    """The one our kernels chose where the C++ library is there, otherwise the one that torch's kernels chose."""
    return backend_module("native").instruction_set() or torch.backends.cpu.get_cpu_capability()


def _cuda() -> str | None:
    """Why the native backend has no CUDA kernels here, None if it has."""
    return backend_module("native").cuda_unavailable()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
