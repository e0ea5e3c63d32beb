# The validators of etcd's robustness tests. The module test/upstream/robustness stands outside the workspace, as conformance does.
robustness: ## have etcd's validators of linearizability and watches judge the engine, for 100,000 operations in five histories
	cd test/upstream/robustness && $(ALONE) $(GO) test -count=1 -v -timeout $(TEST_TIMEOUT) .

suites-quick: ## the tests of the tool itself, and the subset that every change must pass
	cd test/upstream/suites && $(ALONE) $(GO) test -count=1 .
	$(MAKE) suites ARGS='-quick $(ARGS)'

# The archive for setup-envtest, and controller-runtime's own tests with it: docs/testing.md. ENVTEST_BINARY packs an existing program.
ENVTEST_BINARY ?=
ENVTEST_DIR    := $(CURDIR)/bin/envtest

envtest-archive: ## write the archive for setup-envtest sideload to bin/envtest: make envtest-archive ENVTEST_BINARY=bin/strata
	@$(RELEASE) -version '$(or $(VERSION),0.0.0-dev)' -platforms '$(shell $(GO) env GOOS)/$(shell $(GO) env GOARCH)' \
		-out '$(ENVTEST_DIR)/archive' $(if $(ENVTEST_BINARY),-binary '$(abspath $(ENVTEST_BINARY))')
	@ls -l '$(ENVTEST_DIR)/archive'/strata-envtest-*.tar.gz

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
	path=$$(hack/old-etcd) && cd test && STRATA_TEST_OLD_ETCD=$$path STRATA_TEST_REQUIRE=old-etcd,kine \
		$(GO) test -vet=off -count=1 $(ARGS) ./e2e/api/contract
