# Every target builds the environment it needs: Python 3.10 or newer and make are enough.

# To be set by the caller: the interpreter, test processes, and of test-all how many random cells it
# builds and over how many days it spreads them, and the cases of slow tests.
PYTHON ?= python3
JOBS   ?= 2
CELLS  ?= 300
DAYS   ?= 14

VENV   := .venv
OLDEST := .venv-oldest
TRITON := .venv-tritons
RUN    := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest -n $(JOBS) --dist worksteal
SPREAD := $(PYTEST) --days $(DAYS)
FAST   := -m "not slow and not more and not gpu"
NARROW := -m "not slow and not fixed_isa and not gpu"

# Where torch's own layers run beside ours: oneDNN has other ones for a machine without AVX-512.
BESIDE := tests/test_bench.py tests/layer/test_stream.py $(addprefix tests/torch/test_,accelerate.py \
	autocast.py compile.py functional.py layers.py modules.py sequences.py step.py)

# Where the numbers of programs that XLA optimises are compared, and how it does optimise.
XLA := tests/conformance tests/jax tests/read/test_jax.py tests/keras/test_xla.py \
	tests/keras/test_tensorflow.py
OPTIMISED := env -u JAX_DISABLE_MOST_OPTIMIZATIONS -u XLA_FLAGS

# What runs on each of Keras's backends.
KERAS := tests/conformance $(addprefix tests/keras/test_,accelerate.py compress.py feedback.py \
	layers.py read.py streaming.py)

# The Tritons that PyTorch brings, beside the environment's own.
TRITONS := $(shell sed -n 's/^triton==//p' requirements/tritons.txt)

# Prints every instruction set of this machine but the widest, which is the default, and those that
# differ from it in products of bytes alone, which tests force.
NARROWER := from anycell.engines.cpu.isa import TARGETS, available; \
	*names, last = available(); \
	print(*[name for name in names if TARGETS[name].bits < TARGETS[last].bits])

# Prints the emulation of matrix tiles where this machine runs it, and where it multiplies bfloat16,
# the widest instruction set that does not.
UNTILED := from anycell.engines.cpu.isa import available; \
	names = available(); \
	print('amx-emulated' if 'avx512vnni' in names else '', 'avx512vnni' if names[-1] in ('amx', 'avx512bf16') else '')

# Prints whose matmul PyTorch's layers do not take on this machine: the stages before had the other.
OTHER_MATMUL := from anycell.layer.products import rule; print('ours' if rule().host else 'host')

help: ## list the targets
	@sed -En 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 21

demo: $(VENV)/demo.stamp ## train on a real series, in PyTorch, and draw what came out (3 minutes)
	$(RUN) examples/demo.py

# One thread for each test process, or they wait for each other; tests of threads ask for more.
test test-all test-oldest: export OMP_NUM_THREADS ?= 1
test test-all test-oldest: export TF_NUM_INTRAOP_THREADS ?= 1
# Some hundred processes import a framework: it is compiled once, whatever the caller has set.
test test-all test-oldest: export PYTHONDONTWRITEBYTECODE :=

# XLA optimises where test-all says so alone: elsewhere it would take as long as the tests.
test test-all: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
test test-all: export XLA_FLAGS ?= --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
test: $(VENV)/keras.stamp ## the fast tests, and a list of the 40 slowest
	$(PYTEST) $(FAST) --durations=40

