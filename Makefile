# Strata: build, run, test, check. `make help` lists the targets.
#
# go.work ties five Go modules together, the workspace:
#
#   .           the engine               (etcd client; no Kubernetes)
#   kube        storage.Interface on it  (k8s.io/apiserver)
#   server      the strata command       (k8s.io/kubernetes)
#   stratatest  control planes for the tests of operators (client-go)
#   test        tests that start programs, the benchmark, and the helpers that they share
#
# Other go.mod files pin programs of others: those below test/upstream run tests of others.
#
# Nothing needs to be installed by hand: tools are pinned in tools/go.mod and built by go itself.

GO ?= go

# What `make build` writes, and where `make run` keeps its data (strata up --data-dir).
BIN  := bin/strata
ARGS ?=

# A release sets VERSION, without the leading v: make build VERSION=1.2.3
VERSION ?=
LDFLAGS := $(if $(VERSION),-X github.com/stratakube/strata/server/internal/version.strata=$(VERSION))

# The commit is stamped by go where git can be asked; a tarball or a foreign checkout builds without it.
BUILDVCS := $(shell git status --porcelain -uno >/dev/null 2>&1 && echo auto || echo false)

# The race detector needs a C compiler. `make test` uses it where there is one; `make test RACE=-race` insists.
RACE ?= $(if $(filter 1,$(shell $(GO) env CGO_ENABLED)),-race)

# Tests of all packages of a module together; a test that hangs is a failure, not a night without a result.
TEST_TIMEOUT ?= 30m

# kube/ supports the two newest minor versions of k8s.io/apiserver. In the workspace it is built with the newer one,
# which the server requires; outside of it, with the older one, which kube/go.mod requires.
ALONE := GOWORK=off
export GOFLAGS := $(strip $(filter-out -buildvcs=%,$(GOFLAGS)) -buildvcs=false)

# Upstream's storage suites that only one of the two minors has are in files with a build tag of kube/kubestorage.
# Without it, a test builds its package again with the tag.
NEWEST := apiserver_v0_37
OLDEST := apiserver_v0_36

.DEFAULT_GOAL := build

# Every target is a command. Other targets: hack/*.mk.
MAKEFLAGS += --no-builtin-rules
.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\#.*/\1/p' Makefile hack/*.mk)

help: ## list these targets; `make help-all` lists all
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z0-9-]*:.*## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile

##@ Build

build: ## build bin/strata (several minutes the first time)
	@[ -e $(BIN) ] || echo 'The first build compiles Kubernetes, which takes some minutes.'
	$(GO) build -buildvcs=$(BUILDVCS) -ldflags '$(LDFLAGS)' -o $(BIN) ./server/cmd/strata

kubectl-strata: ## build bin/kubectl-strata, the plugin of kubectl that reads the past
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=$(BUILDVCS) -ldflags '-s -w $(LDFLAGS)' -o bin/kubectl-strata ./server/cmd/kubectl-strata

run: build ## run a control plane on an embedded etcd: make run ARGS='--help'
	./$(BIN) up $(ARGS)

clean: ## remove what the build wrote; data directories stay
	rm -rf bin

##@ Test

# tools/testrun runs the tests, decides whether they passed, and prints a summary; see there.
RUN_TESTS = (cd tools && $(ALONE) $(GO) build -o ../bin/testrun ./testrun) && bin/testrun -go '$(GO)' -timeout '$(TEST_TIMEOUT)' -flags '$(TEST_FLAGS)'

# Packages of make test, from the top, or modules: PKGS='./mirror/... ./kube/readpath' or PKGS=kube
PKGS ?= engine kube server test stratatest

test: ## run all tests, or some packages: make test PKGS=./mirror/...; engine, kube and stratatest with the race detector
	@$(RUN_TESTS) $(RACE) $(PKGS)

quick: build gofmt ## before each commit: gofmt, vet of the engine, short tests without the race detector, and one real server; a minute
	$(ALONE) $(GO) vet ./...
	@export STRATA_BINARY='$(CURDIR)/$(BIN)' && $(RUN_TESTS) -together -flags '-short -vet=off $(TEST_FLAGS)' engine ./kube/kubestorage ./kube/readpath \
		./kube/continuetoken ./kube/listadmission ./kube/internal/... ./test/e2e/api/semantics

nightly: ## every test under the race detector, long forms, version skew, chaos with fsync and beside an earlier release; a missing program is a failure: hours
	hack/nightly

# How long each fuzz target runs; the long run is 10m. What it finds stays in testdata/fuzz of the package, for
# every later run of the tests; inputs that only add coverage stay in the build cache.
FUZZTIME ?= 20s
FUZZ ?= ^Fuzz

fuzz: ## run every fuzz target, one after another: make fuzz FUZZTIME=10m FUZZ='FuzzStored|FuzzItems'
	hack/fuzz '$(FUZZTIME)' '$(FUZZ)'

# A failing seed repeats its run: make simulate SEEDS=1 STRATA_TEST_SEED=N
SEEDS ?= 500

simulate: ## run servers on a simulated etcd with faults, by random seeds: make simulate SEEDS=10000
	cd kube && STRATA_TEST_SIMULATIONS='$(SEEDS)' $(GO) test -vet=off -count=1 -timeout=0 -v -run '^TestSimulation_' ./kubestorage

