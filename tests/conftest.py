"""Every test starts from the same seed, and memory that nobody wrote reads as NaN."""

import contextlib

import pytest
import torch
from instruction_sets import ISAS, VECTORS

from wnfused import dispatch
from wnfused.backends import native


def pytest_configure(config):
    """Without the C++ library everything runs in plain torch, which says so once for each op; with it that is a bug."""
    if native.unavailable() is not None:
        config.addinivalue_line("filterwarnings", "default::wnfused.dispatch.BackendWarning")


@pytest.fixture(autouse=True)
def _seeded_and_poisoned():
    torch.manual_seed(0)
    # Deterministic mode fills every uninitialised tensor with NaN, and the switch the memory of the C++ kernels that
    # does not come through torch's dispatcher: an unwritten element fails.
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    if native.unavailable() is None:
        torch.ops.wnfused_native.set_cpu_poison(True)
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def forget_warnings():
    """Lets a fallback that was already announced be announced again."""
    before = set(dispatch._warned)
    dispatch._warned.clear()
    yield
    dispatch._warned.clear()
    dispatch._warned.update(before)


@pytest.fixture
def threads():
    """For tests that set torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def _in_use(isa):
    before = torch.ops.wnfused_native.cpu_isa()
    torch.ops.wnfused_native.set_cpu_isa(isa)
    yield isa
    torch.ops.wnfused_native.set_cpu_isa(before)


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set in turn, in use while the test runs."""
    with _in_use(request.param) as name:
        yield name


@pytest.fixture(params=VECTORS)
def vectors(request):
    """Each kind of vectors of floats in turn, for what tiles have no part in."""
    with _in_use(request.param) as name:
        yield name


@contextlib.contextmanager
def _on_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread():
    """For layers so small that threads would only wait for each other."""
    with _on_one_thread():
        yield


@pytest.fixture(scope="module")
def one_thread_throughout():
    """The same for all tests of a file, and for what they share."""
    with _on_one_thread():
        yield


@pytest.fixture
def on_the_reference(one_thread):
    """For what is observed by hooks, on float64 and tiny maps: which kernels run is another matter."""
    with dispatch.use_backend("reference"):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small training run that was left alone, and its result."""
    from small_runs import SMALL

    from wnfused.train import train

    out = tmp_path_factory.mktemp("runs") / "finished"
    return out, train(SMALL, out)
