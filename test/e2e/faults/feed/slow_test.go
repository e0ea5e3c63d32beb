package feed

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/faulty"
)

// TestFeed_SlowLink_ServesFreshReads: every answer of etcd takes 50 ms, and a connection transfers
// 10 Mbit/s. A server starts, loads its memory, and answers consistent lists: each shows the writes
// before it. On a busy machine it may refuse three. The times are logged.
func TestFeed_SlowLink_ServesFreshReads(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd := e.Etcd()
	client := etcd.Client()
	const objects = 500
	value := strings.Repeat("x", 2<<10)
	for n := range objects {
		commit(t, ctx, client, maps.put(fmt.Sprintf("map-%03d", n), value))
	}
	link := faulty.NewLink(t, e, etcd.URL)
	link.Slow(25 * time.Millisecond) // in each direction
	began := time.Now()
	api := e.APIServer(through(etcd, link.URL), noServiceAccounts).API()
	t.Logf("ready after %v", time.Since(began).Round(time.Millisecond))
	var longest time.Duration
	refused := 0
	for n := range 20 {
		written, err := api.Create(ctx, maps.path, maps.body(fmt.Sprintf("new-%02d", n), ""))
		harness.Check(t, err)
		began := time.Now()
		r, err := api.Do(ctx, http.MethodGet, maps.path, "", nil)
		harness.Check(t, err)
		// A busy machine may pause the link for longer than a list waits.
		for refused < 3 && r.Code == http.StatusTooManyRequests && r.Header.Get("Retry-After") != "" {
			refused++
			t.Logf("list %d was refused after %v", n, time.Since(began))
			r, err = api.Do(ctx, http.MethodGet, maps.path, "", nil)
			harness.Check(t, err)
		}
		longest = max(longest, time.Since(began))
		list, err := r.List()
		harness.Check(t, err)
		at, least := harness.Revision(t, list.Metadata.ResourceVersion), harness.Revision(t, written.Metadata.ResourceVersion)
		if want := objects + n + 1; len(list.Items) != want || at < least {
			t.Fatalf("a list after a write at %d has %d objects at %d, want %d", least, len(list.Items), at, want)
		}
	}
	t.Logf("the longest consistent list of %d objects took %v", objects, longest.Round(time.Millisecond))
}
