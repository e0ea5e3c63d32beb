apidiff: ## fail if the Go API of a module is incompatible with the newest release, and CHANGELOG.md does not say so
	@GOFLAGS='$(GOFLAGS) -tags=$(NEWEST)' hack/apidiff

release-ci: ## make the files for linux/amd64 in two directories with one build cache, compare them, and install from them
	rm -rf '$(RELEASE_DIR)/key' && mkdir -p '$(RELEASE_DIR)/key' && ssh-keygen -q -t ed25519 -N '' -f '$(RELEASE_DIR)/key/key'
	for copy in first second; do ($(RELEASE) -version 0.0.0-ci -platforms linux/amd64 -plugin-platforms linux/amd64 -key '$(RELEASE_DIR)/key/key' -out '$(RELEASE_DIR)/'$$copy) || exit 1; done
	cd '$(RELEASE_DIR)/first' && diff -r . ../second
	GO='$(GO)' hack/installation '$(RELEASE_DIR)/first' 0.0.0-ci '$(RELEASE_DIR)/key/key.pub'

envtest-ci: ## run tests of controller-runtime with the archive that release-ci made
	@GO='$(GO)' ENVTEST_ARCHIVE='$(RELEASE_DIR)/first' hack/envtest '$(ENVTEST_DIR)' $(ENVTEST_PACKAGES)

release-check: ## make the files for all platforms twice, each time with an empty build cache, and compare them: half an hour
	@set -e; version='$(or $(VERSION),0.0.0-check)'; for copy in first second; do \
		cache=$$(mktemp -d); \
		(export GOCACHE=$$cache; $(RELEASE) -version "$$version" -platforms '$(PLATFORMS)' -out '$(RELEASE_DIR)/'$$copy) || { rm -rf $$cache; exit 1; }; \
		rm -rf $$cache; \
	done; cd '$(RELEASE_DIR)/first' && sha256sum -c SHA256SUMS && diff -r . ../second

newcomer: ## do what a newcomer does in a new clone of the commit, and print a table of times: make newcomer NEWCOMER_CACHE=empty, or from the files of a release: NEWCOMER_RELEASE=DIR
	@GO='$(GO)' NEWCOMER_CACHE='$(NEWCOMER_CACHE)' NEWCOMER_RELEASE='$(NEWCOMER_RELEASE)' hack/newcomer
