// Package restart tests watches across restarts of API servers: a client resumes its watch on any
// server, and a restart never makes it relist.
//
// Clients record their events, a client of etcd records the history, and watchcheck compares the
// two.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_LONG  1 for the long forms of the tests
package restart

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

func TestMain(m *testing.M) {
	harness.SilenceKlog()
	harness.Main(m, func(e *harness.Env) {
		shared.etcd, shared.xy = e.Etcd(), e.Etcd()
		shared.proxy = e.Proxy(shared.etcd)
		flags := append([]string{
			"--etcd-servers-overrides=/limitranges#" + shared.xy.URL + ",/podtemplates#" + shared.xy.URL,
			"--etcd-compaction-interval=0", // a compaction would write to the second etcd
		}, serverFlags...)
		shared.servers = make([]*harness.Server, 2)
		var starting sync.WaitGroup
		for i, etcd := range []*harness.Etcd{shared.etcd, shared.proxy.Etcd()} {
			starting.Go(func() { shared.servers[i] = e.APIServer(etcd, flags...) })
		}
		starting.Wait()
	})
}

// shared is a control plane of two servers, for tests that use resources or namespaces of their
// own.
var shared struct {
	servers []*harness.Server
	etcd    *harness.Etcd
	proxy   *harness.Proxy // of the second server, in front of etcd
	xy      *harness.Etcd  // has the limit ranges and pod templates, and no other keys
	use     harness.Turns
}

// noGates turns off bookmarks, efficient watch resumption and the restore of history after a
// restart.
const noGates = "--strata-feature-gates=WatchBookmark=false,EfficientWatchResumption=false,WatchHistoryRestore=false"

// serverFlags are the flags of all API servers here.
var serverFlags = []string{
	"--disable-admission-plugins=ServiceAccount", // pods need no service account
	// Watches end within a moment. On a busy machine they may take more than a second.
	"--shutdown-watch-termination-grace-period=10s",
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// oneConnection returns a copy of config whose clients share one connection. Otherwise each request
// without an idle connection dials, and thousands of concurrent requests open thousands of
// connections.
func oneConnection(t testing.TB, config *rest.Config) *rest.Config {
	t.Helper()
	tlsConfig, err := rest.TLSConfigFor(config)
	harness.Check(t, err)
	one := rest.CopyConfig(config)
	one.TLSClientConfig, one.Dial = rest.TLSClientConfig{}, nil
	one.Transport = &http.Transport{TLSClientConfig: tlsConfig, ForceAttemptHTTP2: true, MaxConnsPerHost: 1, TLSHandshakeTimeout: 10 * time.Second}
	return one
}
