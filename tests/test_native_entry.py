"""Which calls go past Python: the entry in C++ and the fast path in Python take the same ones."""

import sys

import pytest
import torch
from test_direct import LAYERS, STAGE, FunctionMode, default_device_and_mode, tensors
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from wnfused import dispatch
from wnfused.backends import native_entry
from wnfused.functional import conv_transpose2d, linear
from wnfused.ops import _direct

pytestmark = [
    pytest.mark.skipif(not dispatch.prefers_native(), reason="the C++ kernels are not what runs here"),
    pytest.mark.skipif(native_entry.unavailable() is not None, reason=str(native_entry.unavailable())),
]


class Subclass(torch.Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def dual(function, *inputs):
    with forward_ad.dual_level():
        return function(*inputs)


def under(context):
    def run(function, *inputs):
        with context():
            return function(*inputs)

    return run


CALLS = {
    "plain": lambda f, x, *rest: f(x, *rest),
    "bfloat16": lambda f, x, *rest: f(x.bfloat16(), *rest),
    "float16": lambda f, x, *rest: f(x.half(), *rest),
    "float64": lambda f, x, *rest: f(x.double(), *rest),
    "all in float64": lambda f, *inputs: f(*(t.double() for t in inputs)),
    "all in float64, autocast": lambda f, *inputs: under(lambda: torch.autocast("cpu", torch.bfloat16))(
        f, *(t.double() for t in inputs)
    ),
    "ints": lambda f, x, *rest: f(x.long(), *rest),
    "meta": lambda f, *inputs: f(*(t.to("meta") for t in inputs)),
    "a list": lambda f, x, *rest: f(x.tolist(), *rest),
    "a subclass": lambda f, x, *rest: f(x.as_subclass(Subclass), *rest),
    "a subclass of v": lambda f, x, v, *rest: f(x, v.as_subclass(Subclass), *rest),
    "a subclass of residual": lambda f, *inputs: f(*inputs[:4], inputs[4].as_subclass(Subclass)),
    "vmap": lambda f, x, *rest: torch.func.vmap(lambda x: f(x, *rest))(x[None]),
    "jvp": lambda f, x, *rest: torch.func.jvp(lambda x: f(x, *rest), (x,), (x,)),
    "dual": dual,
    "trace": lambda f, *inputs: torch.jit.trace(f, inputs, check_trace=False),
    "dispatch mode": under(Mode),
    "function mode": under(FunctionMode),
    "default device": under(lambda: torch.device("cpu")),
    "function mode on a default device": under(default_device_and_mode),
    "inference mode": under(torch.inference_mode),
    "no gradients": under(torch.no_grad),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast to float16": under(lambda: torch.autocast("cpu", torch.float16)),
    "autocast of float64": lambda f, x, *rest: under(lambda: torch.autocast("cpu", torch.bfloat16))(
        f, x.double(), *rest
    ),
    "autocast beside float16": lambda f, x, *rest: under(lambda: torch.autocast("cpu"))(
        f, x, *(t.half() for t in rest)
    ),
}


CONSTANTS = {
    "linear": (1, 0.0),
    "linear_of_norm": (-1, 1, 0.0),
    "conv2d": ((1, 1), (1, 1), (1, 1), 1, 1, 0.0),
    "conv_transpose2d": ((2, 2), (1, 1), (1, 1), (0, 0), 2, 1, 0.0),
    "residual_stage": (1.0, 0),
}


@pytest.mark.parametrize(
    ("name", "call"),
    [(n, c) for n in CONSTANTS for c in CALLS if not (n == "residual_stage" and "of residual" in c)],
)
def test_both_entries_are_open_to_the_same_calls(name, call):
    """What is plain stands in Python and in C++."""
    call = CALLS[call]
    shapes = {**LAYERS, "residual_stage": STAGE}[name][1]
    inputs = [t.detach() for t in tensors(*shapes)]
    entry = native_entry.layer(name.removesuffix("2d"))
    asked = []

    def ask(*tensors):
        open_to_python = is_open_to_python(name, tensors)
        try:
            y = entry(*tensors, *CONSTANTS[name])
        except RuntimeError as refused:  # by the kernel: it was open
            y = refused
        asked.append((open_to_python, y is not None))
        return tensors[0]

    call(ask, *inputs)
    ((in_python, in_cpp),) = asked
    assert in_python == in_cpp


TRANSPOSED = {
    "channels_last v": lambda x, v, *rest: (x, v.contiguous(memory_format=torch.channels_last), *rest),
    "v in another order": lambda x, v, *rest: (x, v.mT.contiguous().mT, *rest),
    "v of no dims": lambda x, v, *rest: (x, v.sum(), *rest),
    "g of another size": lambda x, v, g, *rest: (x, v, g[:3], *rest),
    "g of two dims": lambda x, v, g, *rest: (x, v, g[:, None], *rest),
    "g in v's dims": lambda x, v, g, *rest: (x, v, g[:, None, None, None], *rest),
    "bfloat16 parameters": lambda x, *rest: (x.bfloat16(), *(t.bfloat16() for t in rest)),
    "a float64 v": lambda x, v, *rest: (x, v.double(), *rest),
    "a float16 g": lambda x, v, g, *rest: (x, v, g.half(), *rest),
    "a float64 bias": lambda *t: (*t[:3], t[3].double(), t[4]),
    "a float64 residual": lambda *t: (*t[:4], t[4].double()),
    "no bias": lambda *t: (*t[:3], None, t[4]),
}


OF_NORM = {
    "v of no dims": lambda x, v, *rest: (x, v.sum(), *rest),
    "an empty v": lambda x, v, *rest: (x, v[:0], *rest),
    "v by columns": lambda x, v, *rest: (x, v.T.contiguous().T, *rest),
    "bfloat16": lambda *t: tuple(one.bfloat16() for one in t),
    "a float64 v": lambda x, v, *rest: (x, v.double(), *rest),
    "a float64 bias": lambda *t: (*t[:3], t[3].double(), t[4]),
    "a float64 residual": lambda *t: (*t[:4], t[4].double()),
    "neither bias nor residual": lambda *t: (*t[:3], None, None),
    "a bias of another size": lambda *t: (*t[:3], t[3][:1], t[4]),
    "a residual of another size": lambda *t: (*t[:4], t[4][:1]),
    "g of another size": lambda x, v, g, *rest: (x, v, g.expand(2), *rest),
    "x of another size": lambda x, *rest: (x[:, 1:], *rest),
}


@pytest.mark.parametrize("change", OF_NORM.values(), ids=OF_NORM)
def test_both_entries_take_the_same_linear_layers_of_other_norms(change):
    inputs = change(*(t.detach() for t in tensors(*LAYERS["linear_of_norm"][1])))
    try:
        y = native_entry.layer("linear_of_norm")(*inputs, *CONSTANTS["linear_of_norm"])
    except RuntimeError as refused:
        y = refused
        with pytest.raises((TypeError, ValueError), match=r"^(x|v|g|bias|residual): "):
            linear(*inputs[:4], residual=inputs[4], dim=None)
    assert is_open_to_python("linear_of_norm", inputs) == (y is not None)


@pytest.mark.parametrize("change", TRANSPOSED.values(), ids=TRANSPOSED)
def test_both_entries_take_the_same_transposed_convolutions(change):
    inputs = change(*(t.detach() for t in tensors(*LAYERS["conv_transpose2d"][1])))
    try:
        y = native_entry.layer("conv_transpose")(*inputs, *CONSTANTS["conv_transpose2d"])
    except RuntimeError as refused:
        y = refused
        with pytest.raises((TypeError, ValueError), match=r"^(x|v|g|bias|residual): "):
            conv_transpose2d(*inputs[:4], 2, 1, groups=2, residual=inputs[4])
    assert is_open_to_python("conv_transpose2d", inputs) == (y is not None)


def is_open_to_python(name, tensors):
    if name == "residual_stage":
        return _direct.is_open_to_stages(*tensors)
    if _direct.runs_where_recorded(*tensors):
        return True
    if name == "linear_of_norm":
        return _direct.is_open(*tensors) and sys.modules["wnfused.ops.linear"]._is_composed(*tensors)
    return _direct.is_open(*tensors) if name == "conv_transpose2d" else _direct.is_open_to_layers(name, *tensors)
