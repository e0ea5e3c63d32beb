package readclients

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// page reads the lists named by /lists, and posts the decoded bodies to /readings.
const page = `<!doctype html><title>lists</title><script type="module">
const { url, token, lists } = await (await fetch('/lists')).json();
const readings = [];
for (const { target, accept } of lists) {
  const reading = { how: 'Chromium', target, accept };
  try {
    const response = await fetch(url + target, { headers: { Authorization: 'Bearer ' + token, Accept: accept } });
    const body = await response.arrayBuffer();
    const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', body));
    reading.bytes = body.byteLength;
    reading.sha256 = [...digest].map((b) => b.toString(16).padStart(2, '0')).join('');
  } catch (error) {
    reading.error = String(error);
  }
  readings.push(reading);
}
await fetch('/readings', { method: 'POST', body: JSON.stringify(readings) });
</script>`

// TestGzip_ChromiumCrossOrigin_DecodesLists: a page of another origin reads lists from the API
// server directly, as CORS permits.
func TestGzip_ChromiumCrossOrigin_DecodesLists(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	chromium := program(t, "chromium", "chromium-browser", "google-chrome")
	lists := compressedLists(t, ctx)
	server := both.strata
	posted := make(chan []reading, 1)
	mux := http.NewServeMux()
	var asked atomic.Bool
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		asked.Store(true)
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, page)
	})
	mux.HandleFunc("GET /lists", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"url": server.URL, "token": adminToken, "lists": lists})
	})
	mux.HandleFunc("POST /readings", func(w http.ResponseWriter, r *http.Request) {
		var readings []reading
		if err := json.NewDecoder(r.Body).Decode(&readings); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		posted <- readings
	})
	site := httptest.NewServer(mux)
	defer site.Close()

	// A browser's user agent gets indented JSON unless the query disables it: this one gets the
	// compact form, for the comparison.
	browsing, stop := context.WithCancel(ctx)
	defer stop()
	var (
		output strings.Builder
		ended  chan error
	)
	start := func() {
		output.Reset()
		cmd := exec.CommandContext(browsing, chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
			"--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
			"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
			"--ignore-certificate-errors", "--user-data-dir="+t.TempDir(), "--user-agent=reader/1", "--remote-debugging-port=0", site.URL)
		cmd.Stdout, cmd.Stderr = &output, &output
		harness.Check(t, cmd.Start())
		ended = make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
	}
	start()
	for attempt := 1; ; attempt++ {
		select {
		case readings := <-posted:
			stop()
			<-ended
			for i := range readings {
				// A page of another origin cannot read the Content-Encoding. A browser sends
				// Accept-Encoding: gzip, and the other clients of these tests verify that the
				// server then compresses.
				readings[i].Encoding = "gzip"
			}
			expectReadings(t, lists, []string{"Chromium"}, readings)
			return
		case err := <-ended: // Debian's Chromium may exit at once
			if attempt == 3 || asked.Load() {
				t.Fatalf("Chromium ended (%v) before the page was done:\n%s", err, output.String())
			}
			start()
		case <-ctx.Done():
			stop()
			<-ended
			t.Fatalf("%v:\n%s", context.Cause(ctx), output.String())
		}
	}
}
