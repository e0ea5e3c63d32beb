package feed

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// TestInitialLoad_SlowEtcd_ServerBecomesReady starts a server on an etcd whose content arrives
// slowly: the load takes longer than admission's wait for its informers, and the post-start hooks
// that write must not end the process.
func TestInitialLoad_SlowEtcd_ServerBecomesReady(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd := e.Etcd()
	value := strings.Repeat("x", 512<<10)
	var last int64
	for i := range 60 { // 30 MB, in parts of about 1.5 MiB
		last = commit(t, ctx, etcd.Client(), maps.put(fmt.Sprintf("map-%03d", i), value))
	}
	proxy := e.Proxy(etcd)
	proxy.Delay(func(method string) time.Duration {
		if method == etcdproxy.MethodStream {
			return 700 * time.Millisecond
		}
		return 0
	})
	defer proxy.Delay(nil)
	began := time.Now()
	server := e.StartAPIServer(proxy.Etcd(), noServiceAccounts, "--strata-feature-gates=WatchHistoryRestore=false")
	harness.Check(t, server.Await(ctx, "/readyz"))
	t.Logf("ready after %v", time.Since(began).Round(time.Millisecond))
	proxy.Delay(nil)
	r, _, err := retried(ctx, func() (*harness.Response, error) { return listAt(ctx, server.API(), maps.path, last) })
	harness.Check(t, err)
	list, err := r.List()
	harness.Check(t, err)
	if len(list.Items) != 60 {
		t.Errorf("list: %d objects, want 60", len(list.Items))
	}
}
