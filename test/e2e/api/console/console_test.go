package console

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"image/png"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/stratakube/strata/test/harness"
)

var update = flag.Bool("update", false, "write the screenshots of docs/console.md to docs/images")

type object = map[string]any

// maxImage bounds the files of screenshots.
const maxImage = 150 << 10

var inOutput = regexp.MustCompile(`https://\S+/debug/strata/console/#token=[A-Za-z0-9_-]{43}`)

// printedLink returns the link that `strata up` has printed.
func printedLink(t *testing.T) string {
	t.Helper()
	if cluster == nil {
		t.Skip("the console is a part of the engine of strata")
	}
	link := inOutput.FindString(cluster.Output())
	if link == "" {
		t.Fatalf("strata up prints no link:\n%s", cluster.Output())
	}
	return link
}

// newLink returns the link that `strata console` prints.
func newLink(t *testing.T, ctx context.Context) string {
	t.Helper()
	if cluster == nil {
		t.Skip("the console is a part of the engine of strata")
	}
	r := harness.Must[harness.Result](t)(cluster.Console(ctx))
	link := inOutput.FindString(r.Stdout)
	if r.Code != 0 || link == "" || !strings.Contains(r.Stdout, "valid once, until ") {
		t.Fatalf("strata console: code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
	return link
}

// write sends a request that must succeed, and returns the resource version of the answer.
func write(t *testing.T, ctx context.Context, method, path string, body any) int64 {
	t.Helper()
	contentType := ""
	if method == http.MethodPatch {
		contentType = "application/merge-patch+json"
	}
	r := harness.Must[*harness.Response](t)(cluster.API().DoAs(ctx, method, path, "", contentType, "", body))
	if r.Code >= 300 {
		t.Fatal(r.Err())
	}
	var o struct {
		Metadata struct{ ResourceVersion string }
	}
	harness.Check(t, json.Unmarshal(r.Body, &o))
	revision, _ := strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64) // a deletion may have none
	return revision
}

// past writes ConfigMaps to a namespace: settings changes its colour after the returned revision,
// temporary is deleted, and other is added.
func past(t *testing.T, ctx context.Context, namespace string) (before int64) {
	t.Helper()
	write(t, ctx, http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": namespace}})
	maps := "/api/v1/namespaces/" + namespace + "/configmaps"
	write(t, ctx, http.MethodPost, maps, object{"metadata": object{"name": "temporary"}})
	before = write(t, ctx, http.MethodPost, maps, object{"metadata": object{"name": "settings"}, "data": object{"color": "blue", "size": "1", "markup": "<img src=x onerror=alert(1)>"}})
	write(t, ctx, http.MethodPatch, maps+"/settings", object{"data": object{"color": "green", "markup": "<i>"}, "metadata": object{"labels": object{"tier": "front"}}})
	write(t, ctx, http.MethodDelete, maps+"/temporary", nil)
	write(t, ctx, http.MethodPost, maps, object{"metadata": object{"name": "other"}})
	return before
}

// use reads and writes ten times a second until the test ends, so that the plots have something to
// show.
func use(t *testing.T, ctx context.Context) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	api := cluster.API()
	running.Go(func() {
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		for i := 0; ; i++ {
			for range 1 + i/7%5 {
				_, _ = api.Do(ctx, http.MethodGet, "/api/v1/pods", "", nil)
			}
			_, _ = api.DoAs(ctx, http.MethodPatch, "/api/v1/namespaces/default", "", "application/merge-patch+json", "",
				object{"metadata": object{"annotations": object{"example.com/turn": strconv.Itoa(i)}}})
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
		}
	})
}

const (
	listText = "document.getElementById('past-list').innerText"
	diffText = "document.getElementById('past-diff').innerText"

	// brokenLabels are the labels of resources, such as "apps" of "deployments.apps", that do not
	// fit a line.
	brokenLabels = `[...document.querySelectorAll('#resources-table .link')].flatMap((name) => [...name.childNodes]).filter((label) => {
  const range = document.createRange();
  range.selectNode(label);
  return range.getClientRects().length > 1;
}).map((label) => label.textContent)`
)

// press focuses an element and presses a key, as a user of the keyboard does.
func press(element chromedp.CSS, key string) action {
	return chromedp.Steps(chromedp.Focus(element), chromedp.KeyEvent(key))
}

// TestConsole_PrintedLink_ShowsServerAndPast is a session: link, overview, resources, the past with
// the keyboard, checks, servers.
func TestConsole_PrintedLink_ShowsServerAndPast(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	link := printedLink(t)
	b := openBrowser(t, cluster.URL)
	write(t, ctx, http.MethodPost, "/apis/apps/v1/namespaces/default/deployments", object{
		"metadata": object{"name": "hello"},
		"spec": object{"replicas": 6, "selector": object{"matchLabels": object{"app": "hello"}}, "template": object{
			"metadata": object{"labels": object{"app": "hello"}}, "spec": object{"containers": []object{{"name": "hello", "image": "hello"}}}}},
	})
	before := past(t, ctx, "shop")
	use(t, ctx)
	b.look(1200, 800, "light")
	b.run(chromedp.Navigate(link))
	b.until(`document.querySelectorAll('#tiles dd').length === 8 && !document.getElementById('tiles').innerText.includes('NaN')`)
	b.until(`document.querySelectorAll('#plots canvas').length === 4`)
	if address := value[string](b, "location.href"); strings.Contains(address, "token") {
		t.Errorf("the address of the page still has the token: %s", address)
	}

	b.run(press(`nav a[href="#/resources"]`, kb.Enter))
	b.until(`/configmaps/.test(document.getElementById('resources-table').innerText)`)
	b.run(press("#resources-table th:nth-child(2) button", kb.Enter))
	b.until(`document.querySelector('#resources-table th:nth-child(2)').ariaSort === 'descending'`)
	counts := value[[]int](b, `[...document.querySelectorAll('#resources-table tbody td:nth-child(2)')].map((td) => Number(td.innerText.replaceAll(',', '')))`)
	for i := 1; i < len(counts); i++ {
		if counts[i] > counts[i-1] || counts[0] < 2 {
			t.Errorf("not sorted by the number of objects: %v", counts)
		}
	}
	b.run(chromedp.SendKeys(chromedp.CSS("#resources-filter"), "namespaces"))
	b.until(`document.querySelectorAll('#resources-table tbody tr').length === 1`)
	// The line of events is as long as the readings since the page was opened, and the test writes
	// ten times a second.
	b.until(`(document.querySelector('#resources-table path').getAttribute('d').match(/L/g) ?? []).length > 1`)
	b.until(`/^events: at most [1-9]/.test(document.querySelector('#resources-table svg').ariaLabel)`)
	b.run(script("const filter = document.getElementById('resources-filter'); filter.value = ''; filter.dispatchEvent(new Event('input'))"))
	b.until(`document.querySelectorAll('#resources-table tbody tr').length > 5`)
	if broken := value[[]string](b, brokenLabels); len(broken) > 0 {
		t.Errorf("labels of names in several lines: %q", broken)
	}
	if hidden := value[int](b, `(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(document.querySelector('#resources-table .scroll'))`); hidden > 0 {
		t.Errorf("%d pixels of the resources are not visible", hidden)
	}
	if *update {
		// the lines of the screenshot begin when the page is opened
		b.until("performance.now() > 15000")
	}
	capture(t, b, "resources-light.png")
	b.run(chromedp.SendKeys(chromedp.CSS("#resources-filter"), "configm"))
	b.until(`document.querySelectorAll('#resources-table tbody tr').length === 1 && /configmaps/.test(document.getElementById('resources-table').innerText)`)
	b.run(press("#resources-table tbody button", kb.Enter))

	showPast(t, b, before)

	b.run(press(`nav a[href="#/servers"]`, kb.Enter))
	b.until(`/apiserver-/.test(document.getElementById('servers-table').innerText) && /etcd\s+ok/.test(document.getElementById('readiness-table').innerText)`)
	check := harness.Must[*harness.Response](t)(cluster.API().Do(ctx, http.MethodPost, "/debug/strata/consistency", "resource=configmaps", nil))
	if check.Code != http.StatusOK {
		t.Fatal(check.Err())
	}
	b.run(press(`nav a[href="#/checks"]`, kb.Enter))
	b.until(`/configmaps\s+equal/.test(document.getElementById('checks-table').innerText)`)
	b.run(press(`nav a[href="#/watches"]`, kb.Enter))
	b.until(`/No watch is slow/.test(document.getElementById('watches-table').innerText)`)

	b.run(press(`nav a[href="#/overview"]`, kb.Enter))
	b.look(1200, 800, "dark")
	b.until(`document.querySelectorAll('#plots canvas').length === 4 && !/–/.test(document.querySelector('#plots [role=img]').ariaLabel)`)
	if *update {
		// the plots of the screenshot begin when the page is opened
		b.until("performance.now() > 20000")
	}
	capture(t, b, "overview-dark.png")
	b.requireClean()

	// The tab keeps its session when it is loaded again; the link has none left.
	b.run(chromedp.Reload())
	b.until(`document.querySelectorAll('#tiles dd').length === 8 && !document.getElementById('leave').hidden`)
	b.requireClean()
	other := openBrowser(t, cluster.URL)
	other.run(chromedp.Navigate(link))
	other.until(`/was used before/.test(document.getElementById('problem').innerText)`)
	if n := other.sent("GET /debug/strata/status") + other.sent("GET /api"); n > 0 {
		t.Errorf("a page without a session sent %d requests", n)
	}
	b.run(chromedp.Click(chromedp.CSS("#leave")))
	b.until(`/session has ended/.test(document.getElementById('problem').innerText)`)
	b.requireClean()
}

// showPast moves through the past of the ConfigMaps of the namespace shop with the keyboard; before
// is the revision that past has returned.
func showPast(t *testing.T, b *browser, before int64) {
	t.Helper()
	b.until(`!document.getElementById('past-from').disabled && document.getElementById('past-resource').value === 'configmaps'`)
	b.run(chromedp.SetValue(chromedp.CSS("#past-namespace"), "shop"),
		script(`document.getElementById('past-namespace').dispatchEvent(new Event('change'))`))
	b.until(`/3 added/.test(` + diffText + `)`) // with the root certificate of the namespace
	b.until(`/No objects/.test(` + listText + `)`)
	b.run(press("#past-from", kb.End))
	b.until(`/settings/.test(` + listText + `) && /other/.test(` + listText + `) && /No object differs/.test(` + diffText + `)`)
	newest := value[int64](b, "document.getElementById('past-from').valueAsNumber")
	b.run(press("#past-from", kb.ArrowLeft), chromedp.KeyEvent(kb.ArrowLeft))
	b.until(fmt.Sprintf("document.getElementById('past-from').valueAsNumber === %d", newest-2))
	b.until(fmt.Sprintf("document.getElementById('past-list-title').innerText.replaceAll(',', '').endsWith('revision %d')", newest-2))
	b.run(chromedp.SetValue(chromedp.CSS("#past-from-number"), strconv.FormatInt(before, 10)), press("#past-from-number", kb.Enter),
		script(`document.getElementById('past-from-number').dispatchEvent(new Event('change'))`))
	b.until(`/temporary/.test(` + listText + `) && /settings/.test(` + listText + `) && !/other/.test(` + listText + `)`)
	b.until(`/data\.color\s+"blue"\s+"green"/.test(` + diffText + `) && /1 removed, 1 changed/.test(` + diffText + `)`)
	b.until(`/metadata\.labels\s+–\s+\{"tier":"front"\}/.test(` + diffText + `)`)
	b.until(`/data\.markup\s+"<img src=x onerror=alert\(1\)>"\s+"<i>"/.test(` + diffText + `)`)
	capture(t, b, "past-light.png")
	b.run(script(`[...document.querySelectorAll('#past-list tbody button')].find((b) => b.innerText === 'settings').focus()`), chromedp.KeyEvent(kb.Enter))
	b.until(`document.getElementById('object').open && /"color": "blue"/.test(document.getElementById('object-text').innerText)`)
	if value[bool](b, `document.querySelector('img:not([src="icon.svg"]), i') !== null || !/<img src=x/.test(document.getElementById('object-text').innerText)`) {
		t.Error("markup in the data of an object is not shown as text")
	}
	b.run(chromedp.KeyEvent(kb.Escape))
	b.until(`!document.getElementById('object').open`)
}

// TestConsole_PhoneAndColours_FitAndAreReadable visits each section at the width of a small phone,
// in light and dark.
func TestConsole_PhoneAndColours_FitAndAreReadable(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	link := newLink(t, ctx)
	past(t, ctx, "phone")
	b := openBrowser(t, cluster.URL)
	b.look(360, 740, "light")
	b.run(chromedp.Navigate(link))
	for _, scheme := range []string{"light", "dark"} {
		b.look(360, 740, scheme)
		for section, shown := range map[string]string{
			"overview": "#plots canvas", "resources": "#resources-table tbody button", "past": "#past-list tbody button",
			"watches": "#watches-table td", "checks": "#checks-table td", "servers": "#servers-table .good",
		} {
			b.run(script("location.hash = '#/" + section + "'"))
			b.until("!document.getElementById('" + section + "').hidden")
			if top := value[float64](b, "window.scrollY"); top != 0 {
				t.Errorf("%s begins %.0f pixels above the visible part", section, top)
			}
			if section == "past" {
				b.until("!document.getElementById('past-from').disabled")
				b.run(press("#past-from", kb.End))
			}
			b.until("document.querySelector('" + shown + "')")
			if section == "resources" && scheme == "light" {
				capture(t, b, "resources-phone.png")
			}
			if width := value[int](b, "document.documentElement.scrollWidth"); width > 360 {
				t.Errorf("%s is %d pixels wide", section, width)
			}
			if contrast := value[float64](b, contrastOfText); contrast < 4.5 {
				t.Errorf("%s in %s: the contrast of text is %.1f", section, scheme, contrast)
			}
		}
	}
	b.requireClean()
}

// TestConsole_KubectlProxy_NeedsNoLink: behind the proxy, the page has the rights of the
// kubeconfig, and no session to end.
func TestConsole_KubectlProxy_NeedsNoLink(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	if cluster == nil {
		t.Skip("the console is a part of the engine of strata")
	}
	proxy := cluster.StartKubectl("proxy", "--port=0")
	defer proxy.Kill()
	line, _, err := proxy.WaitLine(ctx, 0, "Starting to serve on ")
	harness.Check(t, err)
	_, address, _ := strings.Cut(line, "Starting to serve on ")
	site := "http://" + strings.TrimSpace(address)
	b := openBrowser(t, site)
	b.look(1200, 800, "light")
	b.run(chromedp.Navigate(site + "/debug/strata/console"))
	b.until(`document.querySelectorAll('#tiles dd').length === 8 && document.getElementById('leave').hidden`)
	b.run(script("location.hash = '#/past/secrets'"))
	b.until(`!document.getElementById('past-from').disabled && document.getElementById('past-resource').value === 'secrets'`)
	b.until(`document.getElementById('past-message').innerText === ''`)
	b.requireClean()
}

// contrastOfText is the least contrast (WCAG) of the colours of text with the two backgrounds.
const contrastOfText = `(() => {
  const style = getComputedStyle(document.documentElement);
  const luminance = (name) => {
    const [r, g, b] = style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16) / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return Math.min(...['--ink', '--muted', '--accent', '--good', '--warn', '--bad'].flatMap((text) =>
    ['--ground', '--panel'].map((ground) => contrast(luminance(text), luminance(ground)))));
})()`

// capture writes the visible part of the page to docs/images with -update. It ends the test if the
// image is too large for a repository, or empty.
func capture(t *testing.T, b *browser, name string) {
	t.Helper()
	data := b.screenshot()
	image, err := png.Decode(bytes.NewReader(data))
	harness.Check(t, err)
	if len(data) > maxImage || image.Bounds().Dx() < 300 {
		t.Fatalf("%s has %d bytes and is %v", name, len(data), image.Bounds())
	}
	if *update {
		dir := filepath.Join("..", "..", "..", "..", "docs", "images")
		harness.Check(t, os.MkdirAll(dir, 0o755))
		harness.Check(t, os.WriteFile(filepath.Join(dir, "console-"+name), data, 0o644))
	}
}
