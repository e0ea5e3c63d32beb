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

# The race detector needs a C compiler. `make test` uses it where there is one; `make test-race` insists.
RACE ?= $(if $(filter 1,$(shell $(GO) env CGO_ENABLED)),-race)

# Tests of all packages of a module together; a test that hangs is a failure, not a night without a result.
TEST_TIMEOUT ?= 15m

# kube/ supports the two newest minor versions of k8s.io/apiserver. In the workspace it is built with the newer one,
# which the server requires; outside of it, with the older one, which kube/go.mod requires.
ALONE := GOWORK=off
export GOFLAGS := $(strip $(filter-out -buildvcs=%,$(GOFLAGS)) -buildvcs=false)

# Upstream's storage suites that only one of the two minors has are in files with a build tag of kube/kubestorage.
# Without it, a test builds its package again with the tag.
NEWEST := apiserver_v0_37
OLDEST := apiserver_v0_36

.DEFAULT_GOAL := build
.PHONY: help build kubectl-strata run test test-engine test-kube test-server test-stratatest test-race test-runner quick nightly test-long test-storage test-oldest \
        test-invariants fuzz bench bench-read bench-consistent bench-watch bench-lists bench-selectors bench-storm bench-check bench-profiles scaling conformance robustness stock etcd-contract skew \
        suites suites-quick release release-ci release-check lint gofmt vet staticcheck boundaries tidy generate console check-docs check-commits prose vulncheck clean envtest envtest-archive newcomer recording screenshots

help: ## list the targets
	@sed -n 's/^\([a-z0-9.-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

build: ## build bin/strata (several minutes the first time)
	@[ -e $(BIN) ] || echo 'The first build compiles Kubernetes, which takes some minutes.'
	$(GO) build -buildvcs=$(BUILDVCS) -ldflags '$(LDFLAGS)' -o $(BIN) ./server/cmd/strata

kubectl-strata: ## build bin/kubectl-strata, the plugin of kubectl that reads the past
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=$(BUILDVCS) -ldflags '-s -w' -o bin/kubectl-strata ./server/cmd/kubectl-strata

run: build ## run a control plane on an embedded etcd: make run ARGS='--help'
	./$(BIN) up $(ARGS)

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

nightly: ## every test under the race detector, long forms, version skew, chaos with fsync; a missing program is a failure: hours
	.ci/nightly

test-engine: ## tests of the engine
	@$(RUN_TESTS) $(RACE) engine

test-kube: ## tests of the adapter, on a real embedded etcd
	@$(RUN_TESTS) $(RACE) kube

test-server: ## tests of the command and of the benchmark, which start it
	@$(RUN_TESTS) server test

test-stratatest: ## tests of stratatest, and of the example that uses it
	@$(RUN_TESTS) $(RACE) stratatest

test-race: ## the race detector on engine and kube
	@$(RUN_TESTS) -race engine kube

test-runner: ## the tests of tools/testrun: planted failures, which it must not report as passed
	cd tools && $(ALONE) $(GO) test -vet=off ./testrun

test-invariants: ## tests of the mirror, which checks its invariants after every batch
	$(ALONE) $(GO) test -short -count=1 -timeout $(TEST_TIMEOUT) -tags strata_invariants $(TEST_FLAGS) ./mirror/...

test-long: ## tests of kube and of the command in their long forms: hours, and gigabytes of memory
	@export STRATA_TEST_LONG=1 && $(RUN_TESTS) -timeout 4h -flags '-p=1 $(TEST_FLAGS)' kube server test

test-storage: ## only upstream's storage suites on the adapter, every test named
	cd kube && $(GO) test $(RACE) -tags $(NEWEST) -timeout $(TEST_TIMEOUT) -count=1 -v -run "Suite|Recorders" ./kubestorage

test-oldest: ## upstream's storage suites with the oldest supported k8s.io/apiserver, of kube/go.mod
	cd kube && $(ALONE) $(GO) vet -tags $(OLDEST) ./... && $(ALONE) $(GO) test -vet=off -tags $(OLDEST) -timeout $(TEST_TIMEOUT) -run "Suite|Recorders" ./kubestorage

# How long each fuzz target runs; the long run is 10m. What it finds stays in testdata/fuzz of the package, for
# every later run of the tests; inputs that only add coverage stay in the build cache.
FUZZTIME ?= 20s
FUZZ ?= ^Fuzz

fuzz: ## run every fuzz target, one after another: make fuzz FUZZTIME=10m FUZZ='FuzzStored|FuzzItems'
	.ci/fuzz '$(FUZZTIME)' '$(FUZZ)'

lint: gofmt boundaries tidy check-docs check-commits prose vet staticcheck ## all static checks

gofmt: ## fail if a file is not formatted
	@files=$$(find . -path ./bin -prune -o -name '*.go' -print | xargs gofmt -l) && test -z "$$files" || { printf 'not formatted (gofmt -w):\n%s\n' "$$files"; exit 1; }

vet: ## go vet in the workspace, suites and robustness; `make conformance` vets conformance
	$(ALONE) $(GO) vet ./...
	$(GO) vet -tags $(NEWEST) ./kube/... ./server/... ./stratatest/... ./test/...
	cd stratatest && $(ALONE) $(GO) vet ./...
	cd test/upstream/suites && $(ALONE) $(GO) vet ./...
	cd test/upstream/robustness && $(ALONE) $(GO) vet ./...

staticcheck: ## staticcheck, at the version of tools/go.mod, in the workspace, suites and robustness
	@set -e; bin=$$(cd tools && $(ALONE) $(GO) tool -n staticcheck); \
	"$$bin" -tags $(NEWEST) ./... ./kube/... ./server/... ./stratatest/... ./test/...; \
	for module in suites robustness; do (cd test/upstream/$$module && $(ALONE) "$$bin" ./...); done

boundaries: ## fail if the engine, its tests included, depends on Kubernetes, the benchmark on the command, or stratatest on more than client-go
	@set -e; deps=$$($(ALONE) $(GO) list -deps -test ./...); \
	! printf '%s\n' "$$deps" | grep -E '(^|[^a-z])(k8s\.io|sigs\.k8s\.io)/'
	@set -e; deps=$$(cd test && $(GO) list -deps -test ./bench/...); \
	! printf '%s\n' "$$deps" | grep -E '^github\.com/stratakube/strata/(kube|server)/'
	@set -e; deps=$$(cd stratatest && $(ALONE) $(GO) list -deps -test ./...); \
	! printf '%s\n' "$$deps" | grep -E '^(github\.com/stratakube/strata/|k8s\.io/(apiserver|kubernetes|apiextensions-apiserver)/)' | grep -v '^github\.com/stratakube/strata/stratatest'

# Not tools/kine: go mod tidy downloads the modules that tests of kine's dependencies import, and a proxy may lack them.
tidy: ## fail if a go.mod is not what go mod tidy would write
	@set -e; for module in . kube server stratatest test tools test/upstream/suites test/upstream/robustness test/upstream/conformance tools/stock/etcd-3.5 tools/stock/etcd-3.6; do (cd $$module && $(ALONE) $(GO) mod tidy -diff); done

generate: ## write the tables of docs/reference.md, the rules for the Prometheus operator, and the sessions of docs; tests fail when they are stale
	cd server && $(GO) test -vet=off -count=1 -run '^TestReference_TablesAreCurrent$$' ./internal/apiserver -update
	cd server && $(GO) test -vet=off -count=1 -run '^TestPrometheusRule_EqualsRules$$' ./internal/deployment -update
	cd test && $(GO) test -vet=off -count=1 -run '^TestDocument_Sessions_HaveTheirOutput$$' ./e2e/api/history -update
	cd test && $(GO) test -vet=off -count=1 -run '_Sessions_HaveTheirOutput$$' ./e2e/api/tour -update

recording: build ## run the steps of tools/recording and write docs/images/tour.svg, which the README shows
	cd tools && $(ALONE) $(GO) run ./recording

screenshots: build ## open the console in Chromium and write the images of docs/console.md; they differ a little in each run
	cd test && STRATA_BINARY='$(CURDIR)/$(BIN)' STRATA_TEST_REQUIRE=chromium STRATA_TEST_CHROMIUM="$$(../.ci/chromium)" \
		$(GO) test -vet=off -count=1 ./e2e/api/console -update

# The committed files of the plot library are those of the version in package-lock.json, which has no address of a registry.
UPLOT := server/internal/console/uplot

console: ## copy the plot library of the console from npm, at the version of its package.json; a test compares them
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && cp $(UPLOT)/package.json $(UPLOT)/package-lock.json "$$work" && cd "$$work" && \
	npm install --ignore-scripts --omit-lockfile-registry-resolved --no-audit --no-fund && \
	cp package-lock.json node_modules/uplot/LICENSE node_modules/uplot/dist/uPlot.esm.js node_modules/uplot/dist/uPlot.min.css $(CURDIR)/$(UPLOT)/

check-docs: ## fail if a document names a test, file or package that does not exist, or its recording has other steps
	.ci/check-docs
	cd tools && $(ALONE) $(GO) test -vet=off ./recording

check-commits: ## fail if the message of a commit is not "package: imperative phrase" and a body
	.ci/check-commits

# Each mutation of tools/mutants/table.go changes one place of the code; tests without the race detector must find it.
.PHONY: mutants
mutants: ## change places of the code one by one, and fail if the tests of the place pass: make mutants ARGS="-only 'M1|M2'"
	cd tools && $(ALONE) $(GO) test -vet=off ./mutants && $(ALONE) $(GO) run ./mutants -root .. $(ARGS)

prose: ## fail if comments or documents have many pronouns that name nothing, or documents many long sentences (tools/prose)
	cd tools && $(ALONE) $(GO) test -vet=off ./prose && $(ALONE) $(GO) run ./prose ..

# Where govulncheck's database is: also a file:// URL of a copy.
VULNDB ?= https://vuln.go.dev

vulncheck: ## report known vulnerabilities in code that the workspace calls, if the database of them can be reached
	VULNDB='$(VULNDB)' .ci/vulncheck

bench: ## compare with the upstream cacher: make bench ARGS='-quick'
	$(GO) run ./test/bench $(ARGS)

# The workloads of the read path: all but writes, starts and what selectors cost.
READ := list-(cold-)?(gzip-)?(json|protobuf)(-changed)?,list-metadata-.*,list-(pages|crowd|namespace|large),get-16.*,table-.*,initial-.*,watch-shared,adapter-.*

bench-read: ## the same for the read path alone
	$(GO) run ./test/bench -workloads '$(READ)' $(ARGS)

# The workloads of consistent reads.
CONSISTENT := get,get-16,get-64,quiet-.*,kep-.*,etcd-progress

bench-consistent: ## the same for consistent reads, with the table of KEP-2340
	$(GO) run ./test/bench -workloads '$(CONSISTENT)' $(ARGS)

# The workloads of watches: rates, watchers by node, idle and stalled ones, and watches after a restart.
WATCH := watch-.*,initial-.*,restore.*

bench-watch: ## the same for watches, with restarts on a long history
	$(GO) run ./test/bench -workloads '$(WATCH)' $(ARGS)

# The workloads of lists in chunks and of the past.
LISTS := list-pages.*,list-exact.*,history-.*

bench-lists: ## the same for lists by pages and at old revisions, and what history takes
	$(GO) run ./test/bench -workloads '$(LISTS)' $(ARGS)

# The workloads of selectors and indexes, events, many custom resources and managed fields.
SELECTORS := list-none,label-.*,list-node-16,initial-nodes,custom-field,watch-labels,events,definitions,list-managed.*

bench-selectors: ## the same for selectors, events, many custom resources and managed fields
	$(GO) run ./test/bench -workloads '$(SELECTORS)' $(ARGS)

bench-storm: ## the same for a fleet of clients that wants everything at once, half an hour
	$(GO) run ./test/bench -workloads 'storm.*' -runs 1 $(ARGS)

bench-check: ## the same for consistency checks; it waits for upstream's, which cannot be asked for
	$(GO) run ./test/bench -workloads check $(ARGS)

# The prediction of CPU, memory and network: coefficients, and simulated clusters to compare with. kwok is that of server/go.mod.
scaling: build ## measure the coefficients of docs/scaling.md and compare with simulated clusters, ten minutes: make scaling ARGS='-steps requests'
	cd server && $(GO) build -o ../bin/kwok sigs.k8s.io/kwok/cmd/kwok
	$(GO) run ./test/bench/scaling -stages "$$(cd server && $(GO) list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage" $(ARGS)
	cd test && $(GO) test -vet=off -count=1 -run '^TestDocument_Tables_AreThoseOfTheModel$$' ./bench/internal/scaling -update

bench-profiles: ## and with a CPU profile of each workload, in bench-data/profiles and bench-data/profiles.md
	$(GO) run ./test/bench -workloads '$(READ)' -profile bench-data/profiles -profile-md bench-data/profiles.md $(ARGS)

# Kubernetes' own tests of what the engine answers, built from the release that the server is built from. The module
# test/upstream/conformance is outside the workspace, so that the dependencies of these tests are none of the server's.
ENGINE ?= strata
COMPACTION_INTERVAL ?= 1m
REPORTS ?= bin/conformance-$(ENGINE)
KUBERNETES = $(shell cd test/upstream/conformance && $(ALONE) $(GO) list -m -f '{{.Version}}' k8s.io/kubernetes)
E2E_LDFLAGS = -s -w -X k8s.io/component-base/version.gitVersion=$(KUBERNETES)

conformance: build ## run Kubernetes' conformance tests that need no containers: make conformance ENGINE=upstream ARGS='-focus Watchers'
	cd test/upstream/conformance && $(ALONE) $(GO) vet . && $(ALONE) $(GO) test .
	cd test/upstream/conformance && $(ALONE) $(GO) build -o ../../../bin/conformance .
	cd test/upstream/conformance && $(ALONE) $(GO) build -ldflags '$(E2E_LDFLAGS)' -o ../../../bin/kube-controller-manager k8s.io/kubernetes/cmd/kube-controller-manager
	cd test/upstream/conformance && $(ALONE) $(GO) test -c -vet=off -ldflags '$(E2E_LDFLAGS)' -o ../../../bin/e2e.test k8s.io/kubernetes/test/e2e
	exec bin/conformance -engine '$(ENGINE)' -compaction-interval '$(COMPACTION_INTERVAL)' -reports '$(REPORTS)' $(ARGS)

# The validators of etcd's robustness tests. The module test/upstream/robustness stands outside the workspace, as conformance does.
robustness: ## have etcd's validators of linearizability and watches judge the engine, for 100,000 operations in five histories
	cd test/upstream/robustness && $(ALONE) $(GO) test -count=1 -v -timeout $(TEST_TIMEOUT) .

# Test suites of other projects, on upstream's storage layer and on Strata's: docs/conformance.md. What they copy and build
# is below bin/suites.
suites: ## run all of them and write docs/conformance.md: make suites ARGS='-units controlplane'
	cd test/upstream/suites && $(ALONE) $(GO) build -o ../../../bin/run-suites .
	exec bin/run-suites -root . $(ARGS)

suites-quick: ## the tests of the tool itself, and the subset that every change must pass
	cd test/upstream/suites && $(ALONE) $(GO) test .
	$(MAKE) suites ARGS='-quick $(ARGS)'

# The archive for setup-envtest, and controller-runtime's own tests with it: docs/testing.md. ENVTEST_BINARY packs an existing program.
ENVTEST_BINARY ?=
ENVTEST_DIR    := $(CURDIR)/bin/envtest

envtest-archive: ## write the archive for setup-envtest sideload to bin/envtest: make envtest-archive ENVTEST_BINARY=bin/strata
	@$(RELEASE) -version '$(or $(VERSION),0.0.0-dev)' -platforms '$(shell $(GO) env GOOS)/$(shell $(GO) env GOARCH)' \
		-out '$(ENVTEST_DIR)/archive' $(if $(ENVTEST_BINARY),-binary '$(abspath $(ENVTEST_BINARY))')
	@ls -l '$(ENVTEST_DIR)/archive'/strata-envtest-*.tar.gz

# The quick package has 352 specs, of clients; ENVTEST_PACKAGES=all takes 7 minutes on two processors.
ENVTEST_PACKAGES ?= ./pkg/client

envtest: build ## sideload the archive of bin/strata, and run tests of controller-runtime with it: make envtest ENVTEST_PACKAGES=all
	@$(MAKE) --no-print-directory envtest-archive ENVTEST_BINARY='$(BIN)' VERSION=0.0.0-ci
	@GO='$(GO)' .ci/envtest '$(ENVTEST_DIR)' $(ENVTEST_PACKAGES)

newcomer: ## do what a newcomer does in a new clone of the commit, and print a table of times: make newcomer NEWCOMER_CACHE=empty
	@GO='$(GO)' NEWCOMER_CACHE='$(NEWCOMER_CACHE)' .ci/newcomer

# Programs of others that test/e2e/resumption/skew runs beside strata: etcd and kube-apiserver of the two supported minor versions.
# The newer ones come from the versions of server/go.mod, the older ones from modules of their own outside the workspace.
STOCK := $(CURDIR)/bin/stock
STOCK_LDFLAGS = -s -w -X k8s.io/component-base/version.gitVersion=$$($(ALONE) $(GO) list -m -f '{{.Version}}' k8s.io/kubernetes)

stock: ## build stock etcd 3.5 to 3.7 and kube-apiserver 1.36 and 1.37 in bin/stock (some minutes the first time)
	cd tools/stock/etcd-3.5 && $(ALONE) $(GO) build -o $(STOCK)/etcd-3.5 go.etcd.io/etcd/server/v3
	cd tools/stock/etcd-3.6 && $(ALONE) $(GO) build -o $(STOCK)/etcd-3.6 go.etcd.io/etcd/server/v3
	cd server && $(ALONE) $(GO) build -o $(STOCK)/etcd-3.7 go.etcd.io/etcd/server/v3
	cd tools/stock/kube-apiserver-1.36 && $(ALONE) $(GO) mod tidy -diff
	cd tools/stock/kube-apiserver-1.36 && $(ALONE) $(GO) build -ldflags "$(STOCK_LDFLAGS)" -o $(STOCK)/kube-apiserver-1.36 k8s.io/kubernetes/cmd/kube-apiserver
	cd server && $(GO) build -ldflags "$(STOCK_LDFLAGS)" -o $(STOCK)/kube-apiserver-1.37 k8s.io/kubernetes/cmd/kube-apiserver

etcd-contract: ## run the tests of docs/etcd-contract.md on etcd 3.4 to 3.7 and kine; a missing store is a failure (a minute the first time)
	path=$$(.ci/old-etcd) && cd test && STRATA_TEST_OLD_ETCD=$$path STRATA_TEST_REQUIRE=old-etcd,kine \
		$(GO) test -vet=off -count=1 $(ARGS) ./e2e/api/contract

skew: stock ## run strata beside, before and after stock kube-apiservers, on stock etcds; a skipped test is a failure
	cd test && STRATA_TEST_STOCK=$(STOCK) STRATA_TEST_REQUIRE=stock $(GO) test -count=1 -timeout 30m -v $(ARGS) ./e2e/resumption/skew >$(STOCK)/skew.log 2>&1 || \
		{ grep -E '^ *--- FAIL|_test.go:' $(STOCK)/skew.log; echo "$(STOCK)/skew.log has it all"; exit 1; }
	@grep -E '^ *--- ' $(STOCK)/skew.log; ! grep -E '^ *--- SKIP' $(STOCK)/skew.log

# Every build of a release is of the commit, in a temporary clone; uncommitted changes are not part of it.
RELEASE_DIR := $(CURDIR)/bin/release
PLATFORMS   ?= linux/amd64,linux/arm64
RELEASE      = cd tools && $(ALONE) $(GO) run ./release

release: ## write archives, checksums, licences and SBOMs of the commit to bin/release: make release VERSION=1.2.3
	@$(RELEASE) -version '$(VERSION)' -platforms '$(PLATFORMS)' -out '$(RELEASE_DIR)/$(VERSION)'
	@cd '$(RELEASE_DIR)/$(VERSION)' && cat SHA256SUMS

release-ci: ## test the tool, make the files for linux/amd64 in two directories with one build cache, and compare them
	cd tools && $(ALONE) $(GO) test -vet=off ./release ./launcher
	for copy in first second; do ($(RELEASE) -version 0.0.0-ci -platforms linux/amd64 -plugin-platforms linux/amd64 -out '$(RELEASE_DIR)/'$$copy) || exit 1; done
	cd '$(RELEASE_DIR)/first' && sha256sum -c SHA256SUMS && diff -r . ../second

release-check: ## make the files for all platforms twice, each time with an empty build cache, and compare them: half an hour
	@set -e; version='$(or $(VERSION),0.0.0-check)'; for copy in first second; do \
		cache=$$(mktemp -d); \
		(export GOCACHE=$$cache; $(RELEASE) -version "$$version" -platforms '$(PLATFORMS)' -out '$(RELEASE_DIR)/'$$copy) || { rm -rf $$cache; exit 1; }; \
		rm -rf $$cache; \
	done; cd '$(RELEASE_DIR)/first' && sha256sum -c SHA256SUMS && diff -r . ../second

clean: ## remove what the build wrote; data directories stay
	rm -rf bin
