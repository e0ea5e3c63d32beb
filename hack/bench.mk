# The benchmark: docs/benchmarks.md.

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
