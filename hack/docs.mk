# Images and files of the documents and of the console, which `make generate` does not write.

recording: build ## run the steps of tools/recording and write docs/images/tour.svg, which the README shows
	cd tools && $(ALONE) $(GO) run ./recording

screenshots: build ## open the console in Chromium and write the images of docs/console.md; they differ a little in each run
	cd test && STRATA_BINARY='$(CURDIR)/$(BIN)' STRATA_TEST_REQUIRE=chromium STRATA_TEST_CHROMIUM="$$(../hack/chromium)" \
		$(GO) test -vet=off -count=1 ./e2e/api/console -update

# The committed files of the plot library are those of the version in package-lock.json, which has no address of a registry.
UPLOT := server/internal/console/uplot

console: ## copy the plot library of the console from npm, at the version of its package.json; a test compares them
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && cp $(UPLOT)/package.json $(UPLOT)/package-lock.json "$$work" && cd "$$work" && \
	npm install --ignore-scripts --omit-lockfile-registry-resolved --no-audit --no-fund && \
	cp package-lock.json node_modules/uplot/LICENSE node_modules/uplot/dist/uPlot.esm.js node_modules/uplot/dist/uPlot.min.css $(CURDIR)/$(UPLOT)/

help-all: ## list all targets
	@awk -F ':.*## ' 'FNR == 1 { print "\n" FILENAME } /^[a-z0-9-]*:.*## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile hack/*.mk
