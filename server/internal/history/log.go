package history

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/server/internal/cli"
)

// The changes of versions, besides deleted and changed.
const (
	created = "created"
	present = "present" // the version at the beginning of the window
)

// version is one version of an object, or its deletion.
type version struct {
	Object    string `json:"object"`
	Namespace string `json:"namespace,omitempty"`
	stamp
	Change   string    `json:"change"`
	Managers []manager `json:"managers,omitempty"`
	// Fields are the changes to the version before.
	Fields []fieldChange `json:"fields,omitempty"`
}

// manager is a writer of a version, from metadata.managedFields.
type manager struct {
	Name        string `json:"name"`
	Operation   string `json:"operation"`
	Subresource string `json:"subresource,omitempty"`
}

func (m manager) String() string {
	if m.Subresource != "" {
		return m.Name + " (" + m.Subresource + ")"
	}
	return m.Name
}

// logResult is the result of log.
type logResult struct {
	metav1.TypeMeta
	Items []version `json:"items"`
}

type logOptions struct {
	*base
	output
	since, until moment
}

func (b *base) logCommand() *cobra.Command {
	o := &logOptions{base: b}
	cmd := &cobra.Command{
		Use:   "log TYPE/NAME... | TYPE NAME...",
		Short: "Print every version of an object, its manager and its changed fields",
		Long: `Print every version of an object in the window: when it was written, by which manager, and the fields that it changed.
The manager is the one of metadata.managedFields whose entry the version changed; of a version that changed none, the manager of its
changed fields. A deletion has no manager. Without --since, the log begins at the oldest revision.`,
		Example: `  {program} log configmap/settings
  {program} log deployment web --since 10m -o wide
  {program} log pod/a pod/b --since-revision 5310 -o json`,
		ValidArgsFunction: b.completeResources,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	windowFlags(cmd, &o.since, &o.until)
	o.output.addFlag(cmd)
	return cmd
}

func (o *logOptions) run(ctx context.Context, args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	c, shown, err := o.begin()
	if err != nil {
		return err
	}
	defer shown.Stop()
	ts, err := c.targets(args, selection{})
	if err != nil {
		return err
	}
	result := logResult{TypeMeta: typeOf("HistoryLog")}
	for _, t := range ts {
		if t.name == "" {
			return cli.Misusef("log of all %s: give the name of an object, such as %s/NAME; diff and replay take whole resources", t, t.kind())
		}
		w, err := c.window(ctx, t, &o.since, &o.until)
		if err != nil {
			return err
		}
		versions, err := c.log(ctx, w, shown)
		if err != nil {
			return err
		}
		if len(versions) == 0 {
			return fmt.Errorf("%s did not exist%s from %s to %s; check the name and --namespace, or begin earlier with --since",
				t, t.where(), stampOf(w.times, w.from), stampOf(w.times, w.to))
		}
		result.Items = append(result.Items, versions...)
	}
	shown.Stop()
	return o.printLog(result, len(ts) > 1)
}

// log returns the versions of a window of one object, in order. The first one is that at the
// beginning, if there was one.
func (c *client) log(ctx context.Context, w window, shown *statusline.Steps) ([]version, error) {
	shown.Next("reading the versions of %s after revision %d", w.target, w.from)
	objects, err := c.objects(ctx, w.target, w.from, shown)
	if err != nil {
		return nil, err
	}
	var versions []version
	var last *unstructured.Unstructured
	if len(objects) > 0 {
		last = objects[0]
		revision, err := strconv.ParseInt(last.GetResourceVersion(), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("log %s: resource version %q: %w", w.target, last.GetResourceVersion(), err)
		}
		versions = append(versions, version{Change: present, stamp: stampOf(w.times, revision), Managers: latestManagers(last)})
	}
	err = c.events(ctx, w.target, w.from, w.to, func(e event) error {
		shown.Add(1)
		versions = append(versions, versionOf(last, e, stampOf(w.times, e.revision)))
		if last = e.object; e.kind == "DELETED" {
			last = nil
		}
		return nil
	})
	for i := range versions {
		versions[i].Object, versions[i].Namespace = w.target.String(), w.namespace
	}
	return versions, err
}

// versionOf returns the version that an event made of the one before, which is nil if there was
// none.
func versionOf(before *unstructured.Unstructured, e event, at stamp) version {
	v := version{Change: changed, stamp: at}
	switch {
	case e.kind == "DELETED":
		v.Change = deleted
		return v
	case before == nil:
		v.Change = created
		v.Managers = latestManagers(e.object)
		return v
	}
	v.Fields = compare(before.Object, e.object.Object)
	v.Managers = changedManagers(before.GetManagedFields(), e.object.GetManagedFields(), v.Fields)
	return v
}

func managerOf(entry metav1.ManagedFieldsEntry) manager {
	return manager{entry.Manager, string(entry.Operation), entry.Subresource}
}

// latestManagers returns the managers with the newest time.
func latestManagers(o *unstructured.Unstructured) (managers []manager) {
	var latest time.Time
	for _, entry := range o.GetManagedFields() {
		if entry.Time == nil {
			continue
		}
		if entry.Time.After(latest) {
			latest, managers = entry.Time.Time, nil
		}
		if entry.Time.Time.Equal(latest) {
			managers = append(managers, managerOf(entry))
		}
	}
	return managers
}

// changedManagers returns the managers that wrote a version. The API server gives the entry of a
// writer a new time, which has whole seconds. So the writer has an entry that is new or has another
// time. Within the same second, it is the owner of a changed field, of entries with other fields
// first; or, if it has removed a field, the manager whose entry has other fields.
func changedManagers(before, after []metav1.ManagedFieldsEntry, changes []fieldChange) []manager {
	var timed, gained, owning, other []manager
	for _, entry := range after {
		i := slices.IndexFunc(before, func(e metav1.ManagedFieldsEntry) bool {
			return managerOf(e) == managerOf(entry) && e.APIVersion == entry.APIVersion
		})
		m := managerOf(entry)
		if i < 0 || !before[i].Time.Equal(entry.Time) {
			timed = append(timed, m)
			continue
		}
		owner := slices.ContainsFunc(changes, func(c fieldChange) bool { return owns(entry, c.Field) })
		differs := before[i].FieldsV1.GetRawString() != entry.FieldsV1.GetRawString()
		switch {
		case owner && differs:
			gained = append(gained, m)
		case owner:
			owning = append(owning, m)
		case differs:
			other = append(other, m)
		}
	}
	for _, managers := range [][]manager{timed, gained, owning, other} {
		if len(managers) > 0 {
			return managers
		}
	}
	return nil
}

// owns reports whether an entry has a field, or the list or atomic value that it is in.
func owns(entry metav1.ManagedFieldsEntry, field string) bool {
	set := map[string]any{}
	if json.Unmarshal(entry.FieldsV1.GetRawBytes(), &set) != nil {
		return false
	}
	for _, key := range keys(field) {
		next, ok := set["f:"+key].(map[string]any)
		if !ok {
			for sibling := range set {
				if strings.HasPrefix(sibling, "f:") {
					return false
				}
			}
			return true
		}
		set = next
	}
	return true
}

// keys splits the path of a field; a part in brackets is one key.
func keys(field string) []string {
	inside := false
	return strings.FieldsFunc(field, func(r rune) bool {
		if r == '[' || r == ']' {
			inside = r == '['
			return true
		}
		return r == '.' && !inside
	})
}

func (o *logOptions) printLog(result logResult, several bool) error {
	t := &table{header: []string{"REVISION", "TIME", "CHANGE", "MANAGER", "FIELD", "BEFORE", "AFTER"}}
	if several {
		t.header = append([]string{"OBJECT"}, t.header...)
	}
	var names []string
	for _, v := range result.Items {
		names = append(names, v.Object)
		managers := make([]string, len(v.Managers))
		for i, m := range v.Managers {
			managers[i] = m.String()
			if o.wide() {
				managers[i] += " " + m.Operation
			}
		}
		begin := []string{fmt.Sprint(v.Revision), v.when(), v.Change, cell(strings.Join(managers, ", "), true)}
		if several {
			begin = append([]string{v.Object}, begin...)
		}
		if len(v.Fields) == 0 {
			t.add(colourOf(v.Change), append(begin, "", "", "")...)
		}
		for _, f := range v.Fields {
			t.add(colourOf(v.Change), append(slices.Clone(begin), cell(f.Field, o.wide()), cell(value(f.Before), o.wide()), cell(value(f.After), o.wide()))...)
		}
	}
	return o.output.print(o.Out, result, slices.Compact(names), t)
}
