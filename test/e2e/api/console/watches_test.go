package console

import (
	"context"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// TestConsole_WatchThatIsNotRead_IsSlow: a watch whose client does not read appears with its user
// and namespace, and disappears when it ends.
func TestConsole_WatchThatIsNotRead_IsSlow(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	link := newLink(t, ctx)
	const maps = "/api/v1/namespaces/slow/configmaps"
	write(t, ctx, http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "slow"}})
	large := strings.Repeat("x", 500<<10)
	revision := write(t, ctx, http.MethodPost, maps, object{"metadata": object{"name": "large"}, "data": object{"data": large}})

	watch, end := context.WithCancel(ctx)
	defer end()
	tls, err := rest.TLSConfigFor(cluster.Config)
	harness.Check(t, err)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: tls, DisableCompression: true, DialContext: withSmallBuffer}}
	defer client.CloseIdleConnections()
	r := harness.Must[*http.Request](t)(http.NewRequestWithContext(watch, http.MethodGet, cluster.URL+maps+"?watch=1&resourceVersion="+strconv.FormatInt(revision, 10), nil))
	resp := harness.Must[*http.Response](t)(client.Do(r))
	defer resp.Body.Close()
	for i := range 30 { // more than the buffers of both sides hold
		write(t, ctx, http.MethodPatch, maps+"/large", object{"data": object{"data": strconv.Itoa(i) + large}})
	}

	b := openBrowser(t, cluster.URL)
	b.look(1200, 800, "light")
	b.run(chromedp.Navigate(link))
	b.until(`document.querySelectorAll('#tiles dd').length === 8`)
	b.run(script("location.hash = '#/watches'"))
	b.until(`/configmaps\s+strata-admin\s+slow\s+[0-9.]+ (s|min)/.test(document.getElementById('watches-table').innerText)`)
	end()
	b.until(`/No watch is slow/.test(document.getElementById('watches-table').innerText)`)
	b.requireClean()
}

// withSmallBuffer opens connections that take few bytes before they are read.
func withSmallBuffer(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		err = conn.(*net.TCPConn).SetReadBuffer(4096)
	}
	return conn, err
}

// TestConsole_Fields_AreThoseThatDiffer runs the comparison of objects, which is a module of the
// page.
func TestConsole_Fields_AreThoseThatDiffer(t *testing.T) {
	link := newLink(t, harness.Context(t, testTimeout))
	b := openBrowser(t, cluster.URL)
	b.run(chromedp.Navigate(link))
	for _, c := range []struct{ before, after, want string }{
		{`{a: 1}`, `{a: 1}`, ``},
		{`{a: 1, b: {c: "x"}}`, `{a: 2, b: {c: "y"}}`, `a 1 2; b.c "x" "y"`},
		{`{a: {}}`, `{a: {"b.c/d": null}}`, `a[b.c/d] undefined null`},
		{`{a: [{name: "x", v: 1}, {name: "y", v: 1}]}`, `{a: [{name: "y", v: 2}, {name: "x", v: 1}]}`, `a[name=y].v 1 2`},
		{`{a: [{name: "x"}]}`, `{a: [{name: "x"}, {name: "z"}]}`, `a[name=z] undefined {"name":"z"}`},
		{`{a: [1, 2]}`, `{a: [2, 1]}`, `a [1,2] [2,1]`},
		{`{a: [{name: "x"}, {name: "x"}]}`, `{a: [{name: "x"}]}`, `a [{"name":"x"},{"name":"x"}] [{"name":"x"}]`},
		{`{a: {x: 1, y: 2}}`, `{a: {y: 2, x: 1}}`, ``},
		{`{metadata: {resourceVersion: "1", managedFields: [], labels: {a: "b"}}}`, `{metadata: {resourceVersion: "2"}}`, `metadata.labels {"a":"b"} undefined`},
	} {
		got, err := chromedp.Run(b.ctx, chromedp.Evaluate[string](`import('./diff.js').then(({ fields }) => fields(`+c.before+`, `+c.after+`)
			.map((f) => [f.field, JSON.stringify(f.before), JSON.stringify(f.after)].map(String).join(' ')).join('; '))`, chromedp.EvalAwaitPromise))
		if err != nil || got != c.want {
			t.Errorf("%s, %s: %q, %v; want %q", c.before, c.after, got, err, c.want)
		}
	}
	b.requireClean()
}
