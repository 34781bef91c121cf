# Sets up what each target needs, in environments of its own (.venv, .venv-2.13 and .venv-frameworks), and reuses it the
# next time.
# Variables: make TORCH=torch==2.15.0 test-fast      another PyTorch
#            make PYTHON=python3.12 env              another Python (3.11 or newer)
#            make ZIPCCL_CUDA=0 build                without the CUDA part (1: fail where it cannot be built)
#            make PYTEST_ARGS='-k gather -x' test-fast
#            make REQUIRE_GPU=1 gpu                  fail where there is no GPU
#            make OWN=python3 gpu                    with the PyTorch, pytest and rich that this Python has: no download

PYTHON = python3
TORCH = torch==2.14.1
OLD_TORCH = torch==2.13.0
MEGATRON = megatron-core==0.19.2
PYTEST_ARGS =
REQUIRE_GPU ?=
OWN =

ENV = .venv
OLD_ENV = .venv-2.13
FRAMEWORKS_ENV = .venv-frameworks
# Where the tests run against the older torch: a copy without zipccl/, so that they can only import what is installed.
OLD_TREE = build/test-2.13

CPP = $(shell find csrc tests benchmarks -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh")
EXTENSION_FILES = setup.py $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PYTHON_FILES = $(shell find zipccl -name '*.py' -o -name '*.pyi' -o -name 'py.typed')

SAY = @printf '\n==> %s\n'
EXTRAS = -c 'import sys, tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*[tool for name in sys.argv[1:] for tool in extras[name]])'

SHELL = /bin/bash
.SHELLFLAGS = -o pipefail -c

.NOTPARALLEL:
.SECONDARY:
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-old test-frameworks lint format bench bench-net bench-train bench-moe bench-titan gpu \
	test-gpu bench-gpu sass build build-own env clean FORCE

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build  ## train a small transformer over gloo and over zipccl, and compare
	$(SAY) 'Demo: FSDP2 on two processes, over gloo and over zipccl'
	@$(ENV)/bin/python examples/demo.py

test: lint build  ## lint, all tests, and the core ones also on the older PyTorch
	$(SAY) 'Tests on $(TORCH)'
	$(ENV)/bin/python -m pytest $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory test-old

test-fast: build  ## the tests that are marked core
	$(SAY) 'Core tests on $(TORCH)'
	$(ENV)/bin/python -m pytest -m core $(PYTEST_ARGS)

test-old: $(OLD_ENV)/.installed  ## the tests that are marked core, on the older PyTorch
	$(SAY) 'Core tests on $(OLD_TORCH), against the installed package'
	@rm -rf $(OLD_TREE) && mkdir -p $(OLD_TREE)
	@cp -r $(wildcard tests examples benchmarks docs csrc setup.py pyproject.toml README.md LICENSE) $(OLD_TREE)
	cd $(OLD_TREE) && $(CURDIR)/$(OLD_ENV)/bin/python -m pytest -m core $(PYTEST_ARGS)

test-frameworks: build $(FRAMEWORKS_ENV)/.frameworks  ## training frameworks over zipccl (PYTEST_ARGS='-m slow': the longer ones)
	$(SAY) 'Frameworks over zipccl, on CPU processes'
	$(FRAMEWORKS_ENV)/bin/python -m pytest tests/frameworks $(PYTEST_ARGS)

lint: $(ENV)/.tools  ## check style and types, change nothing
	$(SAY) 'Lint'
	$(ENV)/bin/ruff check .
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/mypy
	@echo "clang-format: $(words $(CPP)) files"
	@$(ENV)/bin/clang-format --dry-run -Werror $(CPP)

format: $(ENV)/.tools  ## rewrite the sources in the style that lint checks
	$(ENV)/bin/ruff check --fix .
	$(ENV)/bin/ruff format .
	@$(ENV)/bin/clang-format -i $(CPP)

bench: build  ## the codec against memcpy and other compressors
	$(ENV)/bin/python benchmarks/codec.py

bench-net: build  ## the collectives against Gloo on links of several rates, in forty minutes (needs root and iproute2)
	$(ENV)/bin/python benchmarks/collectives.py

bench-train: build  ## training steps over Gloo and over zipccl on a link of 1 Gbit/s, in three minutes (as bench-net)
	$(ENV)/bin/python benchmarks/train.py

bench-moe: build  ## a mixture of experts over Gloo and over zipccl, in five minutes (as bench-net)
	$(ENV)/bin/python benchmarks/moe.py

bench-titan: build $(FRAMEWORKS_ENV)/.frameworks  ## steps of TorchTitan's models over Gloo and over zipccl, in fifteen minutes (as bench-net)
	$(FRAMEWORKS_ENV)/bin/python benchmarks/titan.py

GPU_PYTHON = $(if $(OWN),PYTHONPATH=.:$$PYTHONPATH $(OWN),$(ENV)/bin/python)
GPU_BUILD = $(if $(OWN),build-own,build)
GPU_TESTS = REQUIRE_GPU=$(REQUIRE_GPU) $(GPU_PYTHON) -m pytest tests/gpu
GPU_BENCHMARKS = $(GPU_PYTHON) benchmarks/gpu.py $(if $(filter 1,$(REQUIRE_GPU)),--require)
GPU_REPORT = build/gpu-report

gpu: $(GPU_BUILD)  ## test-gpu and bench-gpu, in ten minutes; build/gpu-report.txt holds what they say
	@mkdir -p build
	@{ git describe --always --dirty; nvidia-smi -L 2>&- || echo 'nvidia-smi shows no GPU'; \
		printf '\n==> %s\n' 'Tests on a GPU'; \
		$(GPU_TESTS) --session-timeout=300 --durations=10 $(PYTEST_ARGS); tests=$$?; \
		printf '\n==> %s\n' 'Benchmarks on a GPU'; \
		$(GPU_BENCHMARKS) --json $(GPU_REPORT).json && exit $$tests; \
	} 2>&1 | tee $(GPU_REPORT).txt

test-gpu: $(GPU_BUILD)  ## the tests of tests/gpu; without a GPU they say so (REQUIRE_GPU=1: and fail)
	$(SAY) 'Tests on a GPU'
	$(GPU_TESTS) $(PYTEST_ARGS)

bench-gpu: $(GPU_BUILD)  ## the CUDA codec against a copy, and the collectives against NCCL (those need two GPUs)
	$(SAY) 'Benchmarks on a GPU'
	$(GPU_BENCHMARKS)

sass: $(ENV)/.tools  ## the CUDA kernels' instructions per element, and what they mean on several GPUs (needs nvcc only)
	$(ENV)/bin/python benchmarks/sass.py --arch all

build: $(ENV)/.installed  ## compile the extension, if anything changed

# What the environment of this Makefile had built for itself may be gone then.
build-own:
	$(SAY) 'Building the extension for the PyTorch of $(OWN)'
	@rm -f $(ENV)/.built
	$(OWN) setup.py build_ext --inplace

env: $(ENV)/.tools  ## PyTorch and the tools, without the extension

clean:  ## remove what was built; the environments stay
	rm -rf build zipccl.egg-info zipccl/_C*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(ENV)/.built $(ENV)/.installed $(OLD_ENV)/.installed

# Environments. Each stamp file says that a step is done: .torch (it holds which), .tools, .cuda (it holds what was asked
# for), .built, .installed.

%/bin/python:
	$(SAY) 'New environment: $*'
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
		f"zipccl needs Python 3.11 or newer, this is {v[0]}.{v[1]}; name another: make PYTHON=python3.11")'
	$(PYTHON) -m venv $*

