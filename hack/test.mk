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
