"""The offline gate: every GPU kernel compiled for every architecture, with no GPU at hand.

``python -m gate`` compiles each configuration of the Triton kernels and each ``csrc/cuda/*.cu``, disassembles what
comes out and prints one table: registers, spills, shared memory, matrix instruction. It is red on a spill, on shared
memory over the architecture's limit and where a kernel lacks the matrix instruction that its row names.

A row for a kernel in CUDA C++ is added in ``gate.cuda_kernels``, one for Triton in ``gate.triton_kernels``.

``gate.portable`` compiles csrc/cpu with other compilers; ``gate.pretended`` runs what the GPU backends do on the host.
"""
