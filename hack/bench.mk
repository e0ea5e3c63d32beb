# Long comparisons with the upstream cacher; `make bench` has the short ones.

bench-day: build stock ## controllers, kube-scheduler and kwok on each engine: 200 nodes, 3,000 pods are created, rolled out and deleted
	$(GO) run ./test/bench -engines strata,stock -workloads day $(ARGS)

bench-lived: build stock ## a sequence of workloads on one living process of each engine: make bench-lived ARGS='-pods 10000 -repeat 10'; hours
	$(GO) run ./test/bench lived $(ARGS)
