"""The command line: what it says, and the status it ends with."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import wnfused
from wnfused import cli, information
from wnfused.train.config import TrainConfig
from wnfused.train.errors import MissingDependencyError

TRAIN = ["train", "--depth", "16", "--epochs", "1"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The networks are tiny, and other tests want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that was refused."""
    try:
        status = cli.main(arguments)
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--depth", "101"], "--depth 101: must be 6N + 4 with N = 1, 2, ... for wrn: the nearest are 100 and 106"),
        (["--depth", "7"], "--depth 7: must be 6N + 4 with N = 1, 2, ... for wrn: the nearest is 10"),
        (["--model", "resnet", "--depth", "100"], "the nearest are 98 and 104"),
        (["--depth", "-3"], "--depth -3: must be 1 or more"),
        (["--depth", "deep"], "--depth: invalid int value: 'deep'"),
        (["--model", "vgg"], "--model: invalid choice: 'vgg' (choose from"),
        (["--model", "cnn", "--depth", "1"], "--model cnn: depth: 1 must be at least 2"),
        (["--data", "imagenet"], "--data imagenet: is not a data set; there are digits"),
        (["--init", "magic"], "--init magic: is not a scheme; there are arpit2019"),
        (["--init-option", "magic=1"], "--init arpit2019: magic: no option"),
        (["--init-option", "magic"], "'magic' must be NAME=VALUE"),
        (["--batch-size", "0"], "--batch-size 0: must be 1 or more"),
        (["--epochs", "0"], "--epochs 0: must be 1 or more"),
        (["--accumulate", "0"], "--accumulate 0: must be 1 or more"),
        (["--lr", "nan"], "--lr nan: must be a finite number, above 0"),
        (["--momentum", "-1"], "--momentum -1.0: must be a finite number, 0 or more"),
        (["--warmup", "inf"], "--warmup inf: must be a finite number"),
        (["--milestones", "3;4"], "'3;4' must be epochs with commas between them"),
        (["--precision", "8"], "--precision: invalid choice: '8'"),
        (["--devices", "many"], "--devices many: must be a number of devices or auto"),
        (["--strategy", "telepathy"], "--strategy telepathy: cannot be used here"),
        (["--recompute", "2", "--norm", "batch"], "--recompute 2: is for the weight-normalised stages"),
        (["--sead", "3"], "unrecognized arguments: --sead 3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_of_train(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    assert says in refused(capsys, *TRAIN, "--out", str(tmp_path / "run"), *arguments)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "run")
    assert f"--out {out}: cannot be written: Not a directory" in refused(capsys, *TRAIN, "--out", out)


def test_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--out" in refused(capsys, *TRAIN)


def test_training_and_resuming(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    arguments = ["--batch-size", "256", "--milestones", "1,3", "--init", "torch_default", "--init-option", "v=he"]
    assert cli.main([*TRAIN, *arguments, "--no-stack", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("epoch 1/1  lr 0.01  train loss ")
    assert "test accuracy" in printed
    config = TrainConfig.from_dict(json.loads((tmp_path / "run" / "result.json").read_text())["config"])
    assert config == TrainConfig(
        depth=16,
        epochs=1,
        batch_size=256,
        milestones=(1, 3),
        init="torch_default",
        init_options={"v": "he"},
        stack=False,
    )
    # Options that are not given are the run's; those that are have to agree.
    assert cli.main(["train", "--out", out, "--resume"]) == 0
    assert "test accuracy" in capsys.readouterr().out
    says = refused(capsys, "train", "--out", out, "--resume", "--depth", "40")
    assert "is of another configuration; asked for depth: 40, not 16" in says
    assert "holds a finished run already" in refused(capsys, *TRAIN, "--out", out)


def test_a_corrupt_checkpoint_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"nonsense")
    (tmp_path / "config.json").write_text(json.dumps({"config": TrainConfig(depth=16, epochs=1).to_dict()}))
    says = refused(capsys, *TRAIN, "--out", str(tmp_path), "--resume")
    assert f"{tmp_path / 'last.ckpt'}: is truncated or not a checkpoint of wnfused" in says


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(information, "as_text", lambda facts: warnings.warn("something is slow", stacklevel=1) or "")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["info"]) == 0
    assert capsys.readouterr().err == "wnfused: warning: something is slow\n"


def test_a_missing_library_names_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    says = refused(capsys, *TRAIN, "--out", str(tmp_path / "run"))
    assert "training needs lightning, which is not installed: pip install 'wnfused[train]'" in says


def test_a_library_that_fails_inside_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wnfused.train.errors import require

    (tmp_path / "broken_library.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there") as caught:
        require("broken_library", "this test")
    assert not isinstance(caught.value, MissingDependencyError)


# --------------------------------------------------------------------------------------------------------- info


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (wnfused.__version__, "torch", "backend native", "backend reference  available", "arpit2019"):
        assert part in text


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backends"]["reference"] is None
    assert {k: v for k, v in facts["backends"].items() if k != "cuda"} == wnfused.backend_status()
    assert facts["threads"] >= 1


@pytest.mark.parametrize("name", ["native", "cuda", "triton"])
@pytest.mark.parametrize("reason", [None, "the dog ate it"])
def test_info_require(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, reason: str | None
) -> None:
    facts = information.collect()
    facts["backends"][name] = reason
    monkeypatch.setattr(information, "collect", lambda: facts)
    assert cli.main(["info", "--require", name]) == (0 if reason is None else 1)
    says = "" if reason is None else f"wnfused info: error: --require {name}: is not available: {reason}\n"
    assert capsys.readouterr().err == says


def test_info_needs_torch_alone() -> None:
    """In a process where the extras cannot be imported; as a module, as a user would."""
    hide = "import sys; sys.modules.update(dict.fromkeys(['lightning', 'sklearn', 'rich', 'matplotlib', 'scipy']))\n"
    script = hide + "import runpy; sys.argv = ['wnfused', 'info']; runpy.run_module('wnfused', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "backend native" in done.stdout


def test_importing_wnfused_imports_no_extra() -> None:
    extras = "{'lightning', 'sklearn', 'rich', 'matplotlib', 'scipy', 'pandas'}"
    script = f"import sys, wnfused, wnfused.cli, wnfused.train; print({extras} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


# ----------------------------------------------------------------------------------------- probe, demo and bench


def test_probe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "pictures" / "norms.png"
    inits = ["--init", "arpit2019", "--init", "torch_default"]
    assert cli.main(["probe", "--depth", "22", "--samples", "8", *inits, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "arpit2019" in text
    assert "stages.2.blocks.1" in text
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["probe", "--samples", "0"], "--samples 0: must be 1 or more"),
        (["probe", "--depth", "16", "--init", "magic"], "--init magic: is not a scheme"),
        (["demo", "--minutes", "0"], "--minutes 0.0: must be above 0"),
        (["demo", "--minutes", "soon"], "--minutes: invalid float value: 'soon'"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "required"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_elsewhere(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in refused(capsys, *arguments)


def test_bench_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert (cwd / "bench" / "__main__.py").exists()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["bench", "--quick", "--group", "stage", "--help"]) == 1
    assert commands == [[sys.executable, "-m", "bench", "--quick", "--group", "stage", "--help"]]


def test_bench_without_a_checkout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wnfused, "__file__", str(tmp_path / "site-packages" / "wnfused" / "__init__.py"))
    assert "the benchmarks come with the source" in refused(capsys, "bench")
