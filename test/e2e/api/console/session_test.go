package console

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/stratakube/strata/test/harness"
)

const (
	endSession = "#leave"
	message    = "document.getElementById('problem').innerText"
)

// openSession opens a link that `strata console` prints, and returns the tab and the token of its
// session.
func openSession(t *testing.T, ctx context.Context) (b *browser, token string) {
	t.Helper()
	link := newLink(t, ctx)
	b = openBrowser(t, cluster.URL)
	b.look(1200, 800, "light")
	b.run(chromedp.Navigate(link))
	b.until(`document.querySelectorAll('#plots canvas').length === 4 && !document.getElementById('leave').hidden`)
	b.run(script(timers))
	b.until("timers.size > 0")
	return b, value[string](b, "sessionStorage.getItem('strata-console-session')")
}

// statusOf returns the status of a request with the token of a session.
func statusOf(t *testing.T, ctx context.Context, method, path, token string) int {
	t.Helper()
	return harness.Must[*harness.Response](t)(cluster.APIFor(cluster.ConfigFor(token)).Do(ctx, method, path, "", nil)).Code
}

// requireForgotten demands that a tab has no token and no data, and no timer.
func requireForgotten(t *testing.T, b *browser) {
	t.Helper()
	if left := value[string](b, "JSON.stringify(sessionStorage) + document.getElementById('main').innerHTML + document.getElementById('server').innerText"); left != "{}" {
		t.Errorf("the tab still has %.300s", left)
	}
	b.run(script("for (const type of ['hashchange', 'resize']) dispatchEvent(new Event(type))"),
		script("document.dispatchEvent(new Event('visibilitychange'))"))
	if n := value[int](b, "timers.size"); n != 0 {
		t.Errorf("%d timers of the page are running", n)
	}
}

// timers counts the page's own timers: of the status, of checks and servers, and of sliders. The
// others are those of the test.
const timers = `
  globalThis.timers = new Set();
  const [set, clear] = [setTimeout, clearTimeout];
  setTimeout = (f, after) => {
    const id = set(() => { timers.delete(id); f(); }, after);
    if ([1000, 10000, 150].includes(after)) timers.add(id);
    return id;
  };
  clearTimeout = (id) => { timers.delete(id); clear(id); };
`

// TestConsole_EndOfSession_RemovesTokenAndData ends a session with its button, and begins another
// one in the same tab.
func TestConsole_EndOfSession_RemovesTokenAndData(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	b, token := openSession(t, ctx)
	b.run(script(`const send = fetch; fetch = (...request) => { if (request[1].method === 'DELETE') globalThis.storedAtEnd = sessionStorage.length; return send(...request); }`))
	b.run(script("location.hash = '#/past/configmaps'"))
	b.until(`/No object differs|added|changed/.test(` + diffText + `)`)
	b.run(chromedp.Click(chromedp.CSS(endSession)))
	b.until(`/^The session has ended/.test(` + message + `)`)
	if stored := value[int](b, "storedAtEnd"); stored != 0 {
		t.Errorf("the tab had its token when it sent the DELETE")
	}
	requireForgotten(t, b)
	b.requireClean()
	if code := statusOf(t, ctx, http.MethodGet, "/api/v1/pods", token); code != http.StatusUnauthorized {
		t.Errorf("the server answers %d to the token of the session", code)
	}
	_, fragment, _ := strings.Cut(newLink(t, ctx), "#")
	b.run(script("location.hash = '#" + fragment + "'"))
	b.until(`document.querySelectorAll('#plots canvas').length === 4 && !document.getElementById('leave').hidden`)
	b.requireClean()
}

// TestConsole_EndOfSessionFails_IsReported: the tab forgets its session although the server does
// not end it, and says so.
func TestConsole_EndOfSessionFails_IsReported(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	b, token := openSession(t, ctx)
	b.run(script(`const send = fetch; fetch = (...request) => (request[1].method === 'DELETE' ? Promise.reject(new TypeError('failed')) : send(...request))`))
	b.run(chromedp.Click(chromedp.CSS(endSession)))
	b.until(`/removed its session, but the server may accept it until.*does not answer.*strata console/.test(` + message + `)`)
	requireForgotten(t, b)
	b.requireClean()
	if code := statusOf(t, ctx, http.MethodGet, "/api/v1/pods", token); code != http.StatusOK {
		t.Errorf("the session, which the server has not ended, gets %d", code)
	}

	b, token = openSession(t, ctx)
	if code := statusOf(t, ctx, http.MethodDelete, "/debug/strata/console/session", token); code != http.StatusNoContent {
		t.Fatalf("the end of the session: %d", code)
	}
	b.run(chromedp.Click(chromedp.CSS(endSession)))
	b.until(`/^The session had ended before/.test(` + message + `)`)
}
