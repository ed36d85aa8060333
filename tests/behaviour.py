"""The table of behaviours: what weight norm does in torch's old API, in its new one, and here.

Each row is a few lines that run on a layer of any of the three and say in a word what came of it. The tests hold every
cell against a run; ``python tests/behaviour.py > docs/behaviour.md`` renders the table as a page.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

import wnfused

COLUMNS = ("old", "new", "ours")


def layer(api: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """``nn.Linear(4, 3)`` under weight norm, the same weights in every column."""
    torch.manual_seed(5)
    plain = nn.Linear(4, 3, dtype=dtype)
    if api == "new":
        return parametrizations.weight_norm(plain)
    old = nn.utils.weight_norm(plain)
    return wnfused.convert(old) if api == "ours" else old


def names(api: str) -> tuple[str, str]:
    """Where direction and gain are."""
    if api == "new":
        return "parametrizations.weight.original1", "parametrizations.weight.original0"
    return "weight_v", "weight_g"


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 4, dtype=dtype, generator=torch.Generator().manual_seed(6))


def same(one: nn.Module, other: nn.Module) -> str:
    return "works" if torch.allclose(one(x()), other(x()), rtol=1e-5, atol=1e-6) else "another function"


@dataclass(frozen=True)
class Row:
    behaviour: str
    run: Callable[[str], str]
    old: str
    new: str
    ours: str

    def outcome(self, api: str) -> str:
        """What a run says, or which error it raises."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.run(api)
            except Exception as error:
                return f"raises {type(error).__name__}"


# -------------------------------------------------------------------------------------------------- copies and files


def deepcopy_after_a_forward(api: str) -> str:
    m = layer(api)
    m(x())
    return same(copy.deepcopy(m), m)


def pickled(api: str) -> str:
    m = layer(api)
    return same(pickle.loads(pickle.dumps(m)), m)


def saved_whole(api: str) -> str:
    m, buffer = layer(api), io.BytesIO()
    m(x()).sum().backward()
    torch.save(m, buffer)
    buffer.seek(0)
    return same(torch.load(buffer, weights_only=False), m)


def loads(form: str) -> Callable[[str], str]:
    def run(api: str) -> str:
        torch.manual_seed(7)
        source = nn.Linear(4, 3) if form == "plain" else layer(form)
        m = layer(api)
        with torch.no_grad():
            for parameter in (*m.parameters(), *(source.parameters() if form != "plain" else ())):
                parameter.add_(torch.rand_like(parameter))
        m.load_state_dict(source.state_dict(), strict=True)
        return same(m, source)

    return run


# ------------------------------------------------------------------------------------------------- writes to .weight


def write(change: Callable[[nn.Module, Tensor], Any]) -> Callable[[str], str]:
    """Whether a write to ``weight`` is in the next output."""

    def run(api: str) -> str:
        m, w = layer(api), torch.eye(3, 4)
        m(x())
        before = m(x())
        with torch.no_grad():
            change(m, w)
        y = m(x())
        if torch.allclose(y, nn.functional.linear(x(), w, m.bias), rtol=1e-5, atol=1e-6):
            return "takes effect"
        return "silently lost" if torch.equal(y, before) else "something else"

    return run


def assign(m: nn.Module, w: Tensor) -> None:
    m.weight = w


def assign_parameter(m: nn.Module, w: Tensor) -> None:
    m.weight = nn.Parameter(w)


def assign_data(m: nn.Module, w: Tensor) -> None:
    m.weight.data = w


def read_after_a_step(api: str) -> str:
    m = layer(api)
    m(x()).sum().backward()
    with torch.no_grad():
        for parameter in m.parameters():
            parameter.mul_(2)
    direction, gain = (m.get_parameter(name) for name in names(api))
    expected = direction * (gain / direction.norm(dim=1, keepdim=True))
    return "the new weight" if torch.allclose(m.weight, expected) else "the weight before the step"


# ------------------------------------------------------------------------------------------------------- arithmetic


def zero_row(api: str) -> str:
    m = layer(api)
    with torch.no_grad():
        m.get_parameter(names(api)[0])[0] = 0
    y = m(x())
    return "zeros" if torch.equal(y[:, 0], m.bias[0].expand(5)) else "NaN" if y.isnan().any() else "something else"


def zero_row_gradients(api: str) -> str:
    m = layer(api)
    with torch.no_grad():
        m.get_parameter(names(api)[0])[0] = 0
    m(x()).sum().backward()
    return "finite" if all(p.grad.isfinite().all() for p in m.parameters()) else "NaN"


def second_derivatives(api: str) -> str:
    m = layer(api, torch.float64)

    def function(v: Tensor, g: Tensor) -> Tensor:
        given = dict(zip(names(api), (v, g), strict=True))
        return torch.func.functional_call(m, given, x(torch.float64)).square()

    tensors = [m.get_parameter(name).detach().clone().requires_grad_() for name in names(api)]
    right = torch.autograd.gradgradcheck(function, tensors, raise_exception=False)
    return "right" if right else "wrong"


def traced(api: str) -> str:
    m = layer(api)
    return same(torch.jit.trace(m, (x(),)), m)


def exported(api: str) -> str:
    m = layer(api)
    program = torch.export.export(m, (x(),)).run_decompositions()
    foreign = any("wnfused" in str(node.target) for node in program.graph.nodes)
    return "a foreign op" if foreign else same(program.module(), m)


def symbolically_traced(api: str) -> str:
    m = layer(api)
    return same(torch.fx.symbolic_trace(nn.Sequential(m)), m)