# Each mutation of tools/mutants/table.go changes one place of the code; tests without the race detector must find it.
mutants: ## change places of the code one by one, and fail if the tests of the place pass: make mutants ARGS="-only 'M1|M2'"
	cd tools && $(ALONE) $(GO) test -vet=off -count=1 ./mutants && $(ALONE) $(GO) run ./mutants -root .. $(ARGS)

##@ Check

lint: gofmt boundaries tidy check-docs check-commits prose vet staticcheck analyze ## all static checks

generate: UPDATE := -update
generate: ## write the rules of stored forms, the tables of docs/reference.md, the rules for the Prometheus operator, and the sessions of docs

verify: ## fail if a file that `make generate` writes is stale

generate verify:
	$(if $(UPDATE),cd server && $(GO) run ./internal/rulegen)
	cd server && $(GO) test -vet=off -count=1 -run '^TestReference_TablesAreCurrent$$' ./internal/apiserver $(UPDATE)
	cd server && $(GO) test -vet=off -count=1 -run '^TestPrometheusRule_EqualsRules$$' ./internal/deployment $(UPDATE)
	cd test && $(GO) test -vet=off -count=1 -run '^TestDocument_Sessions_HaveTheirOutput$$' ./e2e/api/history $(UPDATE)
	cd test && $(GO) test -vet=off -count=1 -run '_Sessions_HaveTheirOutput$$' ./e2e/api/tour $(UPDATE)

##@ Compare, and run tests of others

bench: build ## compare with the upstream cacher: make bench ARGS='-quick'
	$(GO) run ./test/bench $(ARGS)

# Kubernetes' own tests of what the engine answers, built from the release that the server is built from. The module
# test/upstream/conformance is outside the workspace, so that the dependencies of these tests are none of the server's.
ENGINE ?= strata
COMPACTION_INTERVAL ?= 1m
REPORTS ?= bin/conformance-$(ENGINE)
KUBERNETES = $(shell cd test/upstream/conformance && $(ALONE) $(GO) list -m -f '{{.Version}}' k8s.io/kubernetes)
E2E_LDFLAGS = -s -w -X k8s.io/component-base/version.gitVersion=$(KUBERNETES)

conformance: build ## run Kubernetes' conformance tests that need no containers: make conformance ENGINE=upstream ARGS='-focus Watchers'
	cd test/upstream/conformance && $(ALONE) $(GO) vet . && $(ALONE) $(GO) test -count=1 .
	cd test/upstream/conformance && $(ALONE) $(GO) build -o ../../../bin/conformance .
	cd test/upstream/conformance && $(ALONE) $(GO) build -ldflags '$(E2E_LDFLAGS)' -o ../../../bin/kube-controller-manager k8s.io/kubernetes/cmd/kube-controller-manager
	cd test/upstream/conformance && $(ALONE) $(GO) test -c -vet=off -ldflags '$(E2E_LDFLAGS)' -o ../../../bin/e2e.test k8s.io/kubernetes/test/e2e
	exec bin/conformance -engine '$(ENGINE)' -compaction-interval '$(COMPACTION_INTERVAL)' -reports '$(REPORTS)' $(ARGS)

# Test suites of other projects, on upstream's storage layer and on Strata's: docs/conformance.md. What they copy and build
# is below bin/suites.
suites: ## run all of them and write docs/conformance.md: make suites ARGS='-units controlplane'
	cd test/upstream/suites && $(ALONE) $(GO) build -o ../../../bin/run-suites .
	exec bin/run-suites -root . $(ARGS)

skew: stock ## run strata beside, before and after stock kube-apiservers, on stock etcds; a skipped test is a failure
	cd test && STRATA_TEST_STOCK=$(STOCK) STRATA_TEST_REQUIRE=stock $(GO) test -count=1 -timeout 30m -v $(ARGS) ./e2e/resumption/skew >$(STOCK)/skew.log 2>&1 || \
		{ grep -E '^ *--- FAIL|_test.go:' $(STOCK)/skew.log; echo "$(STOCK)/skew.log has it all"; exit 1; }
	@grep -E '^ *--- ' $(STOCK)/skew.log; ! grep -E '^ *--- SKIP' $(STOCK)/skew.log

# The quick package has 352 specs, of clients; ENVTEST_PACKAGES=all takes 7 minutes on two processors.
ENVTEST_PACKAGES ?= ./pkg/client

envtest: build ## sideload the archive of bin/strata, and run tests of controller-runtime with it: make envtest ENVTEST_PACKAGES=all
	@$(MAKE) --no-print-directory envtest-archive ENVTEST_BINARY='$(BIN)' VERSION=0.0.0-ci
	@GO='$(GO)' hack/envtest '$(ENVTEST_DIR)' $(ENVTEST_PACKAGES)

##@ Release

# Every build of a release is of the commit, in a temporary clone; uncommitted changes are not part of it.
RELEASE_DIR := $(CURDIR)/bin/release
PLATFORMS   ?= linux/amd64,linux/arm64
RELEASE_KEY ?=
RELEASE      = cd tools && $(ALONE) $(GO) run ./release

release: ## write archives, checksums, provenance, licences and SBOMs of the commit to bin/release: make release VERSION=1.2.3 RELEASE_KEY=FILE
	@$(RELEASE) -version '$(VERSION)' -platforms '$(PLATFORMS)' -out '$(RELEASE_DIR)/$(VERSION)' $(if $(RELEASE_KEY),-key '$(abspath $(RELEASE_KEY))')
	@cd '$(RELEASE_DIR)/$(VERSION)' && cat SHA256SUMS

include hack/*.mk
