# fpfs: `make run` shows it, `make test` tests it; both install what is missing first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
JOBS ?= 2
# An index with CPU builds of torch, e.g. https://download.pytorch.org/whl/cpu, for machines
# whose default index would bring several GB of CUDA builds.
TORCH_INDEX ?=
PYTEST ?= $(VENV)/bin/python -m pytest
PYTEST_ARGS ?=
# Many tests wait for a device or for a process to start.
TEST_PROCESSES ?= 4

STAMPS := $(VENV)/.stamps
# Python compiles what is imported, when it is first: a tenth of what is installed. Container images
# often forbid Python to keep that, and every process would compile it again (torch: 2 s).
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(VENV)/bin/pip --disable-pip-version-check install --quiet --no-compile
ifneq ($(TORCH_INDEX),)
PIP_INDEX := --extra-index-url $(TORCH_INDEX)
endif

# The library is compiled for the extension and for its tests, and in every fresh clone: ccache, where
# there is one, does it once. Without the folder's name in what it compares, in any folder.
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1

NATIVE_SOURCES := $(shell find native CMakeLists.txt -name '*.cc' -o -name '*.h' \
  -o -name 'CMakeLists.txt' -o -name '*.cmake')

.PHONY: help
help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# --- installing -----------------------------------------------------------------------------

.PHONY: setup
setup: $(STAMPS)/extension ## Install what is missing, into .venv and (as root) from Debian

$(STAMPS)/system: mount_scripts/install_packages
	@mkdir -p $(STAMPS)
	mount_scripts/install_packages
	@touch $@

$(STAMPS)/tools-%: mount_scripts/install_packages
	@mkdir -p $(STAMPS)
	mount_scripts/install_packages $*
	@touch $@

.PHONY: tools
tools: $(STAMPS)/tools-test $(STAMPS)/tools-lint ## Install (as root, from Debian) what tests and linters use

$(STAMPS)/venv: $(STAMPS)/system
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@touch $@

# What builds the native part.
$(STAMPS)/builders: $(STAMPS)/venv constraints.txt
	$(INSTALL) $(PIP_INDEX) -c constraints.txt cmake ninja nanobind scikit-build-core
	@touch $@

# Without build isolation the build folder stays usable for quick rebuilds (`make native`). pyfuse3
# and deepspeed come first, with isolation: they are built from source with a newer setuptools than
# Debian's.
$(STAMPS)/packages: $(STAMPS)/builders pyproject.toml constraints.txt
	$(INSTALL) $(PIP_INDEX) -c constraints.txt deepspeed pyfuse3
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(INSTALL) $(PIP_INDEX) --no-build-isolation -c constraints.txt \
	  -e '.[test,bench,dev]'
	@touch $@ $(STAMPS)/extension

$(STAMPS)/extension: $(STAMPS)/packages $(NATIVE_SOURCES)
	@$(MAKE) --no-print-directory native
	@touch $@

# The lock keeps two builds in one checkout from running ninja in one folder at a time.
.PHONY: native
native: ## Rebuild the extension into .venv, quickly
	@test -d build/editable || { echo "build/editable is missing: run make setup"; exit 1; }
	@flock build/.lock $(VENV)/bin/cmake --build build/editable -j $(JOBS)
	@flock build/.lock $(VENV)/bin/cmake --install build/editable --component python \
	  --prefix "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
	  > /dev/null

.PHONY: stubs
stubs: ## Write the extension's type stub anew (a test compares it)
	$(VENV)/bin/python -m nanobind.stubgen -q -m fpfs._native -o fpfs/_native.pyi
	$(VENV)/bin/ruff format --quiet fpfs/_native.pyi

.PHONY: install-mount-helper
install-mount-helper: setup ## Let mount(8) and fstab mount the type fuse.fpfs (root)
	mount_scripts/install_mount_helper $(CURDIR)/$(VENV)

# Where Debian's shells look for what packages bring.
COMPLETIONS ?= /usr/share
.PHONY: install-completion
install-completion: setup ## Let bash, zsh and fish complete fpfs and fpfs-ctl, for all users (root)
	mount_scripts/install_completion $(CURDIR)/$(VENV) $(COMPLETIONS)

