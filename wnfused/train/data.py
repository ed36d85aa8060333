"""The data sets: images in memory, split into training, validation and test.

| name                    | images                | where from                           | test split           |
|-------------------------|-----------------------|--------------------------------------|----------------------|
| ``digits``              | 1,797 of 1 x 8 x 8    | scikit-learn's own package           | fixed stratified 1/5 |
| ``mnist``               | 70,000 of 1 x 28 x 28 | OpenML 554, scikit-learn's fetcher   | the last 1/7         |
| ``cifar10``, ``cifar100`` | 60,000 of 3 x 32 x 32 | OpenML 40927 and 41983, the same     | the last 1/6         |
| ``synthetic``           | 1,200 of 3 x 16 x 16  | the seed: ten patterns, and noise    | the last 1/6         |

The test split never depends on the seed (``synthetic`` apart, which is all drawn from it). Of the rest, a tenth
(rounded) drawn with the seed is held out for validation. Images are standardised, ``(x - mean) / std``: by mean and
standard deviation of all pixels of the training split for ``digits`` and ``synthetic``; by the constants of Arpit et
al.'s code for CIFAR (per channel) and MNIST (``x / 255 - 0.5``).
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wnfused.optional import require
from wnfused.train.errors import UsageError
from wnfused.train.files import write_atomically

HELD_OUT = 0.1


@dataclass(frozen=True)
class Split:
    """Raw images ``[n, channels, height, width]`` (uint8 where the source has bytes) and int64 labels ``[n]``."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Tensor | slice) -> Split:
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class Dataset:
    """Three splits; ``mean`` and ``std`` are float32 ``[channels, 1, 1]`` or ``[1, 1, 1]``, in raw units."""

    name: str
    classes: int
    train: Split
    val: Split
    test: Split
    mean: Tensor
    std: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def standardise(self, images: Tensor) -> Tensor:
        """``(x - mean) / std`` in float32."""
        return (images.float() - self.mean) / self.std


def load(name: str, seed: int = 0, folder: str | os.PathLike[str] | None = None) -> Dataset:
    """The data set ``name``, with the validation split of ``seed``.

    ``folder`` is scikit-learn's ``data_home`` for the sets that come from OpenML; None means its default
    (``$SCIKIT_LEARN_DATA``, else ``~/scikit_learn_data``).

    Raises:
        UsageError: if the name is unknown, or the data is neither cached nor within reach.
    """
    if not isinstance(name, str) or name not in _LOADERS:
        raise UsageError("data", name, f"is not a data set; there are {', '.join(names())}")
    return _LOADERS[name](seed, folder)


def names() -> list[str]:
    """The data sets there are."""
    return list(_LOADERS)


def _assemble(
    name: str, classes: int, rest: Split, test: Split, seed: int, statistics: tuple[Tensor, Tensor] | None = None
) -> Dataset:
    """Hold out the validation split, and standardise: by these, or the training split's, mean and deviation."""
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))
    held_out = round(HELD_OUT * len(rest))
    # Sorted: an image's index, on which its augmentation depends, then follows the source's order.
    val, train = rest[order[:held_out].sort().values], rest[order[held_out:].sort().values]
    if statistics is None:
        pixels = train.images.double()
        statistics = pixels.mean().float().reshape(1, 1, 1), pixels.std(correction=0).float().reshape(1, 1, 1)
    return Dataset(name, classes, train, val, test, *statistics)


def _digits(seed: int, folder: object) -> Dataset:
    datasets = require("sklearn.datasets", "--data digits")
    selection = require("sklearn.model_selection", "--data digits")
    images, labels = datasets.load_digits(return_X_y=True)
    rest, test = selection.train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    # The pixels are the integers 0 ... 16.
    whole = Split(torch.from_numpy(images).to(torch.uint8).reshape(-1, 1, 8, 8), torch.from_numpy(labels).long())
    return _assemble("digits", 10, whole[torch.tensor(rest)], whole[torch.tensor(test)], seed)


