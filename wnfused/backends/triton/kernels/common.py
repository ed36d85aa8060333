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
def round_to_tf32(x):
    """float32 to the nearest of ten bits of mantissa, ties away from zero. NaN and infinities stay what they are."""
    if INTERPRETED:  # which has no assembly
        bits = x.to(tl.int32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        return tl.where(finite, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a b``, summed in float32. TF32 has its operands rounded here: the tensor cores ignore the low 13 bits of
    what ``tl.dot`` hands them, which makes each operand smaller by 3e-4 on average, and that adds up from layer to
    layer. Triton's interpreter multiplies bfloat16 by its bits: there, operands are widened."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if PRECISION == "tf32":
        a = round_to_tf32(a)
        b = round_to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)