# --- running --------------------------------------------------------------------------------

.PHONY: run
run: setup ## Train, save, remount, load and compare on a mount of four device folders
	$(VENV)/bin/python examples/quickstart.py

.PHONY: bench
bench: setup $(STAMPS)/tools-test ## Measure against the plain filesystem, fio and a naive peer
	$(VENV)/bin/python -m benchmarks $(BENCH_ARGS)

# --- testing --------------------------------------------------------------------------------

.PHONY: test
test: test-native test-python ## The tests that every change has to pass

.PHONY: test-python
test-python: $(STAMPS)/tools-test setup ## The Python tests, TEST_PROCESSES side by side
	$(PYTEST) -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

.PHONY: test-long
test-long: $(STAMPS)/tools-test setup ## All Python tests, the long ones, too, with other random numbers each time
	FPFS_LONG=1 $(PYTEST) -n $(TEST_PROCESSES) --dist worksteal -m "" $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(STAMPS)/tools-test setup ## The Python tests that need a GPU
	$(PYTEST) -m gpu $(PYTEST_ARGS) tests/clients/test_gpu.py

# What commands print is kept: look at what git diff shows of it before it is committed.
.PHONY: golden
golden: setup $(STAMPS)/tools-test ## Keep the output of --help, tables and JSON as it is now
	rm -rf tests/golden/help docs/json
	FPFS_GOLDEN=write $(PYTEST) -q tests/unit/cli/test_help.py tests/fuse/commands/test_golden.py
	git --no-pager diff --stat -- tests/golden docs/json docs/fpfs-ctl.md

.PHONY: test-native
test-native: $(STAMPS)/tools-test $(STAMPS)/builders ## The C++ tests, without sanitizer
	@$(call native_tests,build/native,)

.PHONY: test-asan
test-asan: setup $(STAMPS)/tools-test ## The C++ tests under the address and undefined behaviour sanitizers
	@$(call native_tests,build/asan,address)

.PHONY: test-tsan
test-tsan: setup $(STAMPS)/tools-test ## The C++ tests under the thread sanitizer
	@$(call native_tests,build/tsan,thread)

# Where there is all that the native tests need, none may be skipped.
FPFS_NO_SKIPS ?= $(shell test "$$(id -u)" -ne 0 || test ! -e /dev/loop-control || echo 1)

# $(1): build folder, $(2): sanitizer. ctest says nothing of tests that pass: what they skipped
# stands in its log. What failed is told last, where it is not lost among what passed, and what repeats
# it; in the names of cases ? stands for what doctest or the shell would take otherwise.
define native_tests
$(VENV)/bin/cmake -S native -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
  -DCMAKE_CXX_COMPILER=$(CXX) -DFPFS_TESTS=ON -DFPFS_SANITIZE=$(2) > /dev/null && \
$(VENV)/bin/cmake --build $(1) -j $(JOBS) && \
{ FPFS_NO_SKIPS=$(FPFS_NO_SKIPS) FPFS_SANITIZE_WANTED=$(2) \
    $(VENV)/bin/ctest --test-dir $(1) -j $(JOBS) --output-on-failure || \
  { echo 'What failed, once more:'; \
    grep -E -B 8 -A 8 '(ERROR|exception): ' $(1)/Testing/Temporary/LastTest.log; \
    sed -nE '/^TEST CASE: /h; /(ERROR|exception): /{x;p;x}' $(1)/Testing/Temporary/LastTest.log | \
      sort -u | sed -E "s/[,']/?/g; s/^TEST CASE: *(.*)/repeat: $(subst /,\/,$(1))\/tests\/fpfs_native_tests -tc='\1'/"; \
    exit 1; }; } && \
{ grep -E '^skipped [0-9]+: ' $(1)/Testing/Temporary/LastTest.log || true; }
endef

FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: setup $(STAMPS)/tools-fuzz ## Fuzz the parser of FUSE requests (clang), FUZZ_SECONDS for each target
	$(VENV)/bin/cmake -S native -B build/fuzz -G Ninja \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DFPFS_TESTS=OFF -DFPFS_FUZZ=ON \
	  -DCMAKE_CXX_COMPILER=$$(command -v clang++ || command -v clang++-14) > /dev/null
	$(VENV)/bin/cmake --build build/fuzz -j $(JOBS)
	for target in build/fuzz/fuzz/*_fuzz; do \
	  mkdir -p build/corpus/$$(basename $$target); \
	  $$target -max_total_time=$(FUZZ_SECONDS) build/corpus/$$(basename $$target) || exit 1; done

KILLS ?= 200
.PHONY: kill
kill: setup ## Kill the server KILLS times, and what else can happen to it, under saving programs
	$(VENV)/bin/python -m tests.crash.kill --kills $(KILLS)

CUTS ?= 2000
SEED ?=
# In which recordings the devices change: sometimes, always, never.
CHANGES ?= sometimes
.PHONY: crash
crash: setup ## Cut the power of recorded programs CUTS times, mount what is left, check the promises
	$(VENV)/bin/python -m tests.crash.power.cuts --cuts $(CUTS) --changes $(CHANGES) \
	  $(if $(SEED),--seed $(SEED))

.PHONY: faults
faults: setup ## Let each device and catalog operation of a save fail once, check what is left
	$(VENV)/bin/python -m tests.crash.injection

FLIPS ?= 10000
# Each of these is a crash and a mount.
ARENA_FLIPS ?= 20
.PHONY: flips
flips: setup test-native ## Flip FLIPS bits in objects, catalogs and the tables of staging memory
	FPFS_LONG=1 FPFS_OBJECT_FLIPS=$$(($(FLIPS) * 45 / 100)) FPFS_ARENA_FLIPS=$(ARENA_FLIPS) \
	  FPFS_DAMAGES=$$(($(FLIPS) / 10)) FPFS_TEST_HANG_S=7200 \
	  $(PYTEST) tests/fuse/devices/test_flips.py tests/unit/catalog/test_catalog_copies.py -s $(PYTEST_ARGS)
	FPFS_FLIPS=$$(($(FLIPS) * 45 / 100)) build/native/tests/fpfs_native_tests -tc='takeover: a wrong bit*'

SOAK_SECONDS ?= 300
.PHONY: soak
soak: setup ## Random operations on a mount and a plain directory, compared, for minutes
	FPFS_SOAK_SECONDS=$(SOAK_SECONDS) FPFS_TEST_HANG_S=$$(($(SOAK_SECONDS) + 600)) \
	  $(PYTEST) tests/model -m "" -s $(PYTEST_ARGS)

.PHONY: pjdfstest
pjdfstest: setup ## The POSIX suite, built in PJD=dir, against a mount (root)
	@test -n "$(PJD)" || { echo "make pjdfstest needs PJD=folder of a built pjdfstest"; exit 1; }
	$(VENV)/bin/python -m tests.conformance.pjdfstest "$(PJD)"

.PHONY: xfstests
xfstests: setup ## xfstests, built in XFSTESTS=dir, on fpfs and on ext4: what differs (root)
	@test -n "$(XFSTESTS)" || { echo "make xfstests needs XFSTESTS=folder of a built xfstests"; exit 1; }
	$(VENV)/bin/python -m tests.conformance.xfstests "$(XFSTESTS)" $(XFSTESTS_ARGS)

.PHONY: ltp
ltp: setup ## The files tests of LTP, installed in LTP=dir, on fpfs and on ext4: what differs (root)
	@test -n "$(LTP)" || { echo "make ltp needs LTP=folder of an installed LTP"; exit 1; }
	$(VENV)/bin/python -m tests.conformance.ltp "$(LTP)" $(LTP_ARGS)

.PHONY: lint
lint: setup $(STAMPS)/tools-lint ## ruff, mypy, import-linter, clang-format, clang-tidy, shellcheck
	@.ci/lint $(VENV)

.PHONY: analyze
analyze: setup $(STAMPS)/tools-lint ## clang's analyzer on the C++ files that it has not passed
	@.ci/lint $(VENV) analyze

.PHONY: clean
clean: ## Remove what was built; .venv stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f $(STAMPS)/extension $(STAMPS)/packages
