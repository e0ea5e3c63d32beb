# The static checks of `make lint`, one by one.

gofmt: ## fail if a file is not formatted
	@files=$$(find . -path ./bin -prune -o -name '*.go' -print | xargs gofmt -l) && test -z "$$files" || { printf 'not formatted (gofmt -w):\n%s\n' "$$files"; exit 1; }

TIDIED := . kube server stratatest test tools test/upstream/suites test/upstream/robustness test/upstream/conformance tools/stock/etcd-3.5 tools/stock/etcd-3.6

lint-fix: ## format files, tidy every go.mod, and complete go.work.sum
	@find . -path ./bin -prune -o -name '*.go' -print | xargs gofmt -w
	@set -e; for module in $(TIDIED); do (cd $$module && $(ALONE) $(GO) mod tidy); done
	@$(GO) list -m all >/dev/null

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

analyze: ## errcheck, exhaustive, gosec and unparam in the workspace (tools/lint)
	cd tools && $(ALONE) $(GO) build -o ../bin/lint ./lint
	$(GO) vet -tags $(NEWEST) -vettool='$(CURDIR)/bin/lint' ./... ./kube/... ./server/... ./stratatest/... ./test/...

boundaries: ## fail if the engine, its tests included, depends on Kubernetes, the benchmark on the command, or stratatest on more than client-go
	@set -e; deps=$$($(ALONE) $(GO) list -deps -test ./...); \
	! printf '%s\n' "$$deps" | grep -E '(^|[^a-z])(k8s\.io|sigs\.k8s\.io)/'
	@set -e; deps=$$(cd test && $(GO) list -deps -test ./bench/...); \
	! printf '%s\n' "$$deps" | grep -E '^github\.com/stratakube/strata/(kube|server)/'
	@set -e; deps=$$(cd stratatest && $(ALONE) $(GO) list -deps -test ./...); \
	! printf '%s\n' "$$deps" | grep -E '^(github\.com/stratakube/strata/|k8s\.io/(apiserver|kubernetes|apiextensions-apiserver)/)' | grep -v '^github\.com/stratakube/strata/stratatest'

# Not tools/kine: go mod tidy downloads the modules that tests of kine's dependencies import, and a proxy may lack them.
tidy: ## fail if a go.mod is not what go mod tidy would write, or if go.work.sum lacks a sum
	@set -e; for module in $(TIDIED); do (cd $$module && $(ALONE) $(GO) mod tidy -diff); done
	@sum=$$(cksum go.work.sum); $(GO) list -m all >/dev/null; \
	[ "$$sum" = "$$(cksum go.work.sum)" ] || { echo 'go.work.sum was incomplete: commit it'; exit 1; }

check-docs: ## fail if a document names a test, file or package that does not exist, or its recording has other steps
	hack/check-docs
	cd tools && $(ALONE) $(GO) test -vet=off -count=1 ./recording

check-commits: ## fail if the message of a commit is not "package: imperative phrase" and a body
	hack/check-commits

prose: ## fail if comments or documents have many pronouns that name nothing, pages many long sentences, or comments more than 100 columns or stale names (tools/prose)
	cd tools && $(ALONE) $(GO) test -vet=off -count=1 ./prose && $(ALONE) $(GO) run ./prose ..

# Where govulncheck's database is: also a file:// URL of a copy.
VULNDB ?= https://vuln.go.dev

vulncheck: ## report known vulnerabilities in code that the workspace calls, if the database of them can be reached
	VULNDB='$(VULNDB)' hack/vulncheck
