"""A machine with two GPUs, pretended: what the GPU backends do on the host, where no GPU is at hand.

Torch's own CUDA build runs on a stand-in for the CUDA runtime, whose devices' memory is the host's. All of torch that
is not a kernel is itself there: dispatch, devices, streams, its allocator, autograd's threads, the recording of CUDA
graphs. Kernels run on the same memory otherwise:

- torch's own as those of the CPU (``aten``),
- those of csrc/cuda on the emulated machine of csrc/emulation (``emulation/launch.h``), whose global memory is the
  allocations of the devices and nothing else,
- Triton's in Triton's interpreter,
- cuSOLVER's as plain loops (``solver.cpp``).

``python -m gate.pretended tests`` runs ``tests/test_gpu.py`` so, and ``python -m gate.pretended bench`` goes through
the workloads of ``bench/gpu.py`` with their full sizes, where nothing is computed but shapes; both leave out what takes
minutes (``plugin.TOO_LONG``, ``workloads.DEPTH``). What a GPU alone shows stays unproven: that kernels run there, and
how fast; that work on different streams is ordered, since all of it is done at once; and the part of cuBLAS, cuDNN and
cuSOLVER itself.

Needs torch >= 2.11 as built for CUDA (``make oldest`` brings it), nvcc for its headers, and a C++ compiler.
"""
