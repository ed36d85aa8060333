"""A forward pass that leaves a model as it was: whether a sample fits is known before anything is written."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from wnfused._undisturbed import buffers_kept, forked, modes_kept
from wnfused.dispatch import BackendUnavailableError
from wnfused.init.skip_scale import put_sums_back_, sums_of

Sample = Tensor | tuple[Tensor, ...] | None


def try_sample(model: nn.Module, sample: Sample, *, settle: bool) -> bool:
    """Runs the model on the sample. Lazy layers take their shapes; buffers, modes and random state stay.

    Args:
        settle: whether batch norms take the sample's statistics, as they do where a scheme looks at data.

    Returns:
        Whether it runs where gradients are recorded alone: ``forward`` takes derivatives itself.

    Raises:
        ValueError: the model does not run on it; the cause is the model's own error.
    """
    failed: Exception | None = None
    with forked(model), evaluating(model, settle=settle):
        for recorded in (False, True):
            try:
                with torch.set_grad_enabled(recorded):
                    model(*arguments_of(sample))
            except BackendUnavailableError:
                raise
            except Exception as error:  # it is the user's own code that runs, which may raise anything
                failed = error
            else:
                return recorded
    raise ValueError(f"sample: the model does not run on it: {failed}") from failed


def arguments_of(sample: Sample) -> tuple[Tensor | None, ...]:
    """The model's arguments: a tuple is taken for several."""
    return sample if isinstance(sample, tuple) else (sample,)


@contextlib.contextmanager
def evaluating(model: nn.Module, *, settle: bool) -> Iterator[None]:
    """Evaluation mode; where ``settle`` says so, but for batch norms. Afterwards modes and buffers are as before.

    The modes are set by hand: a ``train`` of the user's own may do more than set them (adapters merge their weights),
    which nothing here could undo.
    """
    with modes_kept(model), buffers_kept(model), contextlib.ExitStack() as undo:
        for module in model.modules():
            module.training = settle and isinstance(module, _BatchNorm)
            if isinstance(module, nn.SyncBatchNorm):
                undo.enter_context(_by_itself(module))
        yield


@contextlib.contextmanager
def _by_itself(norm: nn.SyncBatchNorm) -> Iterator[None]:
    """While this holds, the norm takes the statistics of its own input: it is one process alone that looks at data, and
    the others would not answer."""
    own = vars(norm)
    if type(norm).forward is not nn.SyncBatchNorm.forward or "forward" in own:
        yield
        return
    own["forward"] = functools.partial(_BatchNorm.forward, norm)
    try:
        yield
    finally:
        del own["forward"]


@contextlib.contextmanager
def put_back_on_error(model: nn.Module, *, parameters: bool) -> Iterator[None]:
    """An error that passes here leaves the factors of residual sums, and the parameters if so asked, as they were."""
    sums = sums_of(model)
    values = [(p, p.detach().clone()) for p in model.parameters() if not is_lazy(p)] if parameters else []
    try:
        yield
    except BaseException:
        put_sums_back_(sums)
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        raise
