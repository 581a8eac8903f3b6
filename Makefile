# Commands of the project; `make help` lists them. Each step keeps what it made, so a second run starts at once.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
BUILD ?= build
JOBS ?= $(shell nproc)
PYTHON := $(VENV)/bin/python

PACKAGES := g++ cmake ninja-build ccache pkg-config python3-venv python3-dev \
            libdnnl-dev libgtest-dev
# The environment follows from requirements.txt: its hash names the stamp.
STAMP := $(VENV)/.fulmen-$(shell sha256sum requirements.txt | cut -c1-16)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

# Objects are found again in any clone: paths below the project are hashed relative to it.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

.PHONY: help packages build install demo test test-layers test-cpp test-python bench sanitize clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 24

packages: # Debian packages, only where one is missing
	@missing=""; for p in $(PACKAGES); do \
	  dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q "ok installed" || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
	  echo "installing Debian packages:$$missing"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing; fi

$(STAMP): requirements.txt | packages
	@[ -x $(PYTHON) ] || python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q --disable-pip-version-check -r requirements.txt
	@rm -f $(VENV)/.fulmen-*; touch $@

build: packages $(STAMP) ## set up everything and build into build/; leaves .venv/bin/fulmen
	@[ -f $(BUILD)/build.ninja ] || cmake -G Ninja -B $(BUILD) -DPython_EXECUTABLE=$(abspath $(PYTHON)) > $(BUILD).log 2>&1 \
	  || { cat $(BUILD).log; rm -f $(BUILD).log; exit 1; }; rm -f $(BUILD).log
	cmake --build $(BUILD) -j $(JOBS) --target _core
	@$(PYTHON) python/develop.py $(BUILD)

demo: build ## train a GPT through Fulmen beside PyTorch; writes fulmen-report.html
	$(PYTHON) examples/demo.py $(ARGS)

test: build test-layers test-cpp test-python ## everything that needs no GPU

test-layers:
	python3 tools/check_layers.py

test-cpp: build
	cmake --build $(BUILD) -j $(JOBS)
	ctest --test-dir $(BUILD) --output-on-failure

test-python: build
	$(PYTHON) -m pytest $(ARGS)

bench: build ## attention, training, overhead and claims beside PyTorch and Inductor
	$(VENV)/bin/fulmen bench attention --device cpu
	$(VENV)/bin/fulmen bench train --device cpu
	$(VENV)/bin/fulmen bench overhead
	$(VENV)/bin/fulmen bench claims

# Python stays out: the sanitizers' runtime would have to be loaded before the interpreter. SANITIZE_TESTS is a filter of
# GoogleTest; the default leaves out cuDNN and oneDNN, which are not ours to check. SANITIZE_KERNELS=OFF leaves the CPU
# kernels as they are, whose instrumented forms take most of the compilation: everything else is checked.
SANITIZE_KERNELS ?= ON
SANITIZE_TESTS ?= *:-*Cudnn*:*cudnn*:*Onednn*
THREAD_TESTS ?= *AttentionOnEachIsa*:*Gemm*:*Tile*
sanitize: packages ## the C++ tests under the address and undefined-behaviour sanitizers, the kernels under the thread sanitizer
	cmake -G Ninja -B build-sanitize -DFULMEN_SANITIZE=ON -DFULMEN_SANITIZE_KERNELS=$(SANITIZE_KERNELS) -DFULMEN_BUILD_PYTHON=OFF
	cmake --build build-sanitize -j $(JOBS) --target fulmen_tests
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 build-sanitize/fulmen_tests --gtest_brief=1 --gtest_filter='$(SANITIZE_TESTS)'
	cmake -G Ninja -B build-threads -DFULMEN_SANITIZE_THREAD=ON -DFULMEN_SANITIZE_KERNELS=$(SANITIZE_KERNELS) -DFULMEN_BUILD_PYTHON=OFF
	cmake --build build-threads -j $(JOBS) --target fulmen_tests
	TSAN_OPTIONS=halt_on_error=1 build-threads/fulmen_tests --gtest_brief=1 --gtest_filter='$(THREAD_TESTS)'

install: build ## install the C++ library and CMake package under PREFIX (default /usr/local)
	cmake --install $(BUILD) --prefix $(or $(PREFIX),/usr/local)

clean: ## remove the build; the environment stays
	rm -rf $(BUILD)
