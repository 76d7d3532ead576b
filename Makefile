# `make help` lists the targets. Everything that is needed besides Python, Rust and g++ comes from PyPI and
# crates.io, into .venv and target.

PYTHON ?= python3
VENV := $(abspath .venv)
BIN := $(VENV)/bin

# One environment for cargo and for maturin: build.rs runs again, and compiles every kernel again, when the
# interpreter that it finds nvcc by changes.
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(VENV)
export PYO3_PYTHON := $(BIN)/python
export PYTHON_SYS_EXECUTABLE := $(BIN)/python
# Kernels that spill are an error here, a warning elsewhere (build.rs).
export FERROMLA_STRICT ?= 1

# maturin and nvcc, as pyproject.toml asks for them.
BUILD_REQUIRES := $(shell sed -n '/^requires = \[/,/^\]/s/^  "\([^;"]*\).*/"\1"/p' pyproject.toml)
BUILD_NEEDS := $(BUILD_REQUIRES) 'numpy>=1.24' 'ml_dtypes>=0.5'
TEST_NEEDS := 'torch==2.11.*' 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.5' 'libclang>=18' 'ruff>=0.8'
BENCH_NEEDS := 'matplotlib>=3.8'
RUST_CRATES := --workspace --exclude ferromla-python --features ferromla/cudarc-safe

GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
# With a GPU every test runs; without one the tests marked gpu are deselected, not skipped.
PYTEST_MARKS := $(if $(GPU),,-m 'not gpu')

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "%-12s %s\n", $$1, $$2 }'

.PHONY: demo
demo: $(if $(GPU),$(VENV)/.test,$(VENV)/.build) ## Run an MLA layer against textbook attention (GPU where there is one)
	$(BIN)/maturin develop --release --quiet
	$(BIN)/python examples/demo.py

.PHONY: test
test: test-rust test-python test-emulated ## Build and run every test that this machine can run

.PHONY: test-rust
test-rust: $(VENV)/.test ## The Rust tests, documentation examples included
	cargo test --quiet $(RUST_CRATES) $(if $(GPU),-- --include-ignored)
	cargo test --quiet --package ferromla --no-default-features --tests

.PHONY: test-python
test-python: $(VENV)/.test ## The Python tests, on both backends where there is a GPU
	$(BIN)/maturin develop --quiet
	$(BIN)/python -m pytest $(PYTEST_MARKS) $(PYTEST_ARGS)

# The kernels compiled by g++, over a machine that runs them on the host.
.PHONY: emulator
emulator: $(VENV)/.build ## Build the emulated GPU, a libcuda.so in build/emulator
	$(BIN)/python tests/emulator/build.py build/emulator

.PHONY: test-emulated
test-emulated: $(VENV)/.test emulator ## The GPU's Rust tests, random problems, wide scales, many parts, clusters and steps on the emulated GPU
	LD_LIBRARY_PATH=$(abspath build/emulator) cargo test --quiet --package ferromla --features cudarc-safe --test server --test cudarc_safe -- --ignored
	$(BIN)/maturin develop --quiet
	$(BIN)/python tests/python/soak.py --device emulated
	$(BIN)/python -m pytest --emulated -m gpu -q tests/python/test_wide_scales.py -k '16 and v4+ and ends_of or 0-16 and (float32 or v4+) or e2m1 and large and (16 or 64) and not v4-'
	$(BIN)/python -m pytest --emulated -m gpu -q tests/python/test_many_parts.py -k 'columns or bfloat16-9 or bfloat16-17'
	$(BIN)/python -m pytest --emulated -m gpu -q tests/python/test_cluster_parts.py -k '(right and 1-16 and 64- and (1x1024 or 2x700)) or (columns and fp16-16-64-1x1024)'
	$(BIN)/python -m pytest --emulated -m gpu -q tests/python/test_steps.py -k 'pages and 16-1-576-64-dtype0 or lists and None-9 or past_the_table and 5-16-1 or stored_steps and 50'

.PHONY: lint
lint: export FERROMLA_WITHOUT_KERNELS := 1
lint: $(VENV)/.test ## Formatting and lints of Rust and Python
	cargo fmt --all --check
	cargo clippy --quiet --workspace --all-targets --features ferromla/cudarc-safe -- -D warnings
	cargo clippy --quiet --package ferromla --all-targets --no-default-features -- -D warnings
	cargo clippy --quiet --package ferromla --lib -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --quiet --workspace --no-deps --features ferromla/cudarc-safe
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: $(VENV)/.test ## Format Rust and Python
	cargo fmt --all
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

.PHONY: bench
bench: $(VENV)/.bench ## Planning and launch benches; on a Hopper GPU the tables of docs/performance*.md too
	$(BIN)/maturin develop --release --quiet
	cargo bench --package ferromla
	$(if $(GPU),$(BIN)/python benches/bench.py,@echo "no GPU: benches/bench.py was not run")

.PHONY: soak
soak: $(VENV)/.test ## Random small problems against float64: 100,000 on a GPU, 2,000 without (SOAK_ARGS for options)
	$(BIN)/maturin develop --release --quiet
	$(BIN)/python tests/python/soak.py $(SOAK_ARGS)

.PHONY: wheel
wheel: $(VENV)/.build ## Build the wheel into dist/
	$(BIN)/maturin build --release --out dist

.PHONY: gpu-bundle
gpu-bundle: $(VENV)/.build ## Pack wheel, Rust tests, benches and pytest files for a GPU machine without Rust
	rm -rf build/gpu-bundle
	$(BIN)/maturin build --release --quiet --out build/gpu-bundle
	$(BIN)/python tests/gpu_bundle/pack.py build/gpu-bundle build/gpu-bundle.tar.xz

.PHONY: clean
clean: ## Remove what was built, the environment included
	rm -rf build dist target .venv python/ferromla/*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.build: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(BUILD_NEEDS)
	touch $@

$(VENV)/.test: $(VENV)/.build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TEST_NEEDS)
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(BENCH_NEEDS)
	touch $@
