# `make demo` and `make test` work on a machine that has only python3 (3.11+), pip, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test browser lint types format sanitize limits neon clean

demo: $(READY)
	$(BIN)/sparsight demo

test: $(READY) browser
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The page's tests drive a real browser. Where it is missing and can be installed it is; elsewhere they are
# skipped, and the summary says so.
browser:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { \
	    echo "installing chromium for the tests of the page"; export DEBIAN_FRONTEND=noninteractive; \
	    timeout 600 sh -c 'apt-get update && apt-get install -y --no-install-recommends chromium' >/dev/null 2>&1; \
	} || echo "chromium could not be installed; the tests of the page will be skipped"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The kernels under AddressSanitizer and UBSan, built apart from the installed ones.
sanitize: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nanobind cmake
	$(BIN)/cmake -S . -B build/sanitize -DSPARSIGHT_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug \
	    -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/sanitize -j 2
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 SPARSIGHT_NATIVE="$$(ls build/sanitize/_native*.so)" \
	    $(BIN)/python -m pytest tests/kernels tests/nn tests/dst/test_rewire.py \
	        tests/moe/test_products.py

# What a core can do, and how near the kernels come; for processors with AVX-512.
limits:
	mkdir -p build
	$(CXX) -std=c++17 -O3 -mavx512f -mprefer-vector-width=512 -w -Icsrc benchmarks/limits.cpp csrc/plan.cpp -o build/limits
	build/limits

# The kernels for NEON, on a machine that has none: needs g++-aarch64-linux-gnu and qemu-user-static. Two minutes.
neon:
	mkdir -p build
	aarch64-linux-gnu-g++ -std=c++17 -O2 -fopenmp -static -DSPARSIGHT_ARM -Wall -Wextra -Icsrc tests/kernels/check.cpp \
	    $(addprefix csrc/,isa.cpp isa_portable.cpp isa_neon.cpp plan.cpp linear.cpp conv.cpp conv_direct.cpp \
	        conv_unfold.cpp grouped.cpp product_portable.cpp product_neon.cpp) -o build/check_neon
	qemu-aarch64-static build/check_neon

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and by its exact version: any looser request may bring gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