# Its runs share one cache, which is empty at first: a kernel is compiled once.
test-all: export ANYCELL_CACHE_DIR := $(CURDIR)/out/test-kernels
test-all: $(VENV)/tf_keras.stamp $(VENV)/docs.stamp $(VENV)/flax.stamp $(VENV)/rl.stamp ## every test but those for a GPU, under every instruction set
	rm -rf $(ANYCELL_CACHE_DIR)
	$(SPREAD) -m "not gpu" --random-cells $(CELLS) --edits 100
	$(OPTIMISED) $(SPREAD) -m "not gpu" -k "jax or xla" $(XLA)
	KERAS_BACKEND=jax $(OPTIMISED) $(PYTEST) -m "not gpu" tests/keras/test_jax.py
	set -e; narrower=$$($(RUN) -c "$(NARROWER)"); \
	for isa in $$narrower; do ANYCELL_ISA=$$isa $(PYTEST) $(NARROW); done
	case " $$($(RUN) -c "$(NARROWER)") " in *" avx2 "*) \
	ONEDNN_MAX_CPU_ISA=AVX2 ANYCELL_ISA=avx2 $(PYTEST) -m "not slow and not gpu" $(BESIDE);; esac
	set -e; untiled=$$($(RUN) -c "$(UNTILED)"); \
	for isa in $$untiled; do ANYCELL_ISA=$$isa $(PYTEST) $(NARROW) tests/frontends/test_quantize.py \
		tests/engines/test_cpu_matmul.py tests/engines/test_engines.py \
		tests/layer/test_memory.py tests/layer/test_edited_weights.py; \
	ANYCELL_ISA=$$isa $(SPREAD) tests/conformance -k "16_bits and (numpy or torch) and not keras"; done
	set -e; whose=$$($(RUN) -c "$(OTHER_MATMUL)"); \
	ANYCELL_MATMUL=$$whose $(SPREAD) -m "not gpu" tests/conformance tests/layer/test_memory.py \
		tests/layer/test_runtime.py tests/torch/test_operators.py -k "torch and not keras"
	KERAS_BACKEND=torch $(SPREAD) -k keras $(KERAS) tests/keras/test_torch.py
	KERAS_BACKEND=jax $(SPREAD) -k keras $(KERAS) tests/keras/test_jax.py
	$(RUN) tools/run_keras_tests.py

test-oldest: $(OLDEST)/stamp ## those of every frontend, on the oldest versions that it runs on (Python 3.10)
	$(OLDEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(FAST) \
		tests/conformance $(addprefix tests/keras/test_,accelerate.py layers.py streaming.py tensorflow.py) \
		tests/tf1 tests/numpy/test_layers.py tests/frontends/test_public_layers.py \
		tests/frontends/test_recurrence.py tests/layer/test_stream.py tests/project/test_package.py \
		tests/torch/test_layers.py tests/torch/test_[acfmos]*.py

test-tritons: $(TRITONS:%=$(TRITON)/%/stamp) $(VENV)/dev.stamp ## kernels and the interpreter, under every Triton (4 GB)
	$(RUN) tools/gpu_tritons.py --jobs $(JOBS)

test-arm: out/arm/stamp ## those of layers of NumPy, PyTorch and Keras, on 64-bit ARM that QEMU emulates (Debian, 2 GB)
	$(RUN) tools/arm.py

lint: $(VENV)/dev.stamp ## ruff and mypy
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(VENV)/keras.stamp ## let ruff rewrite what it can; the types of layers that are made for cells
	$(RUN) tools/stubs.py
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench: $(VENV)/dev.stamp ## measure against the other implementations on this machine
	$(RUN) -m anycell bench

docs: $(VENV)/docs.stamp ## the site, in out/site; fails for a link or a name that is not there
	NO_MKDOCS_2_WARNING=1 KERAS_BACKEND=torch $(RUN) -m mkdocs build

gallery: $(VENV)/dev.stamp ## train and time every built-in cell, for its page of the site (10 minutes)
	$(RUN) tools/gallery.py

notebooks: $(VENV)/docs.stamp ## run the notebooks of the site, and keep their output
	$(RUN) tools/notebooks.py

wheel: $(VENV)/dev.stamp ## dist/anycell-*-py3-none-any.whl
	$(RUN) -m pip wheel . --no-deps --no-build-isolation --wheel-dir dist

.PHONY: dist
dist: $(VENV)/dev.stamp ## the wheel and the source distribution, checked, in dist/
	$(RUN) tools/distributions.py

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(OLDEST) $(TRITON) dist out .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/keras.stamp: requirements/dev.txt

# One environment for all; a list of pins is installed once, and again when it changes. Modules are
# compiled when they are first imported, which most never are.
$(VENV)/%.stamp: requirements/%.txt requirements/demo.txt pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

$(VENV)/tf_keras.stamp: requirements/tf_keras.txt $(VENV)/keras.stamp
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

$(VENV)/docs.stamp $(VENV)/flax.stamp $(VENV)/rl.stamp: $(VENV)/keras.stamp

$(OLDEST)/stamp: requirements/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

out/arm/stamp: requirements/arm.txt tools/arm.py $(VENV)/dev.stamp
	$(RUN) tools/arm.py --set-up
	@touch $@

# In a directory of its own, which goes in front of the environment's packages.
$(TRITON)/%/stamp: | $(RUN)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(@D) triton==$*
	@touch $@

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "anycell needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)

.PHONY: help demo test test-all test-oldest test-tritons test-arm lint format bench docs gallery notebooks wheel clean
.DELETE_ON_ERROR:
