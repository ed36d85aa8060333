"""The command line: what it says, and the status it ends with."""

import json
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import wnfused
from wnfused import cli, information
from wnfused.backends import native
from wnfused.optional import MissingDependencyError
from wnfused.train import checkpoint, files
from wnfused.train.build import build
from wnfused.train.config import TrainConfig
from wnfused.train.data import load

TRAIN = ["train", "--depth", "16", "--epochs", "1"]


pytestmark = pytest.mark.usefixtures("one_thread_throughout")


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
        (["--momentum", "2"], "--momentum 2.0: must be 0 or more and below 1"),
        (["--momentum", "nan"], "--momentum nan: must be 0 or more and below 1"),
        (["--recompute", str(10**30)], f"--recompute {10**30}: must be below 2**31"),
        (["--milestones", "-1"], "--milestones (-1,): must be epochs, counted from 0"),
        (["--depth", "-3"], "--depth -3: must be 1 or more"),
        (["--depth", "deep"], "--depth: invalid int value: 'deep'"),
        (["--model", "vgg"], "--model: invalid choice: 'vgg' (choose from"),
        (["--model", "cnn", "--depth", "1"], "--model cnn: depth: 1 must be at least 2"),
        (["--data", "imagenet"], "--data imagenet: is not a data set; there are digits"),
        (["--init", "magic"], "--init magic: is not a scheme; there are arpit2019"),
        (["--init-option", "magic=1"], "--init arpit2019: magic: no option"),
        (["--init-option", "magic"], "'magic' must be NAME=VALUE"),
        (["--init-option", "sample=3"], "--init-option sample=3: is no option of scheme 'arpit2019'"),
        (["--cutout", "200"], "--cutout 200: leaves nothing of any image of 8 x 8 pixels"),
        (["--width", "100000000"], "there is not enough memory for the network; make --width 100000000 or --depth 16"),
        (["--batch-size", "0"], "--batch-size 0: must be 1 or more"),
        (["--epochs", "0"], "--epochs 0: must be 1 or more"),
        (["--accumulate", "0"], "--accumulate 0: must be 1 or more"),
        (["--lr", "nan"], "--lr nan: must be a finite number, above 0"),
        (["--momentum", "-1"], "--momentum -1.0: must be 0 or more and below 1"),
        (["--warmup", "inf"], "--warmup inf: must be a finite number"),
        (["--milestones", "3;4"], "'3;4' must be epochs with commas between them"),
        (["--precision", "8"], "--precision: invalid choice: '8'"),
        (["--devices", "many"], "--devices many: must be a number of devices or auto"),
        (["--strategy", "telepathy"], "--strategy telepathy: cannot be used here"),
        (["--recompute", "2", "--norm", "batch"], "--recompute 2: is for the weight-normalised stages"),
        (["--model", "mlp", "--stack"], "--stack True: is for the weight-normalised stages of wrn and resnet"),
        (["--norm", "batch", "--no-stack"], "--stack False: is for the weight-normalised stages of wrn and resnet"),
        (["--seed", str(2**63)], "--seed 9223372036854775808: must be below 2**63"),
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


