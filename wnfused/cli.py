"""The command line: ``wnfused info | demo | train | probe | bench``.

A wrong argument ends with status 2 and one line that names it, its value and what would be right; a training run that
diverged with status 3. ``info`` needs torch alone; the others say which extra to install when a library is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import wnfused
from wnfused.optional import MissingDependencyError, require
from wnfused.train.errors import UsageError
from wnfused.train.interruption import signal_of, sigterm_raises
from wnfused.train.launch import is_first_process, process_number
from wnfused.train.options import add_options, fields_of, from_options

# Wrong input of any kind; 1 is for what went wrong with right input.
USAGE = 2

# A training run whose loss was not finite: its result is written, but a script must not go on as if it had trained.
DIVERGED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    _open_closed_outputs()
    parser = _parser()
    parsed, others = parser.parse_known_args(arguments)
    options = vars(parsed)
    command, run = options.pop("command"), options.pop("run")
    if command == "bench":
        # Whose options are its own.
        options["arguments"] = others
    elif others:
        return _fail(command, f"unrecognized arguments: {' '.join(others)}", USAGE)
    from wnfused.train.checkpoint import CorruptCheckpointError

    try:
        wnfused.dispatch.requested()
    except ValueError as error:  # WNFUSED_BACKEND names none
        return _fail(command, error, USAGE)
    wrong = (UsageError, MissingDependencyError, CorruptCheckpointError, wnfused.BackendUnavailableError)
    try:
        with warnings.catch_warnings(), sigterm_raises():
            warnings.showwarning = _show_warning
            status = run(**options)
            sys.stdout.flush()
            return status
    except wrong as error:
        return _fail(command, error, USAGE)
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` goes; at exit the rest of it has nowhere to be written, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        return _fail(command, error, 1)
    except KeyboardInterrupt as interrupt:
        # As shells count: 130 for Ctrl-C, 143 for SIGTERM.
        status = 128 + (signal_of(interrupt) or 0)
        # All processes are told to stop, and one is enough to say so.
        return _fail(command, str(interrupt) or "stopped", status) if is_first_process() else status


def _open_closed_outputs() -> None:
    """``wnfused ... >&-`` leaves Python without the stream, and its number to the next file that is opened."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it stays open


def _fail(command: str, error: object, status: int) -> int:
    # What one of several processes met, the first need not know.
    where = "" if is_first_process() else f"process {process_number()}: "
    print(f"wnfused {command}: error: {where}{error}", file=sys.stderr)
    return status


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line, without the source line that caused it, which tells a user of the command nothing."""
    if is_first_process():
        print(f"wnfused: warning: {message}", file=file or sys.stderr)


class OneLineParser(argparse.ArgumentParser):
    """argparse's own errors in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    description = "Fused weight-normalised layers and very deep networks of them."
    parser = OneLineParser(prog="wnfused", description=description)
    parser.add_argument("--version", action="version", version=f"wnfused {wnfused.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | demo | train | probe | bench")
    for add in (_add_info, _add_demo, _add_train, _add_probe, _add_bench):
        add(commands)
    return parser


# -------------------------------------------------------------------------------------------------------- info


def _add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="what is installed, which backends run, and why others do not")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        choices=("native", "cuda", "triton"),
        help="exit with status 1 unless this backend is available; may be repeated",
    )
    parser.set_defaults(run=_info)


def _info(json: bool, require: list[str]) -> int:
    from wnfused import information

    facts = information.collect()
    print(information.as_json(facts) if json else information.as_text(facts))
    missing = {name: facts["backends"][name] for name in require if facts["backends"][name] is not None}
    for name, reason in missing.items():
        print(f"wnfused info: error: --require {name}: is not available: {reason}", file=sys.stderr)
    return 1 if missing else 0


def _path(text: str) -> Path:
    if not text:  # Path("") is the current folder, which nobody means by a variable that is not set
        raise argparse.ArgumentTypeError("is empty; name a path, or . for the current folder")
    return Path(text)


# ------------------------------------------------------------------------------------------------------- train


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a network and leave result.json, last.ckpt and best.ckpt in a folder",
        description="Train a network. test_accuracy is that of the weights after the last epoch. Under torchrun, "
        "--batch-size counts the images of all processes together, and the order of the images does not depend on "
        "how many there are.",
        epilog="Exit status: 0 if the run was finished, 3 if it diverged, now or before --resume; 2 for arguments that "
        "cannot work, 1 for what the system refused, 130 and 143 if stopped by Ctrl-C and SIGTERM. torchrun makes 1 of "
        "all but 0.",
    )
    add_options(parser)
    parser.add_argument("--out", type=_path, required=True, metavar="FOLDER", help="the run's folder")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out after its last finished epoch; options that are not given are that run's; "
        "where --out holds no run, one is started, and one that finished no epoch begins again, which is said",
    )
    parser.add_argument("--data-folder", type=_path, metavar="FOLDER", help="scikit-learn's data cache")
    parser.set_defaults(run=_train)


