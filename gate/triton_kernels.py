"""The Triton kernels: every configuration of the table, compiled with no GPU.

The host's own code launches each kernel on tensors that have no memory, with every tile of
``wnfused.backends.triton.configurations`` forced in turn; what it would have launched is recorded and compiled, with
the types, alignments and constants of that very launch.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gate import cache
from gate.rows import ARCHITECTURES, Entry, Expectation, Verdict, broken, judge

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Job:
    """One kernel in one configuration for one architecture; everything else is found again by the process it runs in.

    Args:
        example: a name in ``EXAMPLES``.
        element: what the product multiplies.
        tile: position in the table of tiles; None for kernels of one configuration.
    """

    example: str
    element: str
    tile: int | None
    capability: int

    def run(self) -> list[Verdict]:
        from wnfused.backends.triton.configurations import tiles

        kernel = self.example.split(" ")[0]
        tile = None if self.tile is None else tiles(kernel, self.element)[self.tile]
        text = self.element if tile is None else f"{self.element}, {tile}"
        name = f"triton {self.example}"
        try:
            (entry,) = cache.remembered(*self._compiled(tile))
        except Exception as error:
            return [broken(name, text, self.capability, f"does not compile: {error}")]
        return [judge(name, text, self.capability, entry, Expectation(self._instruction(tile)))]

    def _compiled(self, tile: Any) -> tuple[str, Callable[[], list[Entry]]]:
        """The key of the cache, and how to compile."""
        import triton

        kernel, signature, constants, attributes, options = self._launch(tile)
        parts = (triton.__version__, kernel.cache_key, signature, constants, attributes, options, self.capability)

        def compute() -> list[Entry]:
            from gate.sass import entries

            compiled = _compile(kernel, signature, constants, attributes, options, self.capability)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "kernel.cubin"
                path.write_bytes(compiled.asm["cubin"])
                return [replace(entry, dynamic_shared=compiled.metadata.shared) for entry in entries(path)]

        return cache.key(*map(str, parts)), compute

    def _launch(self, tile: Any) -> tuple[Any, ...]:
        """The launch that the host would do, as Triton's compiler wants it."""
        from wnfused.backends.triton import configurations, support

        launches: list[tuple[Any, ...]] = []
        with configurations.forced(tile), support.recorded(lambda *launch: launches.append(launch)):
            wanted = EXAMPLES[self.example](self.element)
        kernel, _, arguments, constants = next(launch for launch in launches if launch[0] is wanted)
        return kernel, *_specialised(kernel, arguments, constants)

    def _instruction(self, tile: Any) -> str | None:
        """A warpgroup's product takes 64 rows and more; below, and on older chips, it is one warp's."""
        if tile is None or self.element == "ieee":
            return None
        rows = tile.n if "weight_gradient" in self.example else tile.m
        if rows < 64 or self.capability < 90:
            return "HMMA"
        return "HGMMA" if self.capability == 90 else "UTCHMMA"