$(ENV)/.torch: WANTED = $(TORCH)
$(OLD_ENV)/.torch: WANTED = $(OLD_TORCH)
%/.torch: FORCE | %/bin/python
	@if [ "$$(cat $@ 2>/dev/null)" != '$(WANTED)' ]; then \
		printf '\n==> %s\n' '$(WANTED) into $*: PyTorch is a big download, up to several GB; later runs reuse it'; \
		$*/bin/python -m pip install '$(WANTED)' && echo '$(WANTED)' > $@; \
	fi

$(ENV)/.tools: NAMES = test dev
$(OLD_ENV)/.tools: NAMES = test
%/.tools: %/.torch pyproject.toml
	$(SAY) 'Tools into $*: $(NAMES)'
	@$*/bin/python -m pip install $$($*/bin/python $(EXTRAS) $(NAMES)) | sed -u '/^Requirement already satisfied/d'
	@touch $@

PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
# On top of $(ENV), whose PyTorch and zipccl it shares; of some other packages it has versions of its own.
$(FRAMEWORKS_ENV)/.frameworks: pyproject.toml | $(ENV)/.installed $(FRAMEWORKS_ENV)/bin/python
	$(SAY) 'Frameworks into $(FRAMEWORKS_ENV), on top of $(ENV)'
	@echo "import site; site.addsitedir('$$($(ENV)/bin/python $(PACKAGES))')" \
		> "$$($(FRAMEWORKS_ENV)/bin/python $(PACKAGES))/base.pth"
	@$(FRAMEWORKS_ENV)/bin/python -m pip install $$($(ENV)/bin/python $(EXTRAS) frameworks) \
		| sed -u '/^Requirement already satisfied/d'
	@# It asks for Python 3.12, but runs on 3.11; what it needs besides is there.
	@$(FRAMEWORKS_ENV)/bin/python -m pip install --no-deps --ignore-requires-python $(MEGATRON)
	@touch $@

CUDA_WISH = ZIPCCL_CUDA=$(ZIPCCL_CUDA) TORCH_CUDA_ARCH_LIST=$(TORCH_CUDA_ARCH_LIST)
%/.cuda: FORCE | %/bin/python
	@[ "$$(cat $@ 2>/dev/null)" = '$(CUDA_WISH)' ] || echo '$(CUDA_WISH)' > $@

$(ENV)/.built: $(ENV)/.tools $(ENV)/.cuda $(EXTENSION_FILES)
	$(SAY) 'Building the extension for $(TORCH): a few minutes the first time'
	$(ENV)/bin/python setup.py build_ext --inplace
	@touch $@

# Editable: zipccl can be imported from any folder, and comes from this one.
$(ENV)/.installed: $(ENV)/.built setup.py pyproject.toml
	$(SAY) 'Installing zipccl into $(ENV)'
	$(ENV)/bin/python -m pip install --no-deps --no-build-isolation --editable .
	@touch $@

$(OLD_ENV)/.installed: $(OLD_ENV)/.tools $(OLD_ENV)/.cuda $(EXTENSION_FILES) $(PYTHON_FILES)
	$(SAY) 'Building and installing zipccl for $(OLD_TORCH): a few minutes the first time'
	$(OLD_ENV)/bin/python setup.py build_ext
	$(OLD_ENV)/bin/python -m pip install --no-deps --no-build-isolation --force-reinstall .
	@touch $@
