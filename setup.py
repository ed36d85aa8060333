"""Builds the C++ libraries where a compiler and torch are at hand, and says why where they are not.

The libraries use LibTorch's stable ABI (target 2.11) and no Python C API: one binary serves every supported
Python and torch. A build that fails leaves a working pure-torch package; the reason is written to
``wnfused/_build.json``, which ``wnfused info`` prints.
"""

import json
import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
STABLE_ABI = [
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-DTORCH_STABLE_ONLY",
    "-DPy_LIMITED_API=0x030a0000",
]
# NaN and infinities must come out as torch gives them and results must not depend on the build, so no
# -ffast-math and no -march: kernels choose their instruction set at run time.
CPU_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]

reasons: dict[str, str] = {}


def extensions():
    try:
        from torch.utils.cpp_extension import CppExtension
    except ImportError:
        reasons["cpu"] = (
            "torch was not importable when wnfused was built; install torch first, then "
            "`pip install --no-build-isolation wnfused`"
        )
        return []
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cpu").glob("*.cpp"))
    headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h"))
    return [
        CppExtension(
            "wnfused._cpu",
            sources,
            depends=headers,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": CPU_FLAGS + STABLE_ABI},
            py_limited_api=True,
        )
    ]


def build_ext_class():
    try:
        from torch.utils.cpp_extension import BuildExtension
    except ImportError:
        return build_ext

    class OptionalBuildExtension(BuildExtension):
        """A library that does not compile is left out, with its reason recorded."""

        def run(self):
            try:
                super().run()
            except Exception as error:
                if os.environ.get("WNFUSED_REQUIRE_EXTENSIONS") == "1":
                    raise
                reasons["cpu"] = f"the C++ build failed: {str(error).strip().splitlines()[0]}"
                self.warn(f"{reasons['cpu']}; wnfused will run in plain torch")
            record(ROOT if self.inplace else Path(self.build_lib))

        def get_outputs(self):
            return [path for path in super().get_outputs() if Path(path).exists()]

    return OptionalBuildExtension


class BuildPy(build_py):
    def run(self):
        super().run()
        record(ROOT if self.editable_mode else Path(self.build_lib))


def record(root: Path) -> None:
    target = root / "wnfused" / "_build.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"not_built": reasons}, indent=1) + "\n")


setup(ext_modules=extensions(), cmdclass={"build_ext": build_ext_class(), "build_py": BuildPy})
