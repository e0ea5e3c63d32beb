package history

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/revisiontimes"
)

// The changes of objects.
const (
	added    = "added"
	deleted  = "deleted"
	changed  = "changed"
	replaced = "replaced" // deleted and created again
)

// objectDiff is the difference of one object between two revisions.
type objectDiff struct {
	Object    string `json:"object"` // as kubectl prints names: deployment.apps/web
	Namespace string `json:"namespace,omitempty"`
	Change    string `json:"change"`
	// The last change, and the number of versions that were written, deletions included.
	stamp
	Versions int         `json:"versions"`
	Fields   []fieldDiff `json:"fields,omitempty"` // of changed and replaced objects
}

// fieldDiff is a changed field with the last revision that changed it.
type fieldDiff struct {
	fieldChange
	stamp
}

// diffResult is the result of diff.
type diffResult struct {
	metav1.TypeMeta
	From  stamp        `json:"from"`
	To    stamp        `json:"to"`
	Items []objectDiff `json:"items"`
}

type diffOptions struct {
	*base
	selection
	output
	since, until moment
}

func (b *base) diffCommand() *cobra.Command {
	o := &diffOptions{base: b}
	cmd := &cobra.Command{
		Use:   "diff TYPE[,TYPE...] [NAME...] | TYPE/NAME...",
		Short: "Print which objects have changed, field by field",
		Long: `Print the objects that were added, deleted or changed between two times or revisions, and their changed fields with the last
revision that changed each. A deleted object that was created again is replaced.
metadata.managedFields and metadata.resourceVersion are left out. Without --since, the difference begins at the oldest revision.`,
		Example: `  {program} diff deployments --since 10m
  {program} diff configmap/settings --since-revision 5310 --until-revision 5400
  {program} diff pods -A --since 1h --until 30m -o wide`,
		ValidArgsFunction: b.completeResources,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	windowFlags(cmd, &o.since, &o.until)
	o.selection.addFlags(cmd.Flags())
	o.output.addFlag(cmd)
	return cmd
}

// windowFlags adds the flags of a window.
func windowFlags(cmd *cobra.Command, since, until *moment) {
	momentFlags(cmd.Flags(), since, "since", "begin in the past, by default at the oldest revision")
	momentFlags(cmd.Flags(), until, "until", "end in the past, by default at the newest revision")
	cmd.MarkFlagsMutuallyExclusive("since", "since-revision")
	cmd.MarkFlagsMutuallyExclusive("until", "until-revision")
}

// window is a target between two of its revisions.
type window struct {
	target
	times    *revisiontimes.RevisionTimes
	from, to int64
}

// windows returns the windows of the targets.
func (c *client) windows(ctx context.Context, ts []target, since, until *moment) ([]window, error) {
	var all []window
	for _, t := range ts {
		w, err := c.window(ctx, t, since, until)
		if err != nil {
			return nil, err
		}
		all = append(all, w)
	}
	return all, nil
}

func (c *client) window(ctx context.Context, t target, since, until *moment) (window, error) {
	times, err := c.times(ctx, t)
	if err != nil {
		return window{}, err
	}
	w := window{target: t, times: times}
	var capped bool
	if w.from, w.to, capped, err = span(t.resource(), times, times.Oldest, since, until); err != nil {
		return window{}, err
	}
	if capped {
		since.noteCapped(c.errOut, t.resource(), stampOf(times, w.from))
	}
	return w, nil
}

// span returns the first and the last revision of a window in a history that is readable from
// oldest on. capped: see moment.begin.
func span(resource string, times *revisiontimes.RevisionTimes, oldest int64, since, until *moment) (from, to int64, capped bool, err error) {
	since.fix(times.Now)
	until.fix(times.Now)
	if from, capped, err = since.begin(resource, times, oldest); err != nil {
		return 0, 0, false, err
	}
	if to, err = until.in(resource, times, times.Latest); err == nil && from > to {
		err = fmt.Errorf("the window is empty: it begins at %s, after its end, %s; exchange --since and --until",
			stampOf(times, from), stampOf(times, to))
	}
	return from, to, capped, err
}

func (o *diffOptions) run(ctx context.Context, args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	c, shown, err := o.begin()
	if err != nil {
		return err
	}
	defer shown.Stop()
	ts, err := c.targets(args, o.selection)
	if err != nil {
		return err
	}
	shown.Next("reading the history of %d resources", len(ts))
	windows, err := c.windows(ctx, ts, &o.since, &o.until)
	if err != nil {
		return err
	}
	result := diffResult{TypeMeta: typeOf("HistoryDiff"), Items: []objectDiff{},
		From: stampOf(windows[0].times, windows[0].from), To: stampOf(windows[0].times, windows[0].to)}
	for _, w := range windows {
		items, err := c.diff(ctx, w, shown)
		if err != nil {
			return err
		}
		result.Items = append(result.Items, items...)
	}
	shown.Stop()
	return o.printDiff(result)
}

// state is an object before and after the events of a window.
type state struct {
	first, last *unstructured.Unstructured // nil if there is none
	revision    int64                      // of the last event
	versions    int
	touched     map[string]int64 // the last revision of each field that an event changed
}

// diff returns the differences of a window, ordered by namespace and name.
func (c *client) diff(ctx context.Context, w window, shown *statusline.Steps) ([]objectDiff, error) {
	shown.Next("reading %s at revision %d", w.target, w.from)
	objects, err := c.objects(ctx, w.target, w.from, shown)
	if err != nil {
		return nil, err
	}
	states := map[types.NamespacedName]*state{}
	for _, object := range objects {
		states[nameOf(object)] = &state{first: object, last: object}
	}
	shown.Next("reading the events of %s after revision %d", w.target, w.from)
	if err := c.events(ctx, w.target, w.from, w.to, func(e event) error {
		shown.Add(1)
		name := nameOf(e.object)
		if states[name] == nil {
			states[name] = &state{}
		}
		states[name].apply(e)
		return nil
	}); err != nil {
		return nil, err
	}
	var diffs []objectDiff
	for name, s := range states {
		if d, differs := s.diff(w.times); differs {
			d.Object, d.Namespace = w.kind()+"/"+name.Name, name.Namespace
			diffs = append(diffs, d)
		}
	}
	slices.SortFunc(diffs, func(a, b objectDiff) int {
		return strings.Compare(a.Namespace+"/"+a.Object, b.Namespace+"/"+b.Object)
	})
	return diffs, nil
}

func nameOf(o *unstructured.Unstructured) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// apply applies an event to a state.
func (s *state) apply(e event) {
	s.revision = e.revision
	s.versions++
	if e.kind == "DELETED" {
		s.last = nil
		return
	}
	before := s.last
	if before == nil {
		before = s.first // created again: the fields that the new object has differently
	}
	if before != nil {
		if s.touched == nil {
			s.touched = map[string]int64{}
		}
		for _, change := range compare(before.Object, e.object.Object) {
			s.touched[change.Field] = e.revision
		}
	}
	s.last = e.object
}

// diff returns the difference between the first and the last state, and whether there is one.
func (s *state) diff(times *revisiontimes.RevisionTimes) (objectDiff, bool) {
	d := objectDiff{stamp: stampOf(times, s.revision), Versions: s.versions}
	switch {
	case s.first == nil && s.last == nil:
		return d, false // it existed in between only
	case s.first == nil:
		d.Change = added
		return d, true
	case s.last == nil:
		d.Change = deleted
		return d, true
	}
	d.Change = changed
	if s.first.GetUID() != s.last.GetUID() {
		d.Change = replaced
	}
	for _, change := range compare(s.first.Object, s.last.Object) {
		revision := int64(0)
		for field, r := range s.touched {
			if within(field, change.Field) || within(change.Field, field) {
				revision = max(revision, r)
			}
		}
		if revision == 0 {
			revision = s.revision
		}
		d.Fields = append(d.Fields, fieldDiff{change, stampOf(times, revision)})
	}
	return d, len(d.Fields) > 0
}

func (o *diffOptions) printDiff(result diffResult) error {
	t := &table{header: []string{"CHANGE", "OBJECT", "REVISION", "TIME", "FIELD", "BEFORE", "AFTER"}}
	namespaced := slices.ContainsFunc(result.Items, func(d objectDiff) bool { return d.Namespace != "" })
	if namespaced {
		t.header = slices.Insert(t.header, 1, "NAMESPACE")
	}
	if o.wide() {
		t.header = append(t.header, "VERSIONS")
	}
	var names []string
	line := func(d objectDiff, cells ...string) {
		cells = append([]string{d.Change, d.Object}, cells...)
		if namespaced {
			cells = slices.Insert(cells, 1, d.Namespace)
		}
		if o.wide() {
			cells = append(cells, fmt.Sprint(d.Versions))
		}
		t.add(colourOf(d.Change), cells...)
	}
	for _, d := range result.Items {
		names = append(names, d.Object)
		if len(d.Fields) == 0 {
			line(d, fmt.Sprint(d.Revision), d.when(), "", "", "")
		}
		for _, f := range d.Fields {
			line(d, fmt.Sprint(f.Revision), f.when(), cell(f.Field, o.wide()), cell(value(f.Before), o.wide()), cell(value(f.After), o.wide()))
		}
	}
	if len(result.Items) == 0 && (o.format == "" || o.wide()) {
		_, err := fmt.Fprintf(o.ErrOut, "No differences from %s to %s.\n", result.From, result.To)
		return err
	}
	return o.output.print(o.Out, result, names, t)
}
