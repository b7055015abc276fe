# A thin face over CMake. `make help` lists the targets.
CACHE     := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/neap
LLAMA     := $(CACHE)/llama.cpp-0c1e570
# The llama.cpp to build against, and where its programs lie.
NEAP_LLAMA_DIR ?= $(LLAMA)/src
NEAP_LLAMA_BIN ?= $(LLAMA)/build/bin
PREFIX    ?= /usr/local
FUZZ_SECONDS ?= 60
LLAMA_PROGRAMS := llama-server llama-cli llama-completion llama-bench llama-perplexity \
                  llama-quantize llama-tokenize
C_FILES = $(shell git ls-files '*.c' '*.h')

.PHONY: all help setup build learn demo test test-all bench fuzz install uninstall clean format \
        format-check tidy layers

all: setup build learn

help:
	@echo 'make             set up, build, and learn the default model for the codec klt'
	@echo 'make demo        set up, build, and show the main job on the default model'
	@echo 'make test        set up, build, and run every test'
	@echo 'make test-all    also sanitizers, the full matrix, long soaks, a bare Debian'
	@echo 'make bench       every benchmark, quick; figures of this machine'
	@echo 'make fuzz        every fuzz target for FUZZ_SECONDS ($(FUZZ_SECONDS)) each'
	@echo 'make install     into PREFIX ($(PREFIX)), under DESTDIR; make uninstall takes it back'
	@echo 'make clean       removes what was built here'
	@echo 'make format tidy layers   style of the sources'

setup:
	@tools/setup

build:
	@mkdir -p build
	@cmake --preset release -DNEAP_LLAMA_DIR=$(NEAP_LLAMA_DIR) -DCMAKE_INSTALL_PREFIX=$(PREFIX) \
		>build/configure.log 2>&1 || { cat build/configure.log >&2; exit 1; }
	@cmake --build build
	@ln -sf $(addprefix $(NEAP_LLAMA_BIN)/,$(LLAMA_PROGRAMS)) build/bin/

# What the codec klt must know of the default model, in the user's cache folder: minutes, once.
learn: build
	@build/bin/neap train --missing --tokens 32768 smollm2-135m

demo: setup build
	@build/bin/neap demo

test:
	@tools/setup --tests
	@$(MAKE) --no-print-directory build
	@tools/run-tests

test-all:
	@tools/setup --tests --dev
	@$(MAKE) --no-print-directory build
	@NEAP_TEST_ALL=1 tools/run-tests

bench: setup build
	@for name in parity attn decode ttft evict codec values fidelity multitask; do build/bin/neap bench $$name --quick || exit 1; done

fuzz:
	@tools/setup --dev
	@cmake --preset fuzz
	@cmake --build --preset fuzz
	@tools/run-fuzz build-fuzz $(FUZZ_SECONDS)

install: setup build
	@cmake --install build
	@cp build/install_manifest.txt build/installed.txt

uninstall:
	@test -f build/installed.txt || { echo 'nothing was installed from this folder' >&2; exit 1; }
	@sed 's|^|$(DESTDIR)|' build/installed.txt | while read -r file || [ -n "$$file" ]; do \
		rm -fv "$$file"; done
	@rm build/installed.txt

clean:
	@rm -rf build build-dev build-asan build-tsan build-fuzz

format:
	@clang-format -i $(C_FILES)

format-check:
	@clang-format --dry-run -Werror $(C_FILES)

tidy: build
	@clang-tidy --quiet -p build $(shell git ls-files 'src/*.c' 'apps/*.c')

layers:
	@tools/check-layers
