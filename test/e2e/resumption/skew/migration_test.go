package skew

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// migration carries out the steps of docs/migration.md on one etcd, with clients that continue
// across the switches.
type migration struct {
	env          *harness.Env
	etcd         *harness.Etcd
	stockProgram string
	stock        *harness.Server
	strata       *harness.Server

	recorded map[string]string // revision of each object, by key, of the server before
	// resource version of a client whose watch ended with the server before
	watched string
	missed  harness.Object // created after it
	token   string         // for the rest of a list whose first page the server before sent
	rest    []string       // names on the rest of the list
}

// TestMigration_StepsOfPage_KeepDataAndWatches carries out each step of docs/migration.md, in the
// page's order, to Strata, back, and to Strata again. A step of the page that has no function here,
// and a function without a step, fails.
func TestMigration_StepsOfPage_KeepDataAndWatches(t *testing.T) {
	t.Parallel()
	forEach(t, append([]combination{{upstream, "3.7"}}, stockCombinations...), func(t *testing.T, ctx context.Context, c combination) {
		m := &migration{stockProgram: program(t, c.peer), env: harness.New(t)}
		m.etcd = m.env.StockEtcd(t, c.etcd)
		m.stock = startPeer(m.env, m.stockProgram, m.etcd)
		harness.Check(t, m.stock.Await(ctx, "/readyz"))
		fillEtcd(t, ctx, m.etcd.Client(), "/registry/configmaps/default/", 30)
		create(t, ctx, m.stock.API(), defaultSecrets, object{"metadata": object{"name": "secret"}})

		toStrata := map[string]func(*testing.T, context.Context){
			"Check the flags":                  m.checkFlags,
			"Record the state":                 func(t *testing.T, ctx context.Context) { m.record(t, ctx, m.stock) },
			"Stop kube-apiserver":              func(t *testing.T, ctx context.Context) { m.stop(t, ctx, m.stock) },
			"Start Strata with the same flags": m.startStrata,
			"Check the server":                 m.checkStrata,
			"Compare the state":                func(t *testing.T, ctx context.Context) { m.compare(t, ctx, m.strata, true) },
		}
		back := map[string]func(*testing.T, context.Context){
			"Remove the flags of Strata": m.requireNoOwnFlags,
			"Stop Strata": func(t *testing.T, ctx context.Context) {
				m.record(t, ctx, m.strata)
				m.stop(t, ctx, m.strata)
			},
			"Start kube-apiserver with the same flags": func(t *testing.T, ctx context.Context) { m.stock.Restart() },
			"Compare the state":                        func(t *testing.T, ctx context.Context) { m.compare(t, ctx, m.stock, false) },
		}
		m.carryOut(t, ctx, "To Strata", toStrata)
		m.carryOut(t, ctx, "Back to kube-apiserver", back)
		m.carryOut(t, ctx, "To Strata", toStrata)
	})
}

// carryOut calls the function of each step of a section, in the order of the page.
func (m *migration) carryOut(t *testing.T, ctx context.Context, section string, steps map[string]func(*testing.T, context.Context)) {
	t.Helper()
	page, err := os.ReadFile("../../../../docs/migration.md")
	harness.Check(t, err)
	_, text, _ := strings.Cut(string(page), "\n## "+section+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	left := maps.Clone(steps)
	for i, step := range regexp.MustCompile(`(?m)^(\d+)\. \*\*(.+)\.\*\*`).FindAllStringSubmatch(text, -1) {
		do := steps[step[2]]
		if do == nil || step[1] != fmt.Sprint(i+1) {
			t.Fatalf("%s: step %s, %q, is not tested", section, step[1], step[2])
		}
		t.Logf("%s, step %d: %s", section, i+1, step[2])
		do(t, ctx)
		delete(left, step[2])
	}
	if len(left) > 0 {
		t.Fatalf("%s: the page has no steps %q", section, slices.Sorted(maps.Keys(left)))
	}
}

func (m *migration) checkFlags(t *testing.T, ctx context.Context) {
	t.Helper()
	run := func(more ...string) harness.Result {
		t.Helper()
		return harness.Must[harness.Result](t)(m.env.Run(ctx, "", append(append([]string{"apiserver"}, m.stock.Flags()...), more...)...))
	}
	if r := run("--version"); r.Code != 0 || !strings.Contains(r.Stdout, "+strata.") {
		t.Errorf("the flags are not accepted: %+v", r)
	}
	if r := run("--no-such-flag", "--version"); r.Code == 0 || !strings.Contains(r.Stderr, "no-such-flag") {
		t.Errorf("an unknown flag is accepted: %+v", r)
	}
}

// record reads the objects, opens the lists and watches of clients, and creates an object that the
// watch does not deliver.
func (m *migration) record(t *testing.T, ctx context.Context, s *harness.Server) {
	t.Helper()
	api := s.API()
	m.recorded = m.objects(t, ctx, s)
	page := list(t, ctx, api, defaultMaps, "limit=10")
	m.token, m.rest = page.Metadata.Continue, nil
	for _, o := range list(t, ctx, api, defaultMaps, exact(page.Metadata.ResourceVersion)).Items[10:] {
		m.rest = append(m.rest, o.Metadata.Name)
	}
	last := create(t, ctx, api, defaultMaps, configMap(harness.NewName("seen")))
	w := watchFrom(t, ctx, api, defaultMaps, page.Metadata.ResourceVersion)
	expectEvent(t, ctx, w, "ADDED", last)
	w.Close()
	m.watched = last.Metadata.ResourceVersion
	m.missed = create(t, ctx, api, defaultMaps, configMap(harness.NewName("missed")))
	for _, o := range []harness.Object{last, m.missed} {
		m.recorded[defaultMaps+"/"+o.Metadata.Name] = o.Metadata.ResourceVersion
	}
}

// objects returns the resource version of each ConfigMap and Secret.
func (m *migration) objects(t *testing.T, ctx context.Context, s *harness.Server) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, path := range []string{defaultMaps, defaultSecrets} {
		for _, o := range list(t, ctx, s.API(), path, "").Items {
			found[path+"/"+o.Metadata.Name] = o.Metadata.ResourceVersion
		}
	}
	return found
}

