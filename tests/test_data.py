"""The data sets. OpenML's are read by scikit-learn's real fetcher from a small cache written here."""

import gzip
import hashlib
import json
import urllib.error
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from wnfused.train.data import Dataset, load, names
from wnfused.train.errors import UsageError

OPENML = {"mnist": (554, 784, 10, 70), "cifar10": (40927, 3072, 10, 60), "cifar100": (41983, 3072, 100, 120)}


def write_openml_cache(home: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The four answers of openml.org's interface, as the fetcher caches them; the pixels and labels in them."""
    number, pixels, classes, n = OPENML[name]
    rng = np.random.default_rng(number)
    images = rng.integers(0, 256, (n, pixels), dtype=np.uint8)
    labels = np.arange(n) % classes
    features = [f"a{i}" for i in range(pixels)]
    arff = [f"@RELATION {name}", *(f"@ATTRIBUTE {f} REAL" for f in features)]
    arff.append("@ATTRIBUTE class {" + ",".join(map(str, range(classes))) + "}")
    arff += ["@DATA", *(",".join(map(str, [*row, label])) for row, label in zip(images, labels, strict=True))]
    content = ("\n".join(arff) + "\n").encode()

    description = {
        "id": str(number),
        "name": name,
        "version": "1",
        "format": "ARFF",
        "status": "active",
        "description": "small",
        "default_target_attribute": "class",
        "file_id": "77",
        "md5_checksum": hashlib.md5(content).hexdigest(),
        "url": f"https://www.openml.org/data/v1/download/77/{name}.arff",
    }
    columns = [
        {
            "index": str(i),
            "name": feature,
            "data_type": "nominal" if feature == "class" else "numeric",
            "is_target": str(feature == "class").lower(),
            "is_ignore": "false",
            "is_row_identifier": "false",
            "number_of_missing_values": "0",
        }
        for i, feature in enumerate([*features, "class"])
    ]
    answers = {
        f"api/v1/json/data/{number}": json.dumps({"data_set_description": description}).encode(),
        f"api/v1/json/data/features/{number}": json.dumps({"data_features": {"feature": columns}}).encode(),
        f"api/v1/json/data/qualities/{number}": json.dumps({"data_qualities": {"quality": []}}).encode(),
        f"data/v1/download/77/{name}.arff": content,
    }
    for path, answer in answers.items():
        file = home / "openml" / "openml.org" / f"{path}.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(answer))
    return images, labels


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("sklearn.datasets._openml.urlopen", refuse)


def test_digits_are_split_as_documented() -> None:
    data = load("digits", seed=0)
    assert [len(s) for s in (data.train, data.val, data.test)] == [1293, 144, 360]
    assert data.shape == (1, 8, 8)
    # Stratified: each class has a fifth of its 174 to 183 images in the test split.
    counts = data.test.labels.bincount()
    assert counts.min() >= 35
    assert counts.max() <= 37


def test_the_test_split_is_the_same_for_every_seed_and_validation_is_not() -> None:
    one, other = load("digits", seed=1), load("digits", seed=2)
    assert torch.equal(one.test.images, other.test.images)
    assert not torch.equal(one.val.images, other.val.images)
    assert torch.equal(one.val.images, load("digits", seed=1).val.images)


def test_digits_are_all_used_once() -> None:
    from sklearn.datasets import load_digits

    data = load("digits")
    used = torch.cat([s.images for s in (data.train, data.val, data.test)]).flatten(1)
    assert sorted(map(tuple, used.tolist())) == sorted(map(tuple, load_digits().data.astype(int).tolist()))


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_the_training_split_is_standardised(name: str) -> None:
    data = load(name)
    images = data.standardise(data.train.images)
    assert images.dtype == torch.float32
    # Sums over some 1e5 float32 numbers of size 1, each rounded to 6e-8.
    assert abs(images.double().mean()) < 1e-5
    assert abs(images.double().std(correction=0) - 1) < 1e-5


def test_synthetic_follows_the_seed() -> None:
    assert torch.equal(load("synthetic", 3).train.images, load("synthetic", 3).train.images)
    assert not torch.equal(load("synthetic", 3).test.images, load("synthetic", 4).test.images)


@pytest.mark.parametrize(
    ("name", "channels", "mean", "std", "sizes"),
    [
        ("mnist", 1, [0.5], [1.0], [54, 6, 10]),
        ("cifar10", 3, [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010], [45, 5, 10]),
        ("cifar100", 3, [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010], [90, 10, 20]),
    ],
)
def test_openml(
    tmp_path: Path, no_network: None, name: str, channels: int, mean: list[float], std: list[float], sizes: list[int]
) -> None:
    images, labels = write_openml_cache(tmp_path, name)
    data = load(name, folder=tmp_path)
    assert [len(s) for s in (data.train, data.val, data.test)] == sizes
    assert data.classes == OPENML[name][2]
    side = 28 if name == "mnist" else 32
    assert data.shape == (channels, side, side)
    test = torch.from_numpy(images[-sizes[2] :]).reshape(-1, channels, side, side)
    assert torch.equal(data.test.images, test), "the last rows, channel by channel"
    assert data.test.labels.tolist() == labels[-sizes[2] :].tolist()
    by_channel = [torch.tensor(x).reshape(-1, 1, 1) for x in (mean, std)]
    expected = (test / 255 - by_channel[0]) / by_channel[1]
    torch.testing.assert_close(data.standardise(data.test.images), expected, rtol=1e-5, atol=1e-5)


def test_the_second_time_the_text_is_not_read_again(tmp_path: Path, no_network: None) -> None:
    write_openml_cache(tmp_path, "mnist")
    first = load("mnist", folder=tmp_path)
    for file in (tmp_path / "openml").rglob("*.gz"):
        file.unlink()
    again = load("mnist", folder=tmp_path)
    assert torch.equal(first.train.images, again.train.images)
    assert torch.equal(first.val.labels, again.val.labels)


def test_missing_data_says_where_it_was_looked_for_and_what_to_do(tmp_path: Path, no_network: None) -> None:
    with pytest.raises(
        UsageError, match=r"--data cifar10: is not in .* no network in tests.*fetch_openml\(data_id=40927"
    ):
        load("cifar10", folder=tmp_path)


def truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def other_shape(content: bytes) -> bytes:
    import io

    buffer = io.BytesIO()
    np.savez(buffer, images=np.zeros((5, 10), dtype=np.uint8), labels=np.zeros(5, dtype=np.int64))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("damage", "says"), [(truncate, r"mnist\.npz.*delete that file"), (other_shape, r"\[n, 784\].*expected")]
)
def test_a_damaged_cache(tmp_path: Path, no_network: None, damage: Callable[[bytes], bytes], says: str) -> None:
    write_openml_cache(tmp_path, "mnist")
    load("mnist", folder=tmp_path)
    kept = tmp_path / "wnfused" / "mnist.npz"
    kept.write_bytes(damage(kept.read_bytes()))
    with pytest.raises(UsageError, match=says):
        load("mnist", folder=tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"--data imagenet: .*digits, mnist, cifar10, cifar100, synthetic"):
        load("imagenet")
    assert names() == ["digits", "mnist", "cifar10", "cifar100", "synthetic"]


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_types(name: str) -> None:
    data: Dataset = load(name)
    for split in (data.train, data.val, data.test):
        assert split.labels.dtype == torch.int64
        assert len(split.images) == len(split) > 0
        assert set(split.labels.tolist()) <= set(range(data.classes))