def _synthetic(seed: int, folder: object) -> Dataset:
    n, classes, shape = 1200, 10, (3, 16, 16)
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, *shape, generator=generator)
    labels = torch.arange(n) % classes
    images = patterns[labels] + 2.0 * torch.randn(n, *shape, generator=generator)
    whole = Split(images, labels)
    return _assemble("synthetic", classes, whole[: n * 5 // 6], whole[n * 5 // 6 :], seed)


# ------------------------------------------------------------------------------------------------------ OpenML


@dataclass(frozen=True)
class _Source:
    """One data set of openml.org: rows of ``prod(shape)`` bytes, channel by channel, training rows first."""

    name: str
    number: int
    classes: int
    shape: tuple[int, int, int]
    tested: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, seed: int, folder: str | os.PathLike[str] | None) -> Dataset:
        whole = self._whole(folder)
        split = len(whole) - round(len(whole) * self.tested)
        mean, std = (255 * torch.tensor(x).reshape(-1, 1, 1) for x in (self.mean, self.std))
        return _assemble(self.name, self.classes, whole[:split], whole[split:], seed, (mean, std))

    def _whole(self, folder: str | os.PathLike[str] | None) -> Split:
        """All rows. Reading the text that OpenML sends takes minutes for CIFAR, so the bytes are kept beside it."""
        numpy = require("numpy", f"--data {self.name}")
        datasets = require("sklearn.datasets", f"--data {self.name}")
        try:
            home = Path(datasets.get_data_home(None if folder is None else str(folder)))
        except OSError as error:
            raise UsageError("data_folder", folder, f"cannot be used: {error.strerror}") from None
        kept = home / "wnfused" / f"{self.name}.npz"
        if kept.exists():
            return self._read(kept, numpy)
        bunch = self._fetch(datasets, home)
        images = numpy.asarray(bunch.data, dtype=numpy.uint8)
        labels = numpy.asarray(bunch.target).astype(numpy.int64)
        whole = self._checked(images, labels, str(home))
        self._keep(kept, numpy, images, labels)
        return whole

    def _fetch(self, datasets: Any, home: Path) -> Any:
        pandas_is_here = True
        try:
            require("pandas", "OpenML")
        except ImportError:
            pandas_is_here = False
        try:
            with warnings.catch_warnings():
                # That it tries a second time is no news; that it failed is told below.
                warnings.filterwarnings("ignore", "A network error occurred")
                return datasets.fetch_openml(
                    data_id=self.number,
                    data_home=str(home),
                    as_frame=False,
                    parser="pandas" if pandas_is_here else "liac-arff",
                    n_retries=1,
                )
        except (OSError, ValueError) as error:
            raise UsageError(
                "data",
                self.name,
                f"is not in {home} and could not be fetched from openml.org ({error}); fetch it once where there is "
                f"a network, with sklearn.datasets.fetch_openml(data_id={self.number}), and name the folder with "
                "--data-folder",
            ) from error

    def _read(self, kept: Path, numpy: Any) -> Split:
        try:
            with numpy.load(kept, allow_pickle=False) as arrays:
                return self._checked(arrays["images"], arrays["labels"], str(kept))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UsageError("data", self.name, f"cannot be read from {kept} ({error}); delete that file") from error

    def _keep(self, path: Path, numpy: Any, images: Any, labels: Any) -> None:
        from io import BytesIO

        buffer = BytesIO()
        numpy.savez_compressed(buffer, images=images, labels=labels)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, buffer.getvalue())
        except OSError:
            # A read-only cache costs the next run time, and this one nothing.
            return

    def _checked(self, images: Any, labels: Any, where: str) -> Split:
        pixels = self.shape[0] * self.shape[1] * self.shape[2]
        right = images.ndim == 2 and images.shape[1] == pixels and len(images) == len(labels) > 0
        if not right or labels.min() < 0 or labels.max() >= self.classes:
            raise UsageError(
                "data",
                self.name,
                f"in {where} holds images {images.shape} and labels {labels.shape}; [n, {pixels}] and [n] with labels "
                f"0 to {self.classes - 1} were expected",
            )
        return Split(torch.from_numpy(images).reshape(-1, *self.shape), torch.from_numpy(labels))


_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

_LOADERS: dict[str, Callable[[int, str | os.PathLike[str] | None], Dataset]] = {
    "digits": _digits,
    "mnist": _Source("mnist", 554, 10, (1, 28, 28), 1 / 7, (0.5,), (1.0,)),
    "cifar10": _Source("cifar10", 40927, 10, (3, 32, 32), 1 / 6, _CIFAR_MEAN, _CIFAR_STD),
    "cifar100": _Source("cifar100", 41983, 100, (3, 32, 32), 1 / 6, _CIFAR_MEAN, _CIFAR_STD),
    "synthetic": _synthetic,
}
