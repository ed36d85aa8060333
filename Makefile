# make demo | test | install | bench | paper | lint | gate | docs   each does the set-up it needs, once
#
#   VENV=path   virtual environment to create and use (default .venv)
#   VENV=       use the active environment, which must have torch >= 2.11; the extras train and test go into it, too
#   TORCH=spec  what to install as torch (default torch==2.13.0): one requirement, in quotes if it has spaces
#
# pip's own variables, PIP_EXTRA_INDEX_URL and the like, say where it comes from.

VENV ?= .venv
TORCH ?= torch==2.13.0

# The gate's tables hold for the registers that Triton 3.7 needs, and a CPU build of torch brings no Triton; any other torch
# keeps the one that it asks for.
TRITON := triton$(if $(filter torch==2.13.0 torch==2.13.0+%,$(TORCH)),==3.7.*); sys_platform == 'linux'

# The stamp says what was installed: in which environment, or with which torch. Where that is another one now, it is void.
ifeq ($(strip $(VENV)),)
PYTHON := python3
STAMP := build/.installed
WANTED := $(shell python3 -c 'import sys; print(sys.prefix)')
else
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
WANTED := $(TORCH)
endif

SOURCES := setup.py pyproject.toml wnfused/backends/native_schemas.py $(shell find csrc -type f 2>/dev/null)
ifneq ($(strip $(shell cat $(STAMP) 2>/dev/null)),$(strip $(WANTED)))
SOURCES += void
endif

.PHONY: demo test install bench paper lint gate docs portable oldest sanitize clean void

install: $(STAMP)

# torch goes first and the build is not isolated: the extensions must be built against the torch that loads them.
# The package is installed in place, so that only a change of the C++ sources or of the metadata installs again.
$(STAMP): $(SOURCES)
ifneq ($(strip $(VENV)),)
	$(PYTHON) -m pip --version >/dev/null 2>&1 || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check "$(TORCH)" "$(TRITON)" "setuptools>=77" ninja
else
	@$(PYTHON) -c 'import torch; v = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2]); \
	assert v >= (2, 11), f"wnfused needs torch >= 2.11, the active environment has {torch.__version__}"'
	$(PYTHON) -m pip install --quiet --disable-pip-version-check "setuptools>=77" ninja
endif
	@echo "installing, and compiling C++ for five to ten minutes on two cores"
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[train,test]"
	@mkdir -p $(@D) && echo "$(WANTED)" > $@

# A prerequisite that is never there.
void:

demo: install
	$(PYTHON) -m wnfused demo

# Two files at a time, two thirds of the time of one after the other: many tests wait, or run on one core. Threads that
# wait must then leave the core to the other process.
test: install
	OMP_WAIT_POLICY=passive $(PYTHON) -m pytest --numprocesses 2 --dist loadfile

bench: install
	$(PYTHON) -m bench

paper: install
	$(PYTHON) -m bench.paper

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# Every GPU kernel compiled for every architecture, no GPU needed. 77: a tool is missing, which the output names.
gate: install
	$(PYTHON) -m gate || test $$? -eq 77

# The C++ libraries compiled by clang, and for aarch64, in some minutes; 77 as above.
portable: install
	$(PYTHON) -m gate.portable || test $$? -eq 77

# With the oldest torch and Triton: all tests; then those that need a GPU, and the workloads of bench/gpu.py, on pretended
# GPUs (gate/pretended). That torch is a CUDA build of three gigabytes; an hour on two cores. Triton 3.6 interprets with
# numpy before 2.4.
OLDEST := build/oldest
oldest:
	rm -rf $(OLDEST)/wnfused && mkdir -p $(OLDEST) && git clone --quiet . $(OLDEST)/wnfused
	$(MAKE) -C $(OLDEST)/wnfused VENV=../venv TORCH=torch==2.11.0 install
	$(OLDEST)/venv/bin/python -m pip install --quiet --disable-pip-version-check "numpy<2.4"
	cd $(OLDEST)/wnfused && ../venv/bin/python -m pytest
	cd $(OLDEST)/wnfused && ../venv/bin/python -m gate.pretended tests
	cd $(OLDEST)/wnfused && ../venv/bin/python -m gate.pretended bench

# build/site/index.html; a warning is an error. mkdocstrings reads the sources and imports nothing.
docs: install
	$(PYTHON) -m pip install --quiet --disable-pip-version-check "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=1,<2"
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs --quiet build

# The C++ library built a second time, with sanitizers, beside the installed one. An exception finds its way through
# AddressSanitizer only where libstdc++ is loaded as early as the sanitizer; CPython itself leaks by design. A check of
# every pointer for null, alignment and size would make the kernels' templates several times as long to compile, and
# AddressSanitizer sees what comes of most of them. Not part of CI: all of it took 22 minutes on two busy cores.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize=null,alignment,object-size
INSTRUMENTED := $(SANITIZERS) --param=asan-instrumentation-with-call-threshold=0 -fno-sanitize-recover=all \
	-fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS -g1
sanitize: install
	CFLAGS="$(INSTRUMENTED)" LDFLAGS="$(SANITIZERS)" \
	WNFUSED_REQUIRE_EXTENSIONS=1 $(PYTHON) setup.py --quiet build_ext \
	--build-lib build/sanitize --build-temp build/sanitize/objects
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(PYTHON) tests/soak.py --seconds 60 --library build/sanitize/wnfused/_cpu.abi3.so

clean:
	rm -rf build dist *.egg-info wnfused/*.so wnfused/_build.json $(STAMP)