def _specialised(kernel: Any, arguments: Any, constants: dict[str, Any]) -> tuple[Any, ...]:
    """``(signature, constants, attributes, options)``: Triton's own specialisation of a launch's arguments."""
    import torch

    types = {
        torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
        torch.int64: "*i64",
    }  # fmt: skip
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **constants}
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if kernel.params[i].is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constexprs[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = types[value.dtype]
            if value.data_ptr() % 16 == 0:  # as it is without memory
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constexprs, attributes, {name: constants[name] for name in OPTIONS if name in constants}


def front_end(kernel: Any, arguments: Any, constants: dict[str, Any], capability: int = 90) -> None:
    """Takes a launch through the compiler up to where layouts are chosen, without the minutes of what comes after.

    What the language does not allow is found first; the passes behind fail where constants fold a loop away that they
    expected.

    Raises:
        triton.CompilationError: it is not allowed.
        RuntimeError: a pass fails.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    signature, constexprs, attributes, chosen = _specialised(kernel, arguments, constants)
    source, target = ASTSource(kernel, signature, constexprs, attributes), GPUTarget("cuda", capability, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(chosen)
    made = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata = {"target": target, **vars(options)}
    for name in ("ttir", "ttgir"):
        made = stages[name](made, metadata)


def _compile(
    kernel: Any, signature: Any, constants: Any, attributes: Any, options: dict[str, Any], capability: int
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


# ------------------------------------------------------------------------------------------- one example a kernel


def _tensor(element: str, *shape: int, channels_last: bool = False, dtype: Any = None) -> Any:
    import torch

    dtype = dtype or (torch.bfloat16 if element == "half" else torch.float32)
    format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=format)


def _flags(element: str) -> None:
    """float32 products as torch's flags would have them."""
    import torch

    chosen = "tf32" if element == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = chosen
    torch.backends.cudnn.conv.fp32_precision = chosen  # type: ignore[attr-defined]


def _linear(kernel: str, samples: int) -> Callable[[str], Any]:
    def example(element: str) -> Any:
        from wnfused.backends.triton import linear_layer
        from wnfused.backends.triton.kernels import linear as kernels

        _flags(element)
        # Parameters are float32 with half-precision operands, as under autocast: the harder case.
        x, v = _tensor(element, samples, 1024), _tensor("float32", 1024, 1024)
        g, b = _tensor("float32", 1024), _tensor("float32", 1024)
        y, r = _tensor(element, samples, 1024), _tensor(element, samples, 1024)
        if kernel == "forward":
            linear_layer.forward(x, v, g, b, r, "relu", 0.0)
        else:
            linear_layer.backward(y, y, x, v, g, g, [True, True, True, False], "relu", 0.0)
        return getattr(kernels, kernel)

    return example


def _conv(kernel: str, channels: int, size: int, stride: int = 1) -> Callable[[str], Any]:
    def example(element: str) -> Any:
        from wnfused.backends.triton import conv_layer
        from wnfused.backends.triton.kernels import conv as kernels

        _flags(element)
        x = _tensor(element, 128, channels, 32, 32, channels_last=True)
        v = _tensor("float32", 32, channels, size, size)
        g = _tensor("float32", 32)
        y = _tensor(element, 128, 32, 32 // stride, 32 // stride, channels_last=True)
        geometry = [stride, stride], [size // 2, size // 2], [1, 1]
        if kernel == "forward":
            conv_layer.forward(x, v, g, g, y, *geometry, "relu", 0.0)
        else:
            conv_layer.backward(y, y, x, v, g, g, [True, True, True, False], *geometry, "relu", 0.0)
        return getattr(kernels, kernel)

    return example


def _stage(kernel: str, second: bool = False) -> Callable[[str], Any]:
    """A launch of ``wnfused.backends.triton.stage``, for the first or the second convolution of a block."""

    def example(element: str) -> Any:
        from wnfused.backends.triton import conv_layer
        from wnfused.backends.triton.kernels import conv as kernels

        _flags(element)
        maps, stream = (_tensor(kind, 128, 32, 32, 32) for kind in (element, "float32"))
        w, gain = _tensor(element, 32, 32, 3, 3), _tensor("float32", 32)
        geometry = conv_layer.Geometry.of(maps, w, (1, 1), (1, 1), (1, 1))
        if kernel == "forward":
            written = (stream, stream, geometry, "none") if second else (None, maps, geometry, "relu")
            conv_layer.convolve(maps, w, None, None, gain, *written, 0.0, factor=0.5 if second else 1.0)
        elif kernel == "input_gradient":
            relu, residual, dx = (maps, None, maps) if second else (None, stream, stream)
            conv_layer.input_gradient(maps, maps, w, None, None, dx, geometry, operand=relu, residual=residual)
        else:  # of parameters in the operands' dtype
            conv_layer.weight_gradient(maps, maps, maps, w, gain, gain, True, geometry)
        return getattr(kernels, kernel)

    return example


def _rows(kernel: str, shape: tuple[int, ...], dim: int | None) -> Callable[[str], Any]:
    def example(element: str) -> Any:
        from wnfused.backends.triton import rows
        from wnfused.backends.triton.kernels import rows as kernels

        v = _tensor(element, *shape)
        g = norm = _tensor("float32", 1 if dim is None else shape[dim])
        if kernel == "weight_norm":
            rows.weight_norm(v, g, dim)
        elif kernel == "weight_norm_backward":
            rows.weight_norm_backward(v, v, g, norm, dim)
        elif kernel == "weight_gradient_sum":
            parts = _tensor("float32", 16, *shape)
            rows.summed_weight_gradient(parts, _tensor("float32", 64, shape[0]), parts[:, :, 0], v, g, norm)
        elif kernel == "many_weight_norms":
            rows.weight_norm_many([v, v], [g, g], dim)
        elif kernel == "many_weight_norms_backward":
            rows.weight_norm_many_backward([v, v], [v, v], [g, g], [norm, norm], dim)
        return getattr(kernels, kernel)

    return example


EXAMPLES: dict[str, Callable[[str], Any]] = {
    "linear.forward": _linear("forward", 512),
    "linear.input_gradient": _linear("input_gradient", 512),
    "linear.weight_gradient": _linear("weight_gradient", 512),
    "linear.weight_gradient_recomputed": _linear("weight_gradient_recomputed", 32),
    "conv.forward": _conv("forward", 32, 3),
    "conv.input_gradient": _conv("input_gradient", 32, 3),
    "conv.weight_gradient": _conv("weight_gradient", 32, 3),
    "conv.forward of 3 channels": _conv("forward", 3, 3),
    "conv.forward 1x1, stride 2": _conv("forward", 32, 1, 2),
    "conv.input_gradient stride 2": _conv("input_gradient", 32, 3, 2),
    "conv.weight_gradient of 3 channels": _conv("weight_gradient", 3, 3),
    "conv.forward of a stage, first": _stage("forward"),
    "conv.forward of a stage, second": _stage("forward", second=True),
    "conv.input_gradient of a stage, first": _stage("input_gradient"),
    "conv.input_gradient of a stage, second": _stage("input_gradient", second=True),
    "conv.weight_gradient of a stage": _stage("weight_gradient"),
    "rows.weight_norm": _rows("weight_norm", (1024, 1024), 0),
    "rows.weight_norm of short rows": _rows("weight_norm", (1024, 32), 0),
    "rows.weight_norm of 3x3 kernels": _rows("weight_norm", (1024, 144), 0),
    "rows.weight_norm along the last dim": _rows("weight_norm", (1024, 1024), 1),
    "rows.weight_norm_backward": _rows("weight_norm_backward", (1024, 1024), 0),
    "rows.weight_norm_backward of short rows": _rows("weight_norm_backward", (1024, 32), 0),
    "rows.weight_norm_backward of 3x3 kernels": _rows("weight_norm_backward", (1024, 144), 0),
    "rows.many_weight_norms": _rows("many_weight_norms", (1024, 1024), 0),
    "rows.many_weight_norms of 3x3 kernels": _rows("many_weight_norms", (1024, 144), 0),
    "rows.many_weight_norms of unaligned rows": _rows("many_weight_norms", (1024, 27), 0),
    "rows.many_weight_norms_backward": _rows("many_weight_norms_backward", (1024, 1024), 0),
    "rows.many_weight_norms_backward of 3x3 kernels": _rows("many_weight_norms_backward", (1024, 144), 0),
    "rows.many_weight_norms_backward of unaligned rows": _rows("many_weight_norms_backward", (1024, 27), 0),
    "rows.weight_gradient_sum": _rows("weight_gradient_sum", (1024, 1024), 0),
}
"""For each kernel a call of the host's code that launches it and returns it."""

OF_HALF = ("conv.forward of a stage, first", "conv.weight_gradient of a stage")
"""Those that with operands of float32 are what a layer launches, less some of it: compiled for half precision alone."""


def missing() -> str | None:
    """Why no Triton kernel can be compiled here."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    from wnfused.backends.triton.support import interpreted

    return "TRITON_INTERPRET=1 leaves nothing to compile" if interpreted() else None


def jobs(capabilities: list[int]) -> Iterator[Job]:
    from wnfused.backends.triton.configurations import TILES

    for example in EXAMPLES:
        rows: list[tuple[str, int | None]] = [
            (element, tile)
            for (kernel, element), fitting in TILES.items()
            if kernel == example.split(" ")[0] and (element == "half" or example not in OF_HALF)
            for tile in range(len(fitting))
        ]
        for element, tile in rows or [("half", None), ("float32", None)]:
            for capability in capabilities:
                assert capability in ARCHITECTURES
                yield Job(example, element, tile, capability)
