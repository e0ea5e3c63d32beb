package console

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/test/harness"
)

// chromiumEnv is the path of Chromium.
const chromiumEnv = "STRATA_TEST_CHROMIUM"

// chromium returns the path of the browser. If there is none the test is skipped; its name in
// STRATA_TEST_REQUIRE is chromium.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{os.Getenv(chromiumEnv), "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	testrequire.Missing(t, "chromium", fmt.Sprintf("not installed; hack/chromium finds or installs it, and %s names it", chromiumEnv))
	return ""
}

// browser is a tab of a browser. It records everything that a page must not do.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	problems []string // errors of scripts, violations of the policy, requests to other servers
	requests []string // paths
}

// process is the only process of Chromium. The first tab starts it, and one after its end starts
// another.
var process struct {
	ctx  context.Context // nil until it runs
	stop func()
}

// startTimeout bounds a start of Chromium that hangs, and startAttempts the starts: Debian's
// Chromium may exit at once.
const (
	startTimeout  = 3 * time.Minute
	startAttempts = 3
)

// startChromium returns the context of the process.
func startChromium(t *testing.T) context.Context {
	t.Helper()
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]),
		chromedp.ExecPath(chromium(t)), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("ignore-certificate-errors", true), chromedp.Flag("no-proxy-server", true),
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"), chromedp.Flag("lang", "en-GB"))
	for attempt := 1; process.ctx == nil || process.ctx.Err() != nil; attempt++ {
		allocator, cancel := chromedp.NewExecAllocator(context.Background(), options...)
		ctx, closeAll := chromedp.NewContext(allocator)
		stop := func() { closeAll(); cancel() }
		hanging := time.AfterFunc(startTimeout, cancel)
		if err := chromedp.Do(ctx); err == nil && hanging.Stop() {
			process.ctx, process.stop = ctx, stop
		} else {
			stop()
			t.Logf("start %d of Chromium: %v", attempt, err)
			if attempt == startAttempts {
				t.Fatal("Chromium does not start")
			}
		}
	}
	return process.ctx
}

func stopChromium() {
	if process.ctx != nil {
		process.stop()
	}
}

// openBrowser opens a tab with an empty profile, for pages of a server, which is given by its URL.
// It ends with the test.
func openBrowser(t *testing.T, server string) *browser {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(startChromium(t), testTimeout, fmt.Errorf("not done after %v", testTimeout))
	t.Cleanup(cancel)
	ctx, closeTab := chromedp.NewContext(ctx, chromedp.WithNewBrowserContext())
	t.Cleanup(closeTab)
	b := &browser{t: t, ctx: ctx}
	origin := harness.Must[*url.URL](t)(url.Parse(server))
	harness.Check(t, chromedp.Listen(ctx, func(event any) { b.observe(event, origin) }))
	b.run(call(log.Enable, cdp.Empty{}), call(network.Enable, network.EnableParams{}))
	return b
}

// action is an action of the browser without a result.
type action = chromedp.Action[chromedp.Void]

// call is the action that sends a command of the browser's protocol.
func call[P, R any](command cdp.Command[P, R], params P) action {
	return chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, command, params)
		return err
	})
}

// script is the action that evaluates JavaScript.
func script(text string) action {
	return chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := chromedp.Evaluate[any]("(() => {"+text+"; return null})()")(ctx, target)
		return err
	})
}

func (b *browser) observe(event any, origin *url.URL) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		text := e.ExceptionDetails.Text
		if e.ExceptionDetails.Exception != nil {
			text += ": " + e.ExceptionDetails.Exception.Description
		}
		b.problems = append(b.problems, "exception: "+text)
	case *runtime.EventConsoleAPICalled:
		b.problems = append(b.problems, fmt.Sprintf("console.%s", e.Type))
	case *log.EventEntryAdded:
		b.problems = append(b.problems, fmt.Sprintf("%s %s: %s %s", e.Entry.Source, e.Entry.Level, e.Entry.Text, e.Entry.URL))
	case *network.EventRequestWillBeSent:
		to, err := url.Parse(e.Request.URL)
		if err != nil || to.Scheme != origin.Scheme || to.Host != origin.Host {
			b.problems = append(b.problems, "request to "+e.Request.URL)
			return
		}
		if strings.Contains(to.RequestURI(), "token") {
			b.problems = append(b.problems, "request with a token in its address: "+e.Request.Method+" "+to.Path)
		}
		b.requests = append(b.requests, e.Request.Method+" "+to.RequestURI())
	}
}

// run runs actions of the browser.
func (b *browser) run(actions ...action) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, actions...); err != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.t.Fatalf("%v (%v)\nproblems: %q\nrequests: %q", err, context.Cause(b.ctx), b.problems, b.requests[max(0, len(b.requests)-10):])
	}
}

// reloads reports whether an expression was not evaluated because the page reloads itself, before
// or meanwhile.
func reloads(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "Cannot find context") || strings.Contains(err.Error(), "Inspected target navigated"))
}

// until waits until an expression of JavaScript is true.
func (b *browser) until(expression string) {
	b.t.Helper()
	poll := chromedp.Poll[chromedp.Void]("Boolean("+expression+")", chromedp.WithPollingTimeout(waitTimeout))
	err := chromedp.Do(b.ctx, poll)
	for reloads(err) {
		err = chromedp.Do(b.ctx, poll)
	}
	if err == nil {
		return
	}
	if !errors.Is(err, chromedp.ErrPollingTimeout) {
		b.t.Errorf("wait for %s: %v", expression, err)
	}
	shown := value[string](b, "document.body.innerText")
	b.mu.Lock()
	defer b.mu.Unlock()
	b.t.Fatalf("not true: %s\nproblems: %q\nrequests: %q\npage:\n%s", expression, b.problems, b.requests[max(0, len(b.requests)-10):], shown)
}

// value returns the value of an expression of JavaScript.
func value[T any](b *browser, expression string) T {
	b.t.Helper()
	return harness.Must[T](b.t)(chromedp.Run(b.ctx, chromedp.Evaluate[T](expression)))
}

// requireClean ends the test if the page did something that it must not do.
func (b *browser) requireClean() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.problems) > 0 {
		b.t.Fatalf("%d problems: %q", len(b.problems), b.problems)
	}
}

// sent returns the number of requests with a prefix.
func (b *browser) sent(prefix string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.requests {
		if strings.HasPrefix(r, prefix) {
			n++
		}
	}
	return n
}

// look sets the size of the page and its colours, light or dark.
func (b *browser) look(width, height int64, scheme string) {
	b.t.Helper()
	b.run(chromedp.EmulateViewport(width, height),
		call(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}))
}

// screenshot returns the visible part of the page as PNG.
func (b *browser) screenshot() []byte {
	b.t.Helper()
	r, err := chromedp.Run(b.ctx, func(ctx context.Context, target *chromedp.Target) (page.CaptureScreenshotResult, error) {
		return cdp.Call(ctx, target, page.CaptureScreenshot, page.CaptureScreenshotParams{Format: page.CaptureScreenshotFormatPng})
	})
	harness.Check(b.t, err)
	return r.Data
}
