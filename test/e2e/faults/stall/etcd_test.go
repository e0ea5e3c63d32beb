package stall

import (
	"fmt"
	"time"

	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// etcdRequests has the proxy's counts over a period.
type etcdRequests struct {
	revisions int64    // reads of the revision: one key, count only
	counts    int64    // ranges, count only
	keys      int64    // one key with its value
	ranges    []string // ranges with values, as text
	checks    int64    // ranges of keys only: consistency checks
	txns      int64
	// messages of clients on watch streams: progress requests, if no watch is opened or ended
	watch int64
	all   int64

	span time.Duration
}

// seen returns the proxy's counts since its reset at since.
func (s *scene) seen(since time.Time) etcdRequests {
	e := etcdRequests{span: time.Since(since)}
	for _, r := range s.proxy.Ranges() {
		switch {
		case r.CountOnly && len(r.RangeEnd) == 0:
			e.revisions++
		case r.CountOnly:
			e.counts++
		case r.KeysOnly:
			e.checks++
		case len(r.RangeEnd) == 0:
			e.keys++
		default:
			e.ranges = append(e.ranges, fmt.Sprintf("%q to %q, limit %d", r.Key, r.RangeEnd, r.Limit))
		}
	}
	methods := s.proxy.Requests()
	for _, n := range methods {
		e.all += n
	}
	e.txns, e.watch = methods[etcdproxy.MethodTxn], methods[etcdproxy.MethodWatch]
	return e
}

func (e etcdRequests) String() string {
	rate := func(n int64) string { return fmt.Sprintf("%.1f", float64(n)/e.span.Seconds()) }
	return fmt.Sprintf("%s a second: %s of the revision, %s of one key, %s of a range, %s of keys alone, %s counts, %s transactions, %s for progress",
		rate(e.all), rate(e.revisions), rate(e.keys), rate(int64(len(e.ranges))), rate(e.checks), rate(e.counts), rate(e.txns), rate(e.watch))
}
