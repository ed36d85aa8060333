"""What every kernel shares: the scale of a row, the activation, its mask, and the matrix product."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# The activation's numbers, as `wnfused.reference.ACTIVATIONS` orders them.
RELU = tl.constexpr(1)
LEAKY_RELU = tl.constexpr(2)


@triton.jit
def inverse(norm):
    """``1 / ||v||``, and 0 for a zero row."""
    return tl.where(norm == 0, 0.0, tl.div_rn(tl.full(norm.shape, 1.0, tl.float32), tl.where(norm == 0, 1.0, norm)))


@triton.jit
def row_scale(gain, norm):
    """``s = g / ||v||``, and 0 for a zero row, whatever its gain."""
    return tl.where(norm == 0, 0.0, gain.to(tl.float32) * inverse(norm))


@triton.jit
def activate(z, slope, ACTIVATION: tl.constexpr):
    """``wnfused.reference.activate``; NaN stays NaN."""
    if ACTIVATION == RELU:
        z = tl.where(z <= 0, 0.0, z)
    if ACTIVATION == LEAKY_RELU:
        z = tl.where(z <= 0, z * slope, z)
    return z


@triton.jit
def mask(dy, y, slope, ACTIVATION: tl.constexpr):
    """``wnfused.reference.activate_backward``: the mask is read off the output's sign."""
    y = y.to(tl.float32)  # some interpreters compare the bits of bfloat16 as integers
    if ACTIVATION == RELU:
        dy = tl.where(y <= 0, 0.0, dy)
    if ACTIVATION == LEAKY_RELU:
        dy = tl.where(y > 0, dy, dy * slope)
    return dy


@triton.jit
def masked_gradient(DY, Y, at, within, slope, ACTIVATION: tl.constexpr):
    """``mask dy`` in the dtype of DY, 0 where not ``within``; Y, the layer's output, is read for the mask alone."""
    dy = tl.load(DY + at, mask=within, other=0.0)
    if ACTIVATION != 0:
        dy = mask(dy.to(tl.float32), tl.load(Y + at, mask=within, other=0.0), slope, ACTIVATION).to(dy.dtype)
    return dy


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a b`` in float32. Triton's interpreter multiplies bfloat16 by its bits: there, operands are widened."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