def _train(out: Path, resume: bool, data_folder: Path | None, **given: Any) -> int:
    from wnfused.train.console import Console
    from wnfused.train.folder import RunFolder
    from wnfused.train.run import train

    folder = RunFolder(out)
    saved = folder.saved_config() if resume else None
    config = from_options(given, saved)
    starting = resume and saved is None and is_first_process()
    with folder.claimed(resume=True) if starting else contextlib.nullcontext():
        if starting:
            print(f"no run in {out}: starting one", flush=True)
        with Console(config.epochs) as console:
            result = train(config, out, resume=resume, data_folder=data_folder, reporter=console)
    if not is_first_process():  # torchrun stops the others when one fails, and the first may still be writing
        return 0
    print(_verdict(result, config.epochs), f"-> {out / 'result.json'}")
    return DIVERGED if result["diverged"] else 0


def _verdict(result: dict[str, Any], epochs: int) -> str:
    if result["diverged"]:
        # Of the very last update the test tells, when all epochs are finished.
        epoch = min(result["epochs_finished"] + 1, epochs)
        return f"diverged in epoch {epoch}: a loss was not finite"
    return (
        f"test accuracy {result['test_accuracy']:.4f}  ({result['seconds_per_step']:.3g} s a step, "
        f"{result['peak_memory_bytes'] / 2**20:.0f} MiB)"
    )


# ------------------------------------------------------------------------------------------------ demo and probe


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train ever deeper networks on handwritten digits, with two pictures")
    parser.add_argument("--minutes", type=float, default=5.0, help="time to fit into (default: 5)")
    parser.add_argument("--deep", action="store_true", help="train the 10,000 layers for two epochs too, however long")
    parser.add_argument("--out", type=_path, default=Path("wnfused-demo"), metavar="FOLDER", help="for the pictures")
    parser.set_defaults(run=_demo)


def _demo(minutes: float, deep: bool, out: Path) -> int:
    from wnfused.train.demo import demo

    return demo(out, minutes=minutes, deep=deep)


def _add_probe(commands: Any) -> None:
    parser = commands.add_parser(
        "probe",
        help="measure a network: norms, Hessian, Jacobians, orthogonality ... as an initialisation or training left it",
        description="Measure a network on training images, in float64; write a picture, the numbers as JSON, and a "
        "table of some of them.",
    )
    wanted = ("model", "depth", "width", "norm", "stack", "data", "init_options", "seed")
    add_options(parser, only=wanted)
    parser.add_argument(
        "--what",
        action="append",
        metavar="MEASUREMENT",
        help="may be repeated: norms (default), hessian, jacobian, layer-jacobians, jacobian-growth, orthogonality, "
        "similarity, gradient-bounds, parameter-bounds",
    )
    parser.add_argument(
        "--init",
        action="append",
        dest="inits",
        metavar="SCHEME",
        help="may be repeated, to compare (arpit2019)",
    )
    parser.add_argument(
        "--checkpoint",
        action="append",
        dest="checkpoints",
        type=_path,
        metavar="PATH",
        help="a run's folder, one of its checkpoints, or a state_dict of the model that the options describe; "
        "may be repeated",
    )
    parser.add_argument("--samples", type=int, metavar="INT", help="training images to measure on (64; hessian: 1024)")
    parser.add_argument("--data-folder", type=_path, metavar="FOLDER", help="scikit-learn's data cache")
    parser.add_argument(
        "--out", type=_path, default=Path("probe.png"), metavar="FILE", help="the picture (default: probe.png)"
    )
    parser.set_defaults(run=_probe)


def _probe(
    what: list[str] | None,
    inits: list[str] | None,
    checkpoints: list[Path] | None,
    samples: int | None,
    data_folder: Path | None,
    out: Path,
    **given: Any,
) -> int:
    require("numpy", "wnfused probe")
    from wnfused.train.probe import probe

    tables = probe(
        fields_of(given), what=what or ["norms"], inits=inits or [], checkpoints=checkpoints or [], samples=samples,
        out=out, folder=data_folder,
    )  # fmt: skip
    print(tables)
    return 0


# ------------------------------------------------------------------------------------------------------- bench


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="the benchmarks of the source checkout; `wnfused bench --help` lists their options",
        add_help=False,
    )
    parser.set_defaults(run=_bench)


# Run where the user is, as --out is meant; `python -m` would look there for the module, too, and first.
_RUN_BENCH = "import runpy, sys; sys.path[0] = sys.argv.pop(1); runpy.run_module('bench', run_name='__main__')"


def _bench(arguments: list[str]) -> int:
    import subprocess

    checkout = Path(wnfused.__file__).resolve().parents[1]
    if not (checkout / "bench" / "__main__.py").exists():
        raise UsageError(
            "bench",
            checkout / "bench",
            "does not exist: the benchmarks come with the source, not with the package; "
            "clone the repository, install it with `pip install --no-build-isolation -e .` and run this again",
        )
    command = [sys.executable, "-c", _RUN_BENCH, str(checkout), "--out", str(checkout / "build" / "bench"), *arguments]
    status = subprocess.run(command).returncode
    return status if status >= 0 else 128 - status  # killed by a signal; as shells count
