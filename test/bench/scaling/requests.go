package main

import (
	"context"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/bench/internal/scaling"
)

var countKeys = []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithCountOnly()}

// requestCounts are the requests that the server has counted, by operation.
type requestCounts map[scaling.Op]float64

// request identifies requests in apiserver_request_total.
type request struct{ verb, resource, subresource string }

// kwokOps are the operations of kwok, and of the server's own clients of the same kind.
var kwokOps = map[request]scaling.Op{
	{"PATCH", "nodes", "status"}: scaling.NodeStatus,
	{"PUT", "leases", ""}:        scaling.LeaseUpdate,
	{"PATCH", "leases", ""}:      scaling.LeaseUpdate,
	{"PATCH", "pods", "status"}:  scaling.PodStatus,
	{"PATCH", "pods", ""}:        scaling.PodStatus,
	{"DELETE", "pods", ""}:       scaling.PodRemove,
	{"GET", "nodes", ""}:         scaling.Get,
	{"GET", "pods", ""}:          scaling.Get,
	{"GET", "leases", ""}:        scaling.Get,
	{"POST", "events", ""}:       scaling.EventCreate,
}

// requests reads the server's own counts of requests that succeeded: kwok deletes most pods twice.
func (c *cluster) requests(ctx context.Context) (requestCounts, error) {
	series, err := c.engine.Series(ctx, "apiserver_request_total")
	counts := requestCounts{}
	for _, s := range series {
		if op, ok := kwokOps[request{s.Labels["verb"], s.Labels["resource"], s.Labels["subresource"]}]; ok && strings.HasPrefix(s.Labels["code"], "2") {
			counts[op] += s.Value
		}
	}
	return counts, err
}

// addKwok adds to rates the requests that the server counted since before and that this program has not sent, and the frames of kwok's
// watches: of all pods, and of all nodes.
func (after requestCounts) addKwok(rates scaling.Rates, before requestCounts, seconds float64) {
	for op, n := range after {
		total := (n - before[op]) / seconds
		if op == scaling.PodRemove {
			total -= rates[scaling.PodDelete] // the same verb
		}
		rates[op] = max(rates[op], total)
	}
	for _, op := range []scaling.Op{scaling.PodCreate, scaling.PodBind, scaling.PodStatus, scaling.PodDelete, scaling.PodRemove, scaling.NodeStatus} {
		rates[scaling.DeliverAll] += rates[op]
	}
}
