package console

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/stratakube/strata/test/harness"
)

// stops is a function of the page: the names of the elements that the Tab key has to reach, in the
// order of the document.
const stops = `
  globalThis.nameOf = (e) => e.id || e.tagName.toLowerCase() + ' ' + (e.getAttribute('href') ?? e.innerText);
  globalThis.stops = () => [...document.querySelectorAll('a[href], button, input, select, [tabindex]')]
    .filter((e) => !e.disabled && e.tabIndex >= 0 && e.checkVisibility()).map(nameOf);
`

const (
	focused = "nameOf(document.activeElement)"
	// outlined is whether the focused element has an outline that a user sees.
	outlined = "(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0; })()"
)

// walk presses the Tab key from the first element of the page to the last, and returns the names of
// those that had the focus and of those that had it without an outline.
func walk(b *browser, most int) (reached, unmarked []string) {
	b.t.Helper()
	b.run(script("document.querySelector('.skip').focus()"))
	for range most {
		name := value[string](b, focused)
		if strings.HasPrefix(name, "body") || slices.Contains(reached, name) {
			return reached, unmarked
		}
		reached = append(reached, name)
		if len(reached) > 1 && !value[bool](b, outlined) { // the first was focused by a script
			unmarked = append(unmarked, name)
		}
		b.run(chromedp.KeyEvent(kb.Tab))
	}
	return reached, unmarked
}

// TestConsole_TabKey_ReachesEverythingInOrder walks each section with the Tab key only, and back
// with Shift.
func TestConsole_TabKey_ReachesEverythingInOrder(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	b, _ := openSession(t, ctx)
	write(t, ctx, http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": "keyboard"}})
	write(t, ctx, http.MethodPost, "/api/v1/namespaces/keyboard/configmaps", object{"metadata": object{"name": "settings"}})
	b.run(script(stops))
	for section, ready := range map[string]string{
		"overview":        "document.querySelector('#plots canvas')",
		"resources":       "document.querySelector('#resources-table tbody button')",
		"past/configmaps": "!document.getElementById('past-from').disabled && document.querySelector('#past-list tbody button')",
		"watches":         "document.querySelector('#watches-table td')",
		"checks":          "document.querySelector('#checks-table td')",
		"servers":         "document.querySelector('#servers-table .good')",
	} {
		b.run(script("location.hash = '#/" + section + "'"))
		if strings.HasPrefix(section, "past") {
			b.until("!document.getElementById('past-from').disabled")
			b.run(chromedp.SetValue(chromedp.CSS("#past-namespace"), "keyboard"), script("document.getElementById('past-namespace').dispatchEvent(new Event('change'))"))
			// The page disables the slider while it loads a list, so the newest revision is chosen
			// whenever it is not.
			b.until(`(() => {
				const slider = document.getElementById('past-from');
				if (!slider.disabled && slider.value !== slider.max) {
					slider.value = slider.max;
					slider.dispatchEvent(new Event('input'));
					slider.dispatchEvent(new Event('change'));
				}
				return !slider.disabled && /settings/.test(` + listText + `) && !/extension-apiserver/.test(` + listText + `) &&
					/No object differs/.test(` + diffText + `);
			})()`)
		}
		b.until(ready)
		if section == "resources" { // fewer rows
			b.run(chromedp.SendKeys(chromedp.CSS("#resources-filter"), "configm"))
			b.until(`document.querySelectorAll('#resources-table tbody tr').length === 1`)
		}
		want := value[[]string](b, "stops()")
		reached, unmarked := walk(b, len(want)+20)
		// Chromium also stops at areas that scroll.
		controls := slices.DeleteFunc(slices.Clone(reached), func(name string) bool { return !slices.Contains(want, name) })
		if !slices.Equal(controls, want) || len(want) < 7 {
			t.Errorf("%s: the Tab key reaches\n%q\nthe section has\n%q", section, controls, want)
		}
		if len(unmarked) > 0 {
			t.Errorf("%s: no outline marks the focus on %q", section, unmarked)
		}
		b.run(script("document.querySelector('nav a:nth-child(2)').focus()"), chromedp.KeyEvent(kb.Tab, chromedp.KeyModifiers(chromedp.ModifierShift)))
		if name := value[string](b, focused); name != "a #/overview" {
			t.Errorf("%s: Shift and Tab move the focus from the second link to %s", section, name)
		}
	}
	b.run(script("document.querySelector('.skip').focus()"), chromedp.KeyEvent(kb.Enter))
	b.until("document.activeElement.id === 'main'")

	// The focus stays on its row when the page reads its status, and when other rows appear.
	b.run(script("location.hash = '#/resources'"))
	b.until(`document.querySelectorAll('#resources-table tbody tr').length === 1`)
	b.run(script("document.querySelector('#resources-table tbody button').focus()"))
	row, sent := value[string](b, focused), b.sent("GET /debug/strata/status")
	b.run(script("const filter = document.getElementById('resources-filter'); filter.value = ''; filter.dispatchEvent(new Event('input'))"))
	b.until(`document.querySelectorAll('#resources-table tbody tr').length > 5`)
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) { return b.sent("GET /debug/strata/status") >= sent+2, nil }))
	if name := value[string](b, focused); name != row {
		t.Errorf("after an update the focus is on %s, before on %s", name, row)
	}
	b.requireClean()
}
