package history

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// state is the contents of a list at the time when it was the newest.
type state struct {
	revision int64
	items    []any
}

// story writes to a namespace and returns the states that a client read after each write: a is
// created, changed by another manager, relabelled, deleted and created again; b is there at the
// end, c in between only.
func story(t *testing.T, ctx context.Context, namespace string) []state {
	t.Helper()
	harness.Namespace(t, ctx, api, namespace)
	path := maps(namespace)
	var states []state
	read := func() {
		t.Helper()
		r := harness.Must[*harness.Response](t)(api.Read(ctx, path, "", ""))
		var list struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
			} `json:"metadata"`
			Items []any `json:"items"`
		}
		harness.Check(t, json.Unmarshal(r.Body, &list))
		states = append(states, state{harness.Revision(t, list.Metadata.ResourceVersion), list.Items})
	}
	must := func(_ harness.Object, err error) {
		t.Helper()
		harness.Check(t, err)
		read()
	}
	read()
	must(api.Create(ctx, path+"?fieldManager=creator", configMap("a", nil, object{"x": "1", "y": "1"})))
	must(api.Create(ctx, path, configMap("c", nil, object{"x": "1"})))
	must(patch(ctx, path+"/a", "editor", `{"data":{"x":"2","z":"new"}}`))
	must(patch(ctx, path+"/a", "labeller", `{"metadata":{"labels":{"app":"web"}},"data":{"y":null}}`))
	harness.Check(t, api.Delete(ctx, path+"/a"))
	read()
	must(api.Create(ctx, path+"?fieldManager=creator", configMap("a", object{"app": "web"}, object{"x": "again"})))
	must(api.Create(ctx, path, configMap("b", nil, object{"x": "1"})))
	harness.Check(t, api.Delete(ctx, path+"/c"))
	read()
	return states
}

func patch(ctx context.Context, path, manager, body string) (harness.Object, error) {
	r, err := api.DoAs(ctx, http.MethodPatch, path, "fieldManager="+manager, "application/merge-patch+json", "", body)
	if err == nil && r.Code != http.StatusOK {
		err = r.Err()
	}
	return harness.Object{}, err
}

// TestGet_OldRevision_IsAsItWasRead compares lists of the past with those that a client had read
// when they were the present.
func TestGet_OldRevision_IsAsItWasRead(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("get")
	states := story(t, ctx, namespace)
	for i, s := range states {
		list := decoded[struct{ Items []any }](t, ctx, "get", "cm", "-n", namespace, "--show-managed-fields", "--at-revision", fmt.Sprint(s.revision))
		for _, item := range s.items { // a List has the kind in each of its items
			item.(map[string]any)["kind"], item.(map[string]any)["apiVersion"] = "ConfigMap", "v1"
		}
		if len(list.Items) != len(s.items) || len(s.items) > 0 && !reflect.DeepEqual(list.Items, s.items) {
			t.Errorf("state %d: history at revision %d has\n%v\nwhile a client has read\n%v", i, s.revision, list.Items, s.items)
		}
	}

	at := func(i int) string { return fmt.Sprintf("--at-revision=%d", states[i].revision) }
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"get", "configmaps", at(2), "-o", "name"}, "configmap/a\nconfigmap/c"},
		{[]string{"get", "configmaps", at(4), "-l", "app=web", "-o", "name"}, "configmap/a"},
		{[]string{"get", "configmaps", at(3), "-l", "app=web", "-o", "name"}, ""},
		{[]string{"get", "configmap/a", at(1), "-o", "jsonpath={.data.x}"}, "1"},
		{[]string{"get", "configmap", "a", at(3), "-o", "jsonpath={.data.x}"}, "2"},
		{[]string{"get", "configmap", "a", "-o", "jsonpath={.data.x}"}, "again"},
	} {
		if got := strings.TrimSpace(ok(t, ctx, append(c.args, "-n", namespace)...)); got != c.want {
			t.Errorf("%v: %q, want %q", c.args, got, c.want)
		}
	}
	fails(t, ctx, server, []string{"configmap/a not found", "revision", "`log configmap/a`"}, "get", "cm", "a", at(5), "-n", namespace)

	for args, want := range map[string][]string{
		"get configmaps " + at(3):       {"NAME DATA AGE", "a 3 ", "c 1 "},
		"get configmaps -A " + at(3):    {"NAMESPACE NAME DATA AGE", namespace + " a 3 "},
		"get cm --show-labels " + at(4): {"NAME DATA AGE LABELS", "app=web"},
		"get cm,namespaces " + at(3):    {"configmap/a", "namespace/" + namespace},
		"get cm --no-headers -o wide":   {"a 1 "},
	} {
		table := strings.Join(fields(ok(t, ctx, append(strings.Fields(args), "-n", namespace)...)), "\n")
		for _, text := range want {
			if !strings.Contains(table, text) {
				t.Errorf("%s: no %q in\n%s", args, text, table)
			}
		}
	}
}

