"""The schemas of ``torch.ops.wnfused_native``, which the compiled libraries implement.

A library that was built beside another version of this file is not opened (``library.py``).
"""

SCHEMAS = (
    # `dim` is -1 for one norm over the whole tensor.
    "weight_norm(Tensor v, Tensor g, int dim) -> (Tensor w, Tensor norm)",
    "weight_norm_backward(Tensor dw, Tensor v, Tensor g, Tensor norm, int dim) -> (Tensor dv, Tensor dg)",
    "weight_norm_many(Tensor[] v, Tensor[] g, int dim, bool weights) -> (Tensor[] w, Tensor[] norm, Tensor[] scale)",
    "weight_norm_many_backward(Tensor[] dw, Tensor[] v, Tensor[] g, Tensor[] norm, int dim) "
    "-> (Tensor[] dv, Tensor[] dg)",
    # A layer with rows along dim 0; activation: 0 none, 1 ReLU, 2 leaky ReLU; needs: 1 dx, 2 dv and dg, 4 dbias, 8 dz.
    "linear(Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, int activation, float negative_slope) "
    "-> (Tensor y, Tensor norm)",
    "linear_backward(Tensor dy, Tensor y, Tensor x, Tensor v, Tensor g, Tensor norm, int needs, int activation, "
    "float negative_slope) -> (Tensor? dx, Tensor? dv, Tensor? dg, Tensor? dbias, Tensor? dz)",
    "conv(Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, "
    "int groups, int activation, float negative_slope) -> (Tensor y, Tensor norm)",
    "conv_backward(Tensor dy, Tensor y, Tensor x, Tensor v, Tensor g, Tensor norm, int needs, int[] stride, "
    "int[] padding, int[] dilation, int groups, int activation, float negative_slope) "
    "-> (Tensor? dx, Tensor? dv, Tensor? dg, Tensor? dbias, Tensor? dz)",
    "conv_transpose(Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, int[] stride, int[] padding, "
    "int[] dilation, int[] output_padding, int groups, int activation, float negative_slope) "
    "-> (Tensor y, Tensor norm)",
    "conv_transpose_backward(Tensor dy, Tensor y, Tensor x, Tensor v, Tensor g, Tensor norm, int needs, int[] stride, "
    "int[] padding, int[] dilation, int[] output_padding, int groups, int activation, float negative_slope) "
    "-> (Tensor? dx, Tensor? dv, Tensor? dg, Tensor? dbias, Tensor? dz)",
    # Of layers whose weights do not change. banks: those that earlier calls packed and gave; bank: one more, or none.
    "kept_conv(Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, Tensor[] banks, int[] stride, "
    "int[] padding, int[] dilation, int groups, int activation, float negative_slope) -> (Tensor y, Tensor? bank)",
    "kept_conv_transpose(Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, Tensor[] banks, int[] stride, "
    "int[] padding, int[] dilation, int[] output_padding, int groups, int activation, float negative_slope) "
    "-> (Tensor y, Tensor? bank)",
    # A weight as it is, no norm. Absent, or false, where it is left to the vendor's library.
    "plain_conv(Tensor x, Tensor w, Tensor? bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, "
    "int groups, int activation, float negative_slope) -> Tensor? y",
    "plain_conv_backward(Tensor dy, Tensor y, Tensor x, Tensor w, int needs, int[] stride, int[] padding, "
    "int[] dilation, int groups, int activation, float negative_slope) "
    "-> (bool done, Tensor? dx, Tensor? dw, Tensor? dbias, Tensor? dz)",
    "plain_conv_transpose(Tensor x, Tensor w, Tensor? bias, Tensor? residual, int[] stride, int[] padding, "
    "int[] dilation, int[] output_padding, int groups, int activation, float negative_slope) -> Tensor? y",
    "plain_conv_transpose_backward(Tensor dy, Tensor y, Tensor x, Tensor w, int needs, int[] stride, int[] padding, "
    "int[] dilation, int[] output_padding, int groups, int activation, float negative_slope) "
    "-> (bool done, Tensor? dx, Tensor? dw, Tensor? dbias, Tensor? dz)",
    "residual_stage(Tensor x, Tensor v, Tensor g, Tensor bias, float skip_scale, int recompute, bool save) "
    "-> (Tensor y, Tensor norm, Tensor maps)",
    "residual_stage_backward(Tensor dy, Tensor v, Tensor g, Tensor bias, Tensor norm, Tensor maps, "
    "float skip_scale, int recompute, bool parameters) -> (Tensor dx, Tensor dv, Tensor dg, Tensor dbias)",
    # Q of each A = L Q, in place, and which matrices were well-conditioned enough for it.
    "orthonormal_rows_(Tensor(a!) a) -> Tensor",
    # CUDA. signs: which activations are not zero, uint8, empty where nothing is saved or with recompute. tf32: whether
    # products of float32 may be rounded to it. Shapes: "CxHxW CxHxW ..", those that a device runs;
    # precision: 0 bfloat16, 1 tf32, 2 float32. Versions as in CUDART_VERSION.
    "cuda_residual_stage(Tensor x, Tensor v, Tensor g, Tensor bias, float skip_scale, int recompute, bool save, "
    "bool tf32) -> (Tensor y, Tensor norm, Tensor maps, Tensor signs)",
    "cuda_residual_stage_backward(Tensor dy, Tensor v, Tensor g, Tensor bias, Tensor norm, Tensor maps, "
    "Tensor signs, float skip_scale, int recompute, bool parameters, bool tf32) "
    "-> (Tensor dx, Tensor dv, Tensor dg, Tensor dbias)",
    # Eigenvalues, and the eigenvectors as rows in the place of symmetric a [count, n, n]; info is 0 where it converged.
    "cuda_eigh_(Tensor(a!) a) -> (Tensor values, Tensor info)",
    # Of each a [count, r, c], r and c at most 32: left [count, r, r] and right [count, c, c] singular vectors as rows.
    "cuda_svd_(Tensor(a!) a) -> (Tensor left, Tensor values, Tensor right, Tensor info)",
    # Why cuSOLVER's "qr", "eigh" or "svd" is not to be had, empty where it is.
    "cusolver_missing(str function) -> str",
    # A layer's weight in the dtype and memory format of w, its bias in that dtype where it has another, and the norms.
    "layer_weight_(Tensor v, Tensor g, Tensor? bias, Tensor(a!) w, Tensor(b!)? norm, Tensor(c!)? bias_out) -> ()",
    # partial: what layer_mask_ gives, whose sums over shares are dbias, in v's dtype.
    "layer_weight_backward_(Tensor dw, Tensor v, Tensor g, Tensor norm, Tensor(a!) dv, Tensor(b!) dg, "
    "Tensor? partial, Tensor(c!)? dbias) -> ()",
    # dz <- dy where the activation passed it, all of it without y, and its sums: partial [shares, channels], no shares
    # unless sums.
    "layer_mask_(Tensor dy, Tensor? y, Tensor(a!)? dz, int channel, float negative_slope, bool sums) -> Tensor partial",
    # A linear layer of few samples; tf32 as above. Backward: dx, or dv and dg with or without dbias, or all of them.
    "small_linear_(Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, Tensor(a!) y, Tensor(b!) norm, "
    "bool activates, float negative_slope, bool tf32) -> ()",
    "small_linear_backward_(Tensor dy, Tensor y, Tensor x, Tensor v, Tensor g, Tensor norm, Tensor(a!)? dx, "
    "Tensor(b!)? dv, Tensor(c!)? dg, Tensor(d!)? dbias, bool activates, float negative_slope, bool tf32) -> ()",
    # y <- act(y + bias + residual) in one pass; channel: the dim that the bias goes along.
    "layer_epilogue_(Tensor(a!) y, Tensor? bias, Tensor? residual, int channel, int activation, float negative_slope) "
    "-> ()",
    "cuda_stage_shapes(int precision, int device) -> str",
    "cuda_warpgroup_clusters() -> int",
    # Whether sm_90's own kernels run the stages that they have; off at first.
    "set_cuda_warpgroup_stage(bool on) -> ()",
    "cuda_toolkit_version() -> int",
    # The newest that there is machine code for, as 90 for 9.0.
    "cuda_newest_architecture() -> int",
    "cuda_driver_version() -> int",
    # The instruction set in use, those usable here (comma-separated), and the switch between them for tests.
    "cpu_isa() -> str",
    "cpu_isas() -> str",
    "set_cpu_isa(str name) -> ()",
    # Gives back the memory that is kept for the next call.
    "release_cpu_memory() -> ()",
    # Whether the kernels' memory reads as NaN until it is written, for tests.
    "set_cpu_poison(bool on) -> ()",
    # How the residual stage multiplies on maps of a shape: direct, winograd2, winograd4, lines or positions.
    "cpu_stage_method(int images, int channels, int height, int width, bool bfloat16) -> str",
    # Who multiplies a convolution (csrc/cpu/choice/choice.h), forward and backward: planes, strips, unfolded, vendor,
    # or the kernels of conv_layer/ by their method, one of those above, pieces or pairs. maps: images, inputs, outputs,
    # levels, rows and columns of x, and three entries of the others. Of a transposed layer they are those of the
    # convolution whose data gradient it is. dims: of the window; last: y is in channels_last; rows: x lies as rows of
    # its channels; bfloat16: so is x; plain: v is the weight itself; kept: v does not change, which a forward asks.
    "cpu_conv_ways(int[] maps, int[] kernel, int[] stride, int[] padding, int[] dilation, int groups, int dims, "
    "bool transposed=False, bool last=False, bool rows=False, bool bfloat16=False, bool plain=False, bool kept=False) "
    "-> (str, str)",
    # Whether the vendor's own convolution of x with w would be wrong, and its backward, for the tests.
    "cpu_vendor_misleads(Tensor x, Tensor w, int[] stride, int[] padding, int[] dilation, bool transposed, "
    "int[] output_padding, int groups) -> (bool, bool)",
    # `native.Bounds`.
    "cpu_bounds() -> (int, int)",
    # FLOP/s of multiply-adds on registers alone, on all threads.
    "cpu_peak_flops(bool bfloat16) -> float",
    # What a line of memory takes from one core's cache to another's; NaN where there is one processor.
    "cpu_crossing_seconds() -> float",
)
