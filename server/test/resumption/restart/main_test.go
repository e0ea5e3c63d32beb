// Package restart looks at watches across restarts of API servers: a client that was connected once resumes where it was,
// whichever server it comes to, and never has to list again because of the server.
//
// Clients record what they get, a client of etcd records what happened, and watchcheck compares the two.
//
// The environment chooses, beside what the harness lets it choose:
//
//	STRATA_TEST_LONG  1 for the long forms of the tests
package restart

import (
	"context"
	"flag"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/server/test/internal/harness"
)

func TestMain(m *testing.M) {
	// Reflectors log every connection that they lose.
	klog.SetOutput(io.Discard)
	flags := flag.NewFlagSet("", flag.PanicOnError)
	klog.InitFlags(flags)
	if err := flags.Parse([]string{"-logtostderr=false", "-alsologtostderr=false", "-stderrthreshold=FATAL"}); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// noGates are the flags that make the server forget the past at a restart and vouch for nothing.
const noGates = "--strata-feature-gates=WatchBookmark=false,EfficientWatchResumption=false,WatchHistoryRestore=false"

// serverFlags are the flags of all API servers here.
var serverFlags = []string{
	"--disable-admission-plugins=ServiceAccount", // pods need no account
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// ownConnections returns a copy of config whose clients share no connection with those of other copies.
func ownConnections(config *rest.Config) *rest.Config {
	own := rest.CopyConfig(config)
	own.Dial = (&net.Dialer{}).DialContext // clients that dial by themselves share nothing
	return own
}

// oneConnection returns a copy of config whose clients have one connection between them. Otherwise each request that finds
// none dials, and when thousands come back at once there are thousands of connections for a moment.
func oneConnection(t testing.TB, config *rest.Config) *rest.Config {
	t.Helper()
	tlsConfig, err := rest.TLSConfigFor(config)
	harness.Check(t, err)
	one := rest.CopyConfig(config)
	one.TLSClientConfig, one.Dial = rest.TLSClientConfig{}, nil
	one.Transport = &http.Transport{TLSClientConfig: tlsConfig, ForceAttemptHTTP2: true, MaxConnsPerHost: 1, TLSHandshakeTimeout: 10 * time.Second}
	return one
}

// pause lets d pass, or less if ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