func TestGet_Time_IsTheStateOfThatTime(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.Namespace(t, ctx, api, harness.NewName("time"))
	first := harness.Must[harness.Object](t)(api.Create(ctx, maps(namespace), configMap("a", nil, object{"x": "1"})))
	at := timeOf(t, ctx, harness.Revision(t, first.Metadata.ResourceVersion))
	second := harness.Must[harness.Object](t)(api.Patch(ctx, maps(namespace)+"/a", `{"data":{"x":"2"}}`))
	later := timeOf(t, ctx, harness.Revision(t, second.Metadata.ResourceVersion))
	for moment, want := range map[time.Time]string{at: "1", later: "2"} {
		if got := ok(t, ctx, "get", "cm/a", "-n", namespace, "--at", moment.Format(time.RFC3339Nano), "-o", "jsonpath={.data.x}"); got != want {
			t.Errorf("at %v: %s, want %s", moment, got, want)
		}
	}
	if got := ok(t, ctx, "get", "cm/a", "-n", namespace, "--at", "0s", "-o", "jsonpath={.data.x}"); got != "2" {
		t.Errorf("now: %s", got)
	}
	fails(t, ctx, server, []string{"read configmaps at 100h", "has observed times since"}, "get", "cm", "--at", "100h")
	for _, args := range [][]string{{"diff", "cm"}, {"log", "cm/a"}, {"replay", "cm", "--speed=max"}, {"replay", "--speed=max"}} {
		r := run(t, ctx, server, append(args, "-n", namespace, "--since", "100h")...)
		if r.Code != 0 || r.Stdout == "" || !strings.Contains(r.Stderr, "--since 100h reaches further back than the readable revisions of ") {
			t.Errorf("history %s since 100h: exit code %d, standard output of %d bytes, standard error %q", strings.Join(args, " "), r.Code, len(r.Stdout), r.Stderr)
		}
	}
	fails(t, ctx, server, []string{"read the resources at 2020-01-01T00:00:00Z: the server has observed times since"}, "replay", "--since", "2020-01-01T00:00:00Z")
	fails(t, ctx, server, []string{"is in the future"}, "get", "cm", "--at", time.Now().Add(time.Hour).Format(time.RFC3339))
}

// change is a part of the results of diff and log.
type change struct {
	Object, Change, Revision string
	Time                     time.Time
	Versions                 int
	Managers                 []struct{ Name, Operation string }
	Fields                   []struct {
		Field         string
		Before, After any
		Revision      string
	}
}

func (c change) String() string {
	text := c.Change + " " + c.Object
	for _, m := range c.Managers {
		text += " by " + m.Name
	}
	for _, f := range c.Fields {
		if !strings.HasPrefix(f.Field, "metadata.uid") && f.Field != "metadata.creationTimestamp" {
			text += fmt.Sprintf(" %s:%v->%v", f.Field, f.Before, f.After)
		}
	}
	return text
}

func texts(changes []change) (all []string) {
	for _, c := range changes {
		all = append(all, c.String())
	}
	return all
}

// ofA returns the resource version of the ConfigMap a, "" without it. That of the list may be
// newer: servers renew their leases between a write and the list after it.
func ofA(s state) string {
	for _, item := range s.items {
		if metadata := item.(object)["metadata"].(object); metadata["name"] == "a" {
			return metadata["resourceVersion"].(string)
		}
	}
	return ""
}

