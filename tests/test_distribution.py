"""What leaves the checkout: the source distribution, and the package that is built of it where there is no torch."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import wnfused

ROOT = Path(__file__).parents[1]
OF_THE_CHECKOUT_ALONE = {".ci/run", ".gitignore"}

USE = """
import torch, wnfused
with wnfused.use_backend("reference"):
    layer = wnfused.WNConv2d(3, 4, 3, padding=1, activation="relu")
    layer(torch.ones(1, 3, 5, 5)).sum().backward()
assert layer.weight_g.grad.abs().sum() > 0
print(wnfused.backend_status()["native"])
"""


def run(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    environment = {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    return {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def unpacked(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of what git knows, unpacked elsewhere."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in tracked:
        target = folder / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    run("setup.py", "--quiet", "sdist", "--dist-dir", str(folder), cwd=folder / "checkout")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_source_distribution_is_the_whole_checkout(unpacked: Path, tracked: set[str]) -> None:
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert tracked - found == OF_THE_CHECKOUT_ALONE & tracked


def test_a_folder_of_this_name_hides_nothing(tmp_path: Path) -> None:
    """A clone's parent holds one: started there, Python looks into it first."""
    try:
        importlib.metadata.distribution("wnfused")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("wnfused is not installed")
    (tmp_path / "wnfused").mkdir()
    assert run("-c", "import wnfused; print(wnfused.__version__)", cwd=tmp_path) == f"{wnfused.__version__}\n"


def test_without_torch_it_builds_a_package_in_plain_torch(unpacked: Path, tmp_path: Path) -> None:
    """As an isolated build does, which has setuptools alone, also in a checkout that has libraries of its own."""
    for planted in ("wnfused", "build/lib/wnfused"):
        (unpacked / planted).mkdir(parents=True, exist_ok=True)
        (unpacked / planted / "_cpu.abi3.so").write_bytes(b"of another build")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text("raise ImportError('no torch here')\n")
    run("setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path), cwd=unpacked, path=tmp_path / "hidden")
    (wheel,) = tmp_path.glob("*-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "package")
    assert (tmp_path / "package" / "wnfused" / "py.typed").exists()
    said = run("-W", "error", "-c", USE, cwd=tmp_path, path=tmp_path / "package")
    assert said.startswith("torch was not importable when wnfused was built; install torch first")


def make(*arguments: str) -> str:
    """What make would do."""
    of_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TORCH", "VENV")
    alone = {name: value for name, value in os.environ.items() if name not in of_make}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_again_where_another_torch_is_asked_for(tmp_path: Path) -> None:
    stamp = tmp_path / ".installed"
    stamp.write_text("torch==2.13.0\n")
    os.utime(stamp, (2**32, 2**32))  # later than every source
    assert "pip install" not in make("install", f"VENV={tmp_path}")
    assert "pip install" in make("install", f"VENV={tmp_path}", "TORCH=torch==2.12.0")
    assert "pip install" in make("install", f"VENV={tmp_path}", "--what-if=wnfused/backends/native_schemas.py")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("torch", "triton"),
    [
        ("torch==2.13.0", "triton==3.7.*; "),
        ("torch==2.13.0+cpu", "triton==3.7.*; "),
        ("torch==2.15.0", "triton; "),
        ("torch >= 2.12, < 2.14", "triton; "),
    ],
)
def test_make_hands_a_requirement_of_torch_to_pip_as_it_stands(torch: str, triton: str) -> None:
    shown = make("--always-make", "install", "VENV=nowhere", f"TORCH={torch}")
    line = next(line for line in shown.splitlines() if "setuptools" in line)
    assert shlex.split(line)[-4:-2] == [torch, f"{triton}sys_platform == 'linux'"]