def scripted(api: str) -> str:
    m = layer(api)
    return same(torch.jit.script(nn.Sequential(m)), m)


def counted(api: str) -> str:
    m = layer(api)
    with FlopCounterMode(display=False) as counter:
        m(x()).sum().backward()
    return "works" if counter.get_total_flops() == 2 * 2 * 5 * 4 * 3 else "another number"


# -------------------------------------------------------------------------------------------------- in, out, on top


def out(api: str) -> nn.Module:
    m = layer(api)
    if api == "old":
        return nn.utils.remove_weight_norm(m)
    return parametrize.remove_parametrizations(m, "weight") if api == "new" else wnfused.fold(m)


def folded(api: str) -> str:
    plain = out(api)
    return "nn.Linear" if type(plain) is nn.Linear and same(plain, layer(api)) == "works" else type(plain).__name__


def folded_twice(api: str) -> str:
    plain = out(api)
    if api == "old":
        nn.utils.remove_weight_norm(plain)
    elif api == "new":
        parametrize.remove_parametrizations(plain, "weight")
    else:
        wnfused.fold(plain)
    return "nothing more"


def on_top(api: str) -> str:
    m = layer(api)
    nn.utils.weight_norm(m) if api == "old" else parametrizations.weight_norm(m)
    return "a second norm on the first"


def hook_on_top(hook: Callable[[nn.Module], object]) -> Callable[[str], str]:
    def run(api: str) -> str:
        m = layer(api)
        try:
            hook(m)
        finally:
            assert same(m, layer(api)) == "works", "a refusal must leave the layer as it was"
        return "a second norm on the first"

    return run


def pruned(api: str) -> str:
    m = layer(api)
    prune.l1_unstructured(m, "weight", 0.5)
    y = m(x())
    return "takes effect" if torch.allclose(y, nn.functional.linear(x(), m.weight_orig * m.weight_mask, m.bias)) else (
        "silently lost"
    )  # fmt: skip


ROWS = [
    Row("`copy.deepcopy` after a forward", deepcopy_after_a_forward, "raises RuntimeError", "works", "works"),
    Row("`pickle` of the layer", pickled, "works", "raises RuntimeError", "works"),
    Row("`torch.save` of the layer after a backward", saved_whole, "works", "raises RuntimeError", "works"),
    Row("loading a plain layer's state dict", loads("plain"), "raises RuntimeError", "raises RuntimeError", "works"),
    Row("loading the old API's state dict", loads("old"), "works", "works", "works"),
    Row("loading the new API's state dict", loads("new"), "raises RuntimeError", "works", "works"),
    Row("`layer.weight.copy_(w)`", write(lambda m, w: m.weight.copy_(w)), "silently lost", "silently lost",
        "takes effect"),
    Row("`layer.weight.data = w`", write(assign_data), "silently lost", "silently lost", "takes effect"),
    Row("`nn.init.eye_(layer.weight)`", write(lambda m, w: nn.init.eye_(m.weight)), "silently lost", "silently lost",
        "takes effect"),
    Row("`layer.weight = w`", write(assign), "silently lost", "takes effect", "takes effect"),
    Row("`layer.weight = nn.Parameter(w)`", write(assign_parameter), "raises TypeError", "raises KeyError",
        "takes effect"),
    Row("`layer.weight` after an optimiser's step", read_after_a_step, "the weight before the step", "the new weight",
        "the new weight"),
    Row("a row of `v` that is zero: output", zero_row, "NaN", "NaN", "zeros"),
    Row("a row of `v` that is zero: gradients", zero_row_gradients, "NaN", "NaN", "finite"),
    Row("second derivatives in `v` and `g` (`gradgradcheck`)", second_derivatives, "wrong", "wrong", "right"),
    Row("`torch.jit.trace`", traced, "works", "works", "works"),
    Row("`torch.export`, decomposed", exported, "works", "works", "works"),
    Row("`torch.fx.symbolic_trace`", symbolically_traced, "works", "works", "works"),
    Row("`torch.jit.script`, and a call", scripted, "raises AttributeError", "raises Error", "raises RuntimeError"),
    Row("`torch.utils.flop_counter`, forward and backward", counted, "works", "works", "works"),
    Row("out again: `remove_weight_norm`, `remove_parametrizations`, `fold`", folded, "nn.Linear", "nn.Linear",
        "nn.Linear"),
    Row("out again, twice", folded_twice, "raises ValueError", "raises ValueError", "nothing more"),
    Row("weight norm on top of weight norm", on_top, "raises RuntimeError", "a second norm on the first",
        "raises RuntimeError"),
    Row("the old hook `nn.utils.weight_norm` on top", hook_on_top(nn.utils.weight_norm), "raises RuntimeError",
        "raises KeyError", "raises KeyError"),
    Row("the old hook `nn.utils.spectral_norm` on top", hook_on_top(nn.utils.spectral_norm), "raises KeyError",
        "raises KeyError", "raises KeyError"),
    Row("pruning `weight`", pruned, "raises TypeError", "raises TypeError", "raises RuntimeError"),
]  # fmt: skip

HEAD = """# Weight norm, three times

What one layer does under `torch.nn.utils.weight_norm` (old), under `torch.nn.utils.parametrizations.weight_norm` (new)
and here. Every cell is run by the tests (`tests/behaviour.py`), with the torch they are run with.

| | old | new | here |
|---|---|---|---|
"""


def page() -> str:
    """The table as Markdown."""
    return HEAD + "".join(f"| {r.behaviour} | {r.old} | {r.new} | **{r.ours}** |\n" for r in ROWS)


if __name__ == "__main__":
    print(page(), end="")