func (m *migration) stop(t *testing.T, _ context.Context, s *harness.Server) {
	t.Helper()
	harness.Check(t, s.Stop())
}

func (m *migration) startStrata(t *testing.T, ctx context.Context) {
	t.Helper()
	if m.strata == nil {
		m.strata = startStrata(m.env, m.etcd)
		harness.Check(t, m.strata.Await(ctx, "/readyz"))
		return
	}
	m.strata.Restart()
}

func (m *migration) checkStrata(t *testing.T, ctx context.Context) {
	t.Helper()
	api := m.strata.API()
	r, err := api.Do(ctx, http.MethodGet, "/version", "", nil)
	harness.Check(t, err)
	if !bytes.Contains(r.Body, []byte("+strata.")) {
		t.Errorf("version %s", r.Body)
	}
	if n, err := api.Sum(ctx, "strata_mirror_ready"); err != nil || n != 1 {
		t.Errorf("strata_mirror_ready is %v (%v)", n, err)
	}
	checks, err := api.Consistent(ctx, "configmaps")
	harness.Check(t, err)
	if len(checks) != 1 || checks[0].Status != "success" || checks[0].Keys == 0 {
		t.Errorf("consistency check: %+v", checks)
	}
}

func (m *migration) requireNoOwnFlags(t *testing.T, _ context.Context) {
	t.Helper()
	for _, flag := range m.stock.Flags() {
		if own := strings.HasPrefix(flag, "--strata-") || strings.HasPrefix(flag, "--engine"); own && m.stockProgram != "" {
			t.Errorf("kube-apiserver has the flag %s", flag)
		}
	}
}

// compare compares the objects with the recorded ones, and continues the list and the watch of the
// server before. resumes: the watch must continue; otherwise it may be refused with 410.
func (m *migration) compare(t *testing.T, ctx context.Context, s *harness.Server, resumes bool) {
	t.Helper()
	api := s.API()
	requireEqual(t, "objects", m.objects(t, ctx, s), m.recorded)
	if got := list(t, ctx, api, defaultMaps, continued(m.token, 500)).Names(); !slices.Equal(got, m.rest) {
		t.Errorf("the rest of the list has %q, want %q", got, m.rest)
	}
	w := harness.StartWatch(t, ctx, api, defaultMaps, "resourceVersion="+m.watched)
	e, err := w.Next(ctx)
	harness.Check(t, err)
	if expired := e.Type == "ERROR" && e.Status.Code == http.StatusGone; expired && !resumes {
		t.Logf("the watch from %s is refused: %s", m.watched, e.Status.Message)
	} else if e.Type != "ADDED" || e.Object.Metadata.ResourceVersion != m.missed.Metadata.ResourceVersion {
		t.Errorf("the watch from %s continues with %s of %s (%s), want ADDED of %s", m.watched, e.Type, e.Object.Metadata.Name, e.Status.Message, m.missed.Metadata.Name)
	}
	// A write at the recorded resource version.
	_, err = api.Update(ctx, defaultMaps+"/"+m.missed.Metadata.Name, object{"metadata": object{"name": m.missed.Metadata.Name, "resourceVersion": m.missed.Metadata.ResourceVersion}, "data": object{"a": "b"}})
	harness.Check(t, err)
}