func TestDiff_TwoRevisions_HasChangedFields(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("diff")
	states := story(t, ctx, namespace)
	diff := func(from, to int, more ...string) []change {
		t.Helper()
		return decoded[struct{ Items []change }](t, ctx, append([]string{"diff", "configmaps", "-n", namespace,
			"--since-revision", fmt.Sprint(states[from].revision), "--until-revision", fmt.Sprint(states[to].revision)}, more...)...).Items
	}
	last := len(states) - 1
	for _, c := range []struct {
		from, to int
		args     []string
		want     []string
	}{
		{0, 2, nil, []string{"added configmap/a", "added configmap/c"}},
		{1, 4, nil, []string{"changed configmap/a data.x:1->2 data.y:1-><nil> data.z:<nil>->new metadata.labels:<nil>->map[app:web]", "added configmap/c"}},
		{4, 5, nil, []string{"deleted configmap/a"}},
		{2, last, nil, []string{"replaced configmap/a data.x:1->again data.y:1-><nil> metadata.labels:<nil>->map[app:web]", "added configmap/b", "deleted configmap/c"}},
		{3, 3, nil, nil},
		{0, last, []string{"-l", "app=web"}, []string{"added configmap/a"}},
	} {
		if got := texts(diff(c.from, c.to, c.args...)); !slices.Equal(got, c.want) {
			t.Errorf("diff from %d to %d %v:\n%s\nwant\n%s", c.from, c.to, c.args, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
	// Each field has the revision of its last change.
	for _, f := range diff(1, 4)[0].Fields {
		want := 3
		if f.Field == "data.y" || f.Field == "metadata.labels" {
			want = 4
		}
		if f.Revision != ofA(states[want]) {
			t.Errorf("%s has revision %s, want %s", f.Field, f.Revision, ofA(states[want]))
		}
	}
	table := fields(ok(t, ctx, "diff", "cm/a", "-n", namespace, "--since-revision", fmt.Sprint(states[1].revision), "--until-revision", fmt.Sprint(states[3].revision)))
	if !strings.HasPrefix(table[0], "CHANGE NAMESPACE OBJECT REVISION TIME FIELD BEFORE AFTER") || len(table) != 3 || !strings.HasSuffix(table[1], ` data.x "1" "2"`) {
		t.Errorf("table\n%s", strings.Join(table, "\n"))
	}
	if got := ok(t, ctx, "diff", "cm", "-n", namespace, "--since-revision", fmt.Sprint(states[4].revision), "-o", "name"); got != "configmap/a\nconfigmap/b\nconfigmap/c\n" {
		t.Errorf("names %q", got)
	}
	fails(t, ctx, server, []string{"the window is empty"}, "diff", "cm", "--since-revision", fmt.Sprint(states[4].revision), "--until-revision", fmt.Sprint(states[1].revision))
}

func TestLog_Object_HasItsVersionsAndManagers(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("log")
	states := story(t, ctx, namespace)
	log := decoded[struct{ Items []change }](t, ctx, "log", "configmap/a", "-n", namespace).Items
	want := []string{
		"created configmap/a by creator",
		"changed configmap/a by editor data.x:1->2 data.z:<nil>->new",
		"changed configmap/a by labeller data.y:1-><nil> metadata.labels:<nil>->map[app:web]",
		"deleted configmap/a",
		"created configmap/a by creator",
	}
	if got := texts(log); !slices.Equal(got, want) {
		t.Fatalf("log\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for i, of := range []int{1, 3, 4, 5, 6} {
		revision := ofA(states[of])
		if n, err := strconv.ParseInt(log[i].Revision, 10, 64); revision == "" && err == nil && states[of-1].revision < n && n <= states[of].revision {
			revision = log[i].Revision // a deletion: servers renew leases between it and the list
		}
		if log[i].Revision != revision || log[i].Time.IsZero() {
			t.Errorf("version %d has revision %s and time %v, want revision %q", i, log[i].Revision, log[i].Time, revision)
		}
	}
	log = decoded[struct{ Items []change }](t, ctx, "log", "cm", "a", "-n", namespace, "--since-revision", fmt.Sprint(states[3].revision), "--until-revision", fmt.Sprint(states[4].revision)).Items
	if got := texts(log); len(got) != 2 || !strings.HasPrefix(got[0], "present configmap/a by") || !strings.Contains(got[0], "editor") || !strings.HasPrefix(got[1], "changed") {
		t.Errorf("log of a window\n%s", strings.Join(got, "\n"))
	}
	fails(t, ctx, server, []string{"configmap/none did not exist", "check the name"}, "log", "cm/none", "-n", namespace)
	fails(t, ctx, server, []string{"give the name of an object", "(see strata history log --help)"}, "log", "cm", "-n", namespace)
}

func TestTop_Reads_AreCountedBySource(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	states := story(t, ctx, harness.NewName("top"))
	ok(t, ctx, "get", "cm", "-A", "--at-revision", fmt.Sprint(states[0].revision))
	top := decoded[struct {
		Items []struct {
			Resource                                     string
			Objects, Bytes, ReadsFromMemory, ReadsOfPast int
		}
	}](t, ctx, "top")
	for _, u := range top.Items {
		if u.Resource == "configmaps" && u.Objects > 0 && u.Bytes > 0 && u.ReadsFromMemory > 0 && u.ReadsOfPast > 0 {
			table := fields(ok(t, ctx, "top", "--count=2", "--interval=1ms", "--sort-by=reads"))
			if table[0] != "RESOURCE OBJECTS BYTES LAG WATCHERS MEMORY PAST ETCD HIT READS/S" {
				t.Errorf("table\n%s", strings.Join(table, "\n"))
			}
			return
		}
	}
	t.Errorf("top %+v", top.Items)
}
