package tables

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"testing"
)

// answers are the answers of one server.
type answers map[request]answer

// expect returns the expectation for a request to a server.
type expect func(r request, s *server) expectation

// askAll sends all requests to all servers. Each server gets one request at a time, so that reads
// of etcd can be attributed to it; requests with the same expectation to wait in vain are sent
// concurrently.
func (w *world) askAll(ctx context.Context, servers []*server, requests []request, want expect) (map[*server]answers, error) {
	return onEach(servers, func(s *server) (answers, error) {
		got := answers{}
		type group struct {
			one, exact bool
			reads      reads
		}
		waiting := map[group][]request{}
		for _, r := range requests {
			e := want(r, s)
			if e.aspects[code] == fmt.Sprint(http.StatusGatewayTimeout) {
				g := group{r.scope.one != "", r.exact(), e.reads}
				waiting[g] = append(waiting[g], r)
				continue
			}
			var a answer
			asked, err := s.observe(e.reads, func() (err error) {
				a, err = r.ask(ctx, w.history, s.api)
				return err
			})
			if err != nil {
				return nil, err
			}
			got.add(r, a, e, asked)
		}
		for g, together := range waiting {
			var all []answer
			asked, err := s.observe(g.reads, func() (err error) {
				all, err = onEachInOrder(together, func(r request) (answer, error) { return r.ask(ctx, w.history, s.api) })
				return err
			})
			if err != nil {
				return nil, err
			}
			for i, r := range together {
				got.add(r, all[i], want(r, s), asked)
			}
		}
		return got, nil
	})
}

// add adds an answer, with the aspects that depend on the expectation and on etcd's reads.
func (a answers) add(r request, got answer, want expectation, asked reads) {
	if got.version != 0 {
		got.aspects[version] = want.show(got.version)
	}
	got.aspects[etcd] = asked.String()
	a[r] = got
}

// compare compares the answers of all forms of Strata with the expectations, and with the answers
// of upstream, the last server: a subtest for each row and each request.
func compare(t *testing.T, servers []*server, requests []request, want expect, got map[*server]answers) {
	t.Helper()
	upstream := servers[len(servers)-1]
	rows := map[string][]request{}
	for _, r := range requests {
		row := want(r, upstream).row
		rows[row] = append(rows[row], r)
	}
	used, compared := map[*difference]bool{}, 0
	for _, row := range slices.Sorted(maps.Keys(rows)) {
		t.Run(row, func(t *testing.T) {
			for _, r := range rows[row] {
				t.Run(r.String(), func(t *testing.T) {
					compared++
					for _, s := range servers[:len(servers)-1] {
						compareOne(t, s, r, got[s][r].aspects, want(r, s), got[upstream][r].aspects, used)
					}
				})
			}
		})
	}
	if compared < len(requests) {
		return // -run excluded the other requests
	}
	for _, d := range byDesign {
		if !used[d] && slices.ContainsFunc(requests, func(r request) bool { return d.verb == r.verb && d.applies(r, servers[0]) }) {
			t.Errorf("%s is no difference any more: %s", d.id, d.what)
		}
	}
}

// compareOne compares one answer of one form of Strata.
func compareOne(t *testing.T, s *server, r request, got aspects, want expectation, upstream aspects, used map[*difference]bool) {
	t.Helper()
	want.aspects[etcd] = want.reads.String()
	if want.rule != (rule{}) {
		want.aspects[version] = want.rule.String()
	}
	for _, text := range differences(got, want.aspects) {
		t.Errorf("%s: %s", s.name, text)
	}
	for about, text := range differences(got, upstream) {
		if about == etcd && !s.memory {
			continue // the gate that is off causes the difference
		}
		d := designed(r, s, about)
		if d == nil {
			t.Errorf("%s, and upstream: %s", s.name, text)
			continue
		}
		used[d] = true
	}
}

// onEach calls f for all elements concurrently.
func onEach[K comparable, V any](all []K, f func(K) (V, error)) (map[K]V, error) {
	values, err := onEachInOrder(all, f)
	results := map[K]V{}
	for i, k := range all {
		results[k] = values[i]
	}
	return results, err
}

// onEachInOrder calls f for all elements concurrently, and returns the results in their order.
func onEachInOrder[K, V any](all []K, f func(K) (V, error)) ([]V, error) {
	values, errs := make([]V, len(all)), make([]error, len(all))
	var running sync.WaitGroup
	for i, k := range all {
		running.Go(func() { values[i], errs[i] = f(k) })
	}
	running.Wait()
	for _, err := range errs {
		if err != nil {
			return values, err
		}
	}
	return values, nil
}
