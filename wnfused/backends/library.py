"""The compiled libraries: where they lie, whether they were built from these sources, and opening them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parents[1]


_KINDS = {"cpu": "C++", "cuda": "CUDA", "autograd": "C++ autograd", "python": "C++ entry"}
_SCHEMAS = "wnfused/backends/native_schemas.py"
_DECLARED = {
    "cpu": ("csrc/ops.h", "csrc/needs.h", _SCHEMAS),
    "cuda": ("csrc/ops.h", "csrc/needs.h", "csrc/cuda/*", _SCHEMAS),
    "autograd": ("csrc/needs.h", "csrc/autograd/*", _SCHEMAS),
    "python": ("csrc/autograd/op.h", "csrc/python/*", _SCHEMAS),
}
"""The files that the signatures of each library stand in."""

_OF_ONE_TORCH = ("autograd", "python")


def opened(name: str) -> str | None:
    """Opens library ``_<name>``: ``"cpu"``, ``"cuda"``, ``"autograd"`` or ``"python"``; the reason if there is none for
    this Python or it does not load."""
    built = (_PACKAGE / f"_{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    library = next((file for file in built if file.exists()), None)
    file = _PACKAGE / "_build.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    reason = record.get("not_built", {}).get(name)
    if reason is not None:  # a library that is there all the same is of another build
        return str(reason)
    if library is None:
        return _not_built(_KINDS[name])
    root = _PACKAGE.parent  # has csrc/ in a checkout that the library was built in
    declarations = record.get("declarations")
    for source in sorted(found for files in _DECLARED[name] for found in root.glob(files)):
        path = source.relative_to(root).as_posix()
        declared = declarations.get(path) if isinstance(declarations, dict) else None
        if declared != hashlib.sha256(source.read_bytes()).hexdigest():
            known = "has no record of its build" if declared is None else f"was built from another {path}"
            return f"{library.name} {known}; `make install` builds it anew"
    if name in _OF_ONE_TORCH and record.get("torch") != torch.__version__:
        return (
            f"{library.name} was built for torch {record.get('torch')}, this is {torch.__version__}; "
            "`pip install --no-build-isolation .` builds it anew"
        )
    try:
        if name == "python":
            importlib.import_module(f"wnfused._{name}")
        else:
            torch.ops.load_library(str(library))
    except (ImportError, OSError) as error:
        return f"{library.name} does not load: {error}"
    return None


def _not_built(kind: str) -> str:
    """Of a package that no build has left its record in."""
    installed = _installed_elsewhere()
    if installed is None:
        return f"the {kind} library was not built; `pip install --no-build-isolation .` builds it"
    return (
        f"{_PACKAGE} holds the sources alone, and was imported in place of {installed}; start Python in another "
        "folder, or install in place, by `pip install --no-build-isolation -e .`"
    )


def _installed_elsewhere() -> Path | None:
    """The installed package that Python passed over for this one, which the folder that it was started in holds."""
    for distribution in importlib.metadata.distributions(name="wnfused"):
        package = Path(str(distribution.locate_file("wnfused")))
        if (package / "__init__.py").exists() and not package.samefile(_PACKAGE):
            return package
    return None