@pytest.mark.parametrize("command", [TRAIN, ["demo"], ["bench"]], ids=lambda command: command[0])
def test_a_file_is_no_folder(capfd: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main([*command, "--out", str(tmp_path / "file")]) == cli.USAGE
    assert f"--out {tmp_path / 'file'}: is a file; name a folder" in capfd.readouterr().err


def test_a_refused_run_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "above" / "run"
    refused(capsys, *TRAIN, "--init", "he", "--init-option", "foo=3", "--out", str(out))
    assert not out.exists()
    out.mkdir(parents=True)
    refused(capsys, *TRAIN, "--init", "he", "--init-option", "foo=3", "--out", str(out))
    assert out.exists()


def test_a_folder_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --out: is empty; name a path, or . for the current folder" in refused(capsys, *TRAIN, "--out", "")


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(("file", "before", "epochs"), [("last.ckpt", 1, 1), ("result.json", 0, 3)])
def test_a_full_disk_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, before: int,
    epochs: int,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    real = files.write_atomically

    def write(path: Path, content: bytes) -> None:
        if path.name == file and path.exists() == bool(before):
            raise OSError(28, "No space left on device", str(path))
        real(path, content)

    for module in (checkpoint, files):
        monkeypatch.setattr(module, "write_atomically", write)
    arguments = ["train", "--depth", "10", "--batch-size", "512", "--epochs", "3", "--out", str(out)]
    assert cli.main(arguments) == 1
    says = capsys.readouterr().err
    assert f"No space left on device: '{out / file}'; stopped after {epochs} of 3 epochs" in says
    assert says.endswith(f"; go on with `wnfused train --out {out} --resume`\n")
    monkeypatch.undo()
    assert cli.main(["train", "--out", str(out), "--resume"]) == 0


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
    assert "is of another configuration; asked for depth: 40, not 16: a run goes on as it was begun, another" in says
    says = refused(capsys, *TRAIN, "--out", out)
    assert "holds a finished run already: choose another folder, or --resume prints its result" in says


def test_a_diverged_run_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    assert cli.main([*TRAIN, "--lr", "1e20", "--batch-size", "256", "--out", out]) == cli.DIVERGED == 3
    says = capsys.readouterr().out
    assert says.endswith(f"diverged in epoch 1: a loss was not finite -> {out}/result.json\n")
    assert cli.main(["train", "--resume", "--out", out]) == cli.DIVERGED
    assert capsys.readouterr().out == says
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert "3 if it diverged" in " ".join(capsys.readouterr().out.split())


def test_divergence_in_the_very_last_update_is_one_of_the_last_epoch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    updates = []

    def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
        updates.append(1)
        if len(updates) == 3:
            optimizer.param_groups[0]["params"][0].detach().fill_(float("nan"))

    hook = register_optimizer_step_post_hook(spoil)
    try:
        arguments = ["train", "--depth", "10", "--batch-size", "512", "--epochs", "1", "--out", str(tmp_path)]
        assert cli.main(arguments) == cli.DIVERGED
    finally:
        hook.remove()
    assert json.loads((tmp_path / "result.json").read_text())["epochs_finished"] == 1
    assert "diverged in epoch 1: a loss was not finite" in capsys.readouterr().out


def test_resuming_nothing_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "typo"
    assert cli.main([*TRAIN, "--resume", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"no run in {out}: starting one\n")
    assert cli.main(["train", "--resume", "--out", str(out)]) == 0
    assert "no run in" not in capsys.readouterr().out


def test_no_start_is_announced_in_a_folder_that_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "best.ckpt").touch()
    says = refused(capsys, *TRAIN, "--resume", "--out", str(tmp_path))
    assert "holds parts of a run, neither config.json nor last.ckpt to go on by: choose another folder" in says
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(capsys, *TRAIN, "--resume", "--out", str(tmp_path / "file" / "run"))


def test_a_run_that_was_announced_and_refused_leaves_no_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert cli.main([*TRAIN, "--resume", "--init-option", "sample=3", "--out", str(out)]) == 2
    assert capsys.readouterr().out == f"no run in {out}: starting one\n"
    assert not out.exists()


@pytest.fixture
def heeds_signals() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would the test-suite in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    out, before = tmp_path / "my run", [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    arguments = ["train", "--depth", "10", "--batch-size", "512", "--out", str(out)]
    stop_in = 0

    def on_batch(self: object, epoch: int, done: int, batches: int) -> None:
        if epoch == stop_in:
            signal.raise_signal(number)

    monkeypatch.setattr("wnfused.train.console.Console.on_batch", on_batch)
    go_on = f"go on with `wnfused train --out '{out}' --resume`"
    assert cli.main([*arguments, "--epochs", "3"]) == status
    assert capsys.readouterr().err == (
        f"wnfused train: error: stopped after 0 of 3 epochs; no epoch was finished, so nothing is kept; {go_on}\n"
    )
    stop_in = 1
    assert cli.main(["train", "--out", str(out), "--resume"]) == status
    assert f"stopped after 1 of 3 epochs; {out / 'last.ckpt'} is kept; {go_on}" in capsys.readouterr().err
    assert not (out / "result.json").exists()
    stop_in = -1
    assert cli.main(["train", "--out", str(out), "--resume"]) == 0
    assert json.loads((out / "result.json").read_text())["epochs_finished"] == 3
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_error_of_another_process_than_the_first_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable = tmp_path / "wnfused" / "mnist.npz"
    unreadable.parent.mkdir()
    unreadable.write_bytes(b"cut off")
    monkeypatch.setenv("RANK", "3")
    says = refused(capsys, *TRAIN, "--data", "mnist", "--data-folder", str(tmp_path), "--out", str(tmp_path / "run"))
    assert says.startswith(f"wnfused train: error: process 3: --data mnist: cannot be read from {unreadable} (")


@pytest.mark.usefixtures("heeds_signals")
def test_one_process_tells_of_what_stopped_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(information, "collect", lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["info"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_other_commands_stop_with_the_signal_s_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(information, "collect", lambda: signal.raise_signal(number))
    assert cli.main(["info"]) == 128 + number
    assert capsys.readouterr().err == "wnfused info: error: stopped\n"


def test_a_backend_that_cannot_train_leaves_the_folder_free(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [*TRAIN, "--depth", "10", "--batch-size", "256", "--out", str(tmp_path / "run")]
    with wnfused.use_backend("triton"):
        says = refused(capsys, *arguments)
    assert "cannot run on backend 'triton'" in says
    assert not (tmp_path / "run" / "config.json").exists()
    assert cli.main(arguments) == 0


def test_a_backend_that_was_not_built_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "unavailable", lambda: "it was not built")
    with wnfused.use_backend("native"):
        says = refused(capsys, *TRAIN, "--out", str(tmp_path / "run"))
    assert "cannot run on backend 'native': it was not built" in says
    assert not (tmp_path / "run").exists()


def test_a_mini_batch_of_one_image_under_batch_norm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["train", "--model", "mlp", "--depth", "1", "--norm", "batch", "--out", str(tmp_path / "run")]
    says = refused(capsys, *arguments, "--batch-size", "1")
    assert "--batch-size 1: leaves a mini-batch of one image, too few for batch norm" in says
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "config.json: cannot be read: Expecting property name"),
        ("config.json", "[1]", "config.json: cannot be read: it holds no configuration"),
        ("config.json", '{"config": {"depth": "x"}}', "config.json: cannot be read"),
        ("config.json", "{}", "config.json: cannot be read: it holds no configuration"),
        ("config.json", '{"config": "x"}', "config.json: cannot be read: it holds no configuration; delete it"),
        ("config.json", b"\xff\xfe", "config.json: cannot be read"),
        ("result.json", "{", "result.json: cannot be read: Expecting property name"),
        ("result.json", "[]", "result.json: is no result of `wnfused train`; delete it"),
        ("result.json", "{}", "result.json: is no result of `wnfused train`; delete it"),
        ("result.json", b"\xff\xfe", "result.json: cannot be read"),
        ("last.ckpt", "", "last.ckpt: is truncated or not a checkpoint of wnfused"),
        ("last.ckpt", "x" * 1000, "last.ckpt: is truncated or not a checkpoint of wnfused"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_corrupt_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str, content: str | bytes, says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": TrainConfig(depth=16, epochs=1).to_dict()}))
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"{tmp_path}/{says}" in refused(capsys, "train", "--out", str(tmp_path), "--resume")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"wnfused {wnfused.__version__}\n"


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
    assert "training needs lightning, which is not installed: in the checkout, pip install" in says


def test_a_library_that_fails_inside_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wnfused.optional import require

    (tmp_path / "broken_library.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there") as caught:
        require("broken_library", "this test")
    assert not isinstance(caught.value, MissingDependencyError)


# --------------------------------------------------------------------------------------------------------- info


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (wnfused.__version__, "torch", "backend native on CPU", "backend native on CUDA", "arpit2019"):
        assert part in text
    assert ["mishkin2016", "tolerance=0.1,", "steps=10"] in [line.split() for line in text.splitlines()]
    assert re.search(r"^backend reference +available$", text, re.M)


def test_the_help_says_where_options_of_a_scheme_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    assert "an option of the scheme; `wnfused info` lists them" in " ".join(capsys.readouterr().out.split())


def test_info_says_what_each_way_of_running_costs() -> None:
    facts = information.collect()
    fast = information.as_text({**facts, "autograd_nodes": None, "layer_calls": None})
    assert re.search(r"^layers' autograd +recorded in C\+\+, the fast way$", fast, re.M)
    assert re.search(r"^layers' calls +made in C\+\+, the fast way$", fast, re.M)
    slow = information.as_text({**facts, "autograd_nodes": "not built", "layer_calls": "not loaded"})
    assert re.search(r"^layers' autograd +recorded by Python, slower for small layers: not built$", slow, re.M)
    assert re.search(
        r"^layers' calls +made through torch's dispatcher, slower for small layers: not loaded$", slow, re.M
    )


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backends"]["reference"] is None
    assert {k: v for k, v in facts["backends"].items() if k != "cuda"} == wnfused.backend_status()
    assert facts["threads"] >= 1
    assert facts["init_options"]["mishkin2016"] == {"tolerance": 0.1, "steps": 10}


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


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_outputs_are_no_error(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m wnfused info {closed}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("init schemes" in done.stdout) == (closed == "2>&-")


# ----------------------------------------------------------------------------------------- probe, demo and bench


PROBE = ["probe", "--depth", "10", "--samples", "6"]


def test_probe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "pictures" / "norms.png"
    inits = ["--init", "arpit2019", "--init", "torch_default"]
    assert cli.main([*PROBE, *inits, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "arpit2019" in text
    assert "stages.2.transition" in text
    assert out.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.with_suffix(".json").read_text())
    assert (content["what"], content["samples"], content["config"]["depth"]) == ("norms", 6, 10)
    assert list(content["results"]) == ["arpit2019", "torch_default"]
    norms = content["results"]["arpit2019"]
    assert len(norms["activations"]) == len(norms["names"]) == 5
    # The same arguments, the same numbers.
    assert cli.main([*PROBE, *inits, "--out", str(out)]) == 0
    assert json.loads(out.with_suffix(".json").read_text()) == content


def test_probe_says_what_a_scheme_could_not_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([*PROBE, "--init", "zhang2019", "--out", str(tmp_path / "p.png")]) == 0
    says = capsys.readouterr().err
    note = "branches outside of FixupBlock have no scalar multipliers and biases"
    assert says == f"wnfused: warning: --init zhang2019: {note}\n"


def test_probe_measures_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from wnfused.train.probe import MEASUREMENTS

    whats = [part for name in MEASUREMENTS for part in ("--what", name)]
    assert cli.main([*PROBE, "--samples", "3", *whats, "--out", str(tmp_path / "p.png")]) == 0
    text = capsys.readouterr().out
    for name in MEASUREMENTS:
        assert (tmp_path / f"p-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((tmp_path / f"p-{name}.json").read_text())["what"] == name
    assert text.count("3 images") == len(MEASUREMENTS)
    with pytest.raises(SystemExit):
        cli.main(["probe", "--help"])
    help = capsys.readouterr().out
    assert all(name in help for name in MEASUREMENTS)


def test_probe_of_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "p.png"
    assert cli.main([*TRAIN, "--depth", "10", "--batch-size", "256", "--lr", "0.1", "--out", str(run)]) == 0
    # The depth is the checkpoint's; beside it the network as it was before training.
    assert (
        cli.main(["probe", "--samples", "4", "--checkpoint", str(run), "--init", "arpit2019", "--out", str(out)]) == 0
    )
    results = json.loads(out.with_suffix(".json").read_text())["results"]
    assert list(results) == ["arpit2019", str(run / "best.ckpt")]
    trained = wnfused.models.wrn(10, in_channels=1)
    content = torch.load(run / "best.ckpt", weights_only=True)["state_dict"]
    state = {name.removeprefix("model."): value for name, value in content.items()}
    trained.load_state_dict(state)
    torch.save(trained.state_dict(), tmp_path / "plain.pt")
    arguments = ["probe", "--samples", "4", "--checkpoint", str(tmp_path / "plain.pt"), "--out", str(out)]
    assert cli.main([*arguments, "--depth", "10"]) == 0
    plain = json.loads(out.with_suffix(".json").read_text())["results"][str(tmp_path / "plain.pt")]
    assert plain["activations"] == results[str(run / "best.ckpt")]["activations"]
    capsys.readouterr()
    assert "does not fit the model" in refused(capsys, *arguments, "--depth", "16")
    says = refused(capsys, "probe", "--checkpoint", str(run), "--depth", "16", "--out", str(out))
    assert "best.ckpt: is of depth 10, but what was asked for is of 16" in says
    (tmp_path / "nonsense.pt").write_bytes(b"nonsense")
    says = refused(capsys, "probe", "--checkpoint", str(tmp_path / "nonsense.pt"), "--out", str(out))
    assert f"--checkpoint {tmp_path / 'nonsense.pt'}: is neither a whole checkpoint" in says
    says = refused(capsys, "probe", "--checkpoint", str(tmp_path / "missing.pt"), "--out", str(out))
    assert "missing.pt: cannot be read: No such file or directory" in says


def test_probe_builds_each_stored_network_by_its_own_scheme(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wnfused.train.probe.save_together", lambda *_, **__: None)  # no picture
    out, data = tmp_path / "p.png", load("digits")

    def stored(init: str, **options: object) -> list[str]:
        config = TrainConfig(depth=10, init=init, init_options=options)
        state = {f"model.{name}": value for name, value in build(config, data).state_dict().items()}
        checkpoint.save(tmp_path / init, {"state_dict": state, "wnfused": {"config": config.to_dict()}})
        return ["--checkpoint", str(tmp_path / init)]

    def probed(*arguments: str) -> dict[str, object]:
        assert cli.main(["probe", "--samples", "4", "--out", str(out), *arguments]) == 0
        return json.loads(out.with_suffix(".json").read_text())["results"]

    half, lsuv, he = stored("half_scaling"), stored("mishkin2016", tolerance=0.05), stored("torch_default", v="he")
    assert probed(*half, *lsuv, *he) == {**probed(*half), **probed(*lsuv), **probed(*he)}
    # A scheme that is named takes the options that are given, and none of a run's.
    alone = probed("--depth", "10", "--init", "arpit2019")
    for checkpoint_of in (lsuv, he):
        assert probed(*checkpoint_of, "--init", "arpit2019")["arpit2019"] == alone["arpit2019"]
    loose = ["--init", "mishkin2016", "--init-option", "tolerance=0.5"]
    assert probed(*half, *loose) == {**probed(*half), **probed("--depth", "10", *loose)}
    capsys.readouterr()
    says = refused(capsys, "probe", *lsuv, "--init-option", "tolerance=0.5", "--out", str(out))
    assert "--init-option tolerance=0.5: is for the schemes of --init, and none is named" in says


@pytest.mark.parametrize(
    ("picture", "file", "content", "says"),
    [
        ("result.png", "result.json", '{"test_accuracy": 1}', "has its numbers in result.json, which is a run's file"),
        ("config.svg", "last.ckpt", "", "has its numbers in config.json, which is a run's file"),
        ("p.png", "p.json", '{"what": "norms"}', "p.json, which `wnfused probe` did not write; choose another name"),
        ("p.png", "p.json", "[", "p.json, which `wnfused probe` did not write; choose another name"),
        ("p.png", "p.json/file", "", "cannot be written: p.json: Is a directory"),
    ],
)
def test_probe_overwrites_no_one_else_s_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, picture: str, file: str, content: str, says: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    out = tmp_path / picture
    assert f"--out {out}: {says}" in refused(capsys, *PROBE, "--out", str(out)).replace(
        f"would overwrite {tmp_path}/", ""
    )
    assert (tmp_path / file).read_text() == content
    assert not out.exists()


def test_probe_of_one_image_under_batch_norm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["probe", "--model", "mlp", "--depth", "2", "--norm", "batch", "--out", str(tmp_path / "p.png")]
    assert "--samples 1: is too few for batch norm" in refused(capsys, *arguments, "--samples", "1")
    assert cli.main([*arguments, "--samples", "2", "--what", "jacobian"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["probe", "--samples", "0"], "--samples 0: must be 1 or more"),
        (["probe", "--checkpoint", ""], "argument --checkpoint: is empty; name a path, or . for the current folder"),
        (["probe", "--depth", "16", "--init", "magic"], "--init magic: is not a scheme"),
        (["probe", "--out", "p.txt"], "--out p.txt: is no name of a picture; end it in .png, .pdf, .svg"),
        (["probe", "--out", "/proc/p.png"], "--out /proc/p.png: cannot be written"),
        (["probe", "--model", "mlp", "--stack"], "--stack True: is for the weight-normalised stages of wrn and resnet"),
        (["probe", "--what", "luck"], "--what luck: is no measurement; there are norms, hessian"),
        (
            ["probe", "--what", "similarity", "--samples", "1", "--depth", "10"],
            "--samples 1: is too few for similarity",
        ),
        (["demo", "--minutes", "0"], "--minutes 0.0: must be above 0"),
        (["demo", "--minutes", "soon"], "--minutes: invalid float value: 'soon'"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "required"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_elsewhere(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize(("code", "status"), [(0, 0), (1, 1), (-signal.SIGKILL, 137)])
def test_bench_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, code: int, status: int) -> None:
    commands = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["bench", "--quick", "--group", "stage", "--help"]) == status
    checkout = Path(__file__).parents[1]
    (command,) = commands
    assert command[-6:] == ["--out", str(checkout / "build" / "bench"), "--quick", "--group", "stage", "--help"]


def test_bench_runs_where_the_user_is(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", "bench.json").write_text("{}")
    Path("bench.py").write_text("raise SystemExit('the wrong module')")
    assert cli.main(["bench", "--show", "--out", "run"]) == cli.USAGE
    assert capfd.readouterr().err.startswith("wnfused bench: error: --out run: run/bench.json: schema None, this is ")


def test_bench_without_a_checkout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wnfused, "__file__", str(tmp_path / "site-packages" / "wnfused" / "__init__.py"))
    assert "the benchmarks come with the source" in refused(capsys, "bench")


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As ``wnfused info | head -1``."""
    command = [sys.executable, "-m", "wnfused", "info"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE
