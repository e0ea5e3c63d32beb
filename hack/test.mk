# Tests that `make test` does not run, or runs with others.

test-runner: ## the tests of tools/testrun, with planted failures that it must not report as passed, of the tool that makes releases, and of the table of mutations
	cd tools && $(ALONE) $(GO) test -vet=off -count=1 ./testrun ./release ./launcher ./mutants

test-invariants: ## tests of the mirror, which checks its invariants after every batch
	$(ALONE) $(GO) test -short -count=1 -timeout $(TEST_TIMEOUT) -tags strata_invariants $(TEST_FLAGS) ./mirror/...

test-long: ## tests of kube and of the command in their long forms: hours, and gigabytes of memory
	@export STRATA_TEST_LONG=1 && $(RUN_TESTS) -timeout 4h -flags '-p=1 $(TEST_FLAGS)' kube server test

test-storage: ## only upstream's storage suites on the adapter, every test named
	cd kube && $(GO) test $(RACE) -tags $(NEWEST) -timeout $(TEST_TIMEOUT) -count=1 -v -run "Suite|Recorders" ./kubestorage

test-oldest: ## upstream's storage suites with the oldest supported k8s.io/apiserver, of kube/go.mod
	cd kube && $(ALONE) $(GO) vet -tags $(OLDEST) ./... && $(ALONE) $(GO) test -vet=off -count=1 -tags $(OLDEST) -timeout $(TEST_TIMEOUT) -run "Suite|Recorders" ./kubestorage

# A pre-release of the next minor version of k8s.io/apiserver, with its Go and build tag, and with a k8s.io/kube-openapi that the
# module proxy serves, in place of the one that it requires. bin/next.mod is kube/go.mod with them; no committed module has them.
NEXT         := v0.38.0-alpha.2
NEXT_OPENAPI := v0.0.0-20261014044854-ca3452a79603
NEXT_GO      := 1.27.0
NEXT_TAG     := apiserver_v0_38

test-next: ## vet and test kube with a pre-release of the next k8s.io/apiserver
	mkdir -p bin && cp kube/go.sum bin/next.sum
	sed -E 's,^go .*,go $(NEXT_GO),; s,^(\tk8s\.io/kube-openapi) .*,\1 $(NEXT_OPENAPI),; s,^(\tk8s\.io/[a-z-]+) v0\.[1-9][0-9.]*,\1 $(NEXT),' kube/go.mod >bin/next.mod
	echo '{"Replace": {"$(CURDIR)/kube/kubestorage/correctness_test.go": "$(CURDIR)/kube/kubestorage/testdata/next/correctness_test.go"}}' >bin/next.json
	cd kube && export GOTOOLCHAIN=go$(NEXT_GO) GOWORK=off GOFLAGS='$(GOFLAGS) -modfile=$(CURDIR)/bin/next.mod -overlay=$(CURDIR)/bin/next.json -tags=$(NEXT_TAG)' && \
		$(GO) mod tidy && $(GO) vet ./... && $(GO) test -vet=off -count=1 -timeout $(TEST_TIMEOUT) ./...
