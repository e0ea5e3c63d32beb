package history

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/jsonmergepatch"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/internal/progress"
)

// parallelReads bounds the resources that are read at once. Most reads wait for a bookmark.
const parallelReads = 24

// recorded is an event of a window.
type recorded struct {
	window
	event
	at time.Time // zero if the server does not know it
}

// commonWindows returns the windows of the targets, with the same revisions. With skip, targets without history, or that the user may
// not list, are left out, with a note.
func (c *client) commonWindows(ctx context.Context, ts []target, since, until *moment, skip bool) ([]window, error) {
	found := make([]*window, len(ts))
	var forbidden names
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(parallelReads)
	for i, t := range ts {
		group.Go(func() error {
			times, err := c.times(groupCtx, t)
			if skip && apierrors.IsForbidden(err) {
				forbidden.add(t.resource())
				return nil
			}
			if skip && (errors.Is(err, errNoHistory) || apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err)) {
				fmt.Fprintf(c.errOut, "Left out: %s\n", message(err, checkServer))
				return nil
			}
			found[i] = &window{target: t, times: times}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	var all []window
	for _, w := range found {
		if w != nil {
			all = append(all, *w)
		}
	}
	left := forbidden.sorted()
	switch {
	case len(all) == 0 && len(left) > 0:
		return nil, fmt.Errorf("read the history of %d resources: the user may list none of them at %s; name resources that the user may list and watch", len(ts), c.config.Host)
	case len(all) == 0:
		return nil, fmt.Errorf("read the history of %d resources: %w of any of them at %s; use a server of `strata apiserver` or `strata up`", len(ts), errNoHistory, c.config.Host)
	case len(left) > 0:
		fmt.Fprintf(c.errOut, "Left out, because the user may not list them: %s\n", strings.Join(left, ", "))
	}
	since.fix(all[0].times.Now)
	until.fix(all[0].times.Now)
	from := slices.MaxFunc(all, func(a, b window) int { return int(a.times.Oldest - b.times.Oldest) }).times.Oldest
	named := func(i int) string { // the resource of a message: one that the user has named
		if skip {
			return "the resources"
		}
		return all[i].resource()
	}
	from, capped, err := since.begin(named(0), all[0].times, from)
	if err != nil {
		return nil, err
	}
	if capped {
		since.noteCapped(c.errOut, "the resources", stampOf(all[0].times, from))
		since.time = time.Time{} // a replay begins with the first time that the server knows
	}
	to, err := until.in(named(0), all[0].times, all[0].times.Latest)
	if err != nil {
		return nil, err
	}
	if from > to {
		return nil, fmt.Errorf("the window is empty: it begins at %s, after its end, %s; exchange --since and --until",
			stampOf(all[0].times, from), stampOf(all[0].times, to))
	}
	for i := range all {
		if from < all[i].times.Oldest {
			return nil, fmt.Errorf("read %s from %s: %w", named(i), stampOf(all[0].times, from), all[i].times.Check(from))
		}
		all[i].from, all[i].to = from, to
	}
	return all, nil
}

// names collects names. Its methods may be called concurrently.
type names struct {
	mu  sync.Mutex
	all []string
}

func (n *names) add(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, name)
}

func (n *names) sorted() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(slices.Values(n.all))
}

// collect returns the events of windows with common revisions, in order.
func (c *client) collect(ctx context.Context, windows []window, shown *progress.Steps) ([]recorded, error) {
	shown.Next("reading the events of %d resources after revision %d", len(windows), windows[0].from)
	events := make([][]recorded, len(windows))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelReads)
	for i, w := range windows {
		group.Go(func() error {
			return c.events(ctx, w.target, w.from, w.to, func(e event) error {
				shown.Add(1)
				r := recorded{window: w, event: e}
				if s := stampOf(windows[0].times, e.revision); s.Time != nil {
					r.at, _ = windows[0].times.TimeOf(e.revision)
					if r.at.IsZero() {
						r.at = windows[0].times.Now
					}
				}
				events[i] = append(events[i], r)
				return nil
			})
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	all := slices.Concat(events...)
	slices.SortStableFunc(all, func(a, b recorded) int { return int(a.revision - b.revision) })
	return all, nil
}

// recorder writes kwok's recording format: YAML documents of objects, then of ResourcePatches. Timestamps are relative to the
// beginning. See docs/history.md.
type recorder struct {
	w       io.Writer
	base    time.Time
	objects map[recordedKey]map[string]any // the newest contents
	elapsed time.Duration                  // of the last patch
	written int
}

type recordedKey struct {
	resource string
	types.NamespacedName
}

const (
	patchKind       = "ResourcePatch"
	patchAPIVersion = "action.kwok.x-k8s.io/v1alpha1"
	// patchStep separates patches: kwok sorts them by their durations, and does not keep the order of equal ones.
	patchStep = time.Microsecond
)

func newRecorder(w io.Writer, base time.Time) *recorder {
	return &recorder{w: w, base: base, objects: map[recordedKey]map[string]any{}}
}

// contents returns an object as it is recorded: without its resource version.
func contents(o *unstructured.Unstructured) map[string]any {
	o = o.DeepCopy()
	o.SetResourceVersion("")
	return o.Object
}

// object writes an object of the beginning.
func (r *recorder) object(t target, o *unstructured.Unstructured) error {
	body := contents(o)
	r.objects[recordedKey{t.resource(), nameOf(o)}] = body
	return r.document(r.relative(body, "").(map[string]any))
}

// event writes an event.
func (r *recorder) event(e recorded) error {
	elapsed := r.elapsed + patchStep
	if !e.at.IsZero() {
		elapsed = max(elapsed, e.at.Sub(r.base))
	}
	r.elapsed = elapsed
	gvr := e.mapping.Resource
	target := map[string]any{"name": e.object.GetName()}
	if namespace := e.object.GetNamespace(); namespace != "" {
		target["namespace"] = namespace
	}
	resource := map[string]any{"version": gvr.Version, "resource": gvr.Resource}
	if gvr.Group != "" {
		resource["group"] = gvr.Group
	}
	doc := map[string]any{"kind": patchKind, "apiVersion": patchAPIVersion, "resource": resource, "target": target,
		"durationNanosecond": int64(elapsed)}
	key := recordedKey{e.resource(), nameOf(e.object)}
	before := r.objects[key]
	after := contents(e.object)
	switch {
	case e.kind == "DELETED":
		delete(r.objects, key)
		doc["method"] = "delete"
	case before == nil:
		r.objects[key] = after
		doc["method"], doc["template"] = "create", r.relative(after, "")
	default:
		r.objects[key] = after
		patch, err := patchOf(before, after, e.object)
		if err != nil {
			return fmt.Errorf("record %s/%s at revision %d: %w", e.kindName(), e.object.GetName(), e.revision, err)
		}
		doc["method"], doc["template"] = "patch", r.relative(patch, "")
	}
	return r.document(doc)
}

func (r recorded) kindName() string { return r.target.kind() }

// patchOf returns the strategic merge patch between two states; of kinds without Go type a JSON merge patch, which is the same without
// keys of lists.
func patchOf(before, after map[string]any, object *unstructured.Unstructured) (map[string]any, error) {
	original, err := json.Marshal(before)
	if err != nil {
		return nil, err
	}
	modified, err := json.Marshal(after)
	if err != nil {
		return nil, err
	}
	var data []byte
	if typed, newErr := scheme.Scheme.New(object.GroupVersionKind()); newErr == nil {
		data, err = strategicpatch.CreateTwoWayMergePatch(original, modified, typed)
	} else {
		data, err = jsonmergepatch.CreateThreeWayJSONMergePatch(original, modified, original)
	}
	if err != nil {
		return nil, err
	}
	patch := map[string]any{}
	return patch, json.Unmarshal(data, &patch)
}

// verbatim are the fields whose values are the user's: timestamps in them are text.
var verbatim = map[string]bool{"data": true, "binaryData": true, "stringData": true, "metadata.annotations": true, "metadata.labels": true}

// relative returns a copy of a value, in which timestamps are distances to the beginning, in the form that kwok replaces when it replays.
func (r *recorder) relative(v any, path string) any {
	if verbatim[path] {
		return v
	}
	switch v := v.(type) {
	case map[string]any:
		result := make(map[string]any, len(v))
		for key, value := range v {
			result[key] = r.relative(value, below(path, key))
		}
		return result
	case []any:
		result := make([]any, len(v))
		for i, value := range v {
			result[i] = r.relative(value, path+"[]")
		}
		return result
	case string:
		if t, err := time.Parse(time.RFC3339Nano, v); err == nil {
			return "$(time-offset-nanosecond " + strconv.FormatInt(int64(t.Sub(r.base)), 10) + ")"
		}
	}
	return v
}

// offsetValue matches the distances in a document. kwok replaces them in the text, by timestamps, which need quotes.
var offsetValue = regexp.MustCompile(`(?m)(: |- )(\$\(time-offset-nanosecond -?\d+\))$`)

func (r *recorder) document(doc map[string]any) error {
	data, err := yaml.Marshal(doc)
	if err != nil {
		return err
	}
	data = offsetValue.ReplaceAll(data, []byte(`$1"$2"`))
	if r.written++; r.written > 1 {
		data = slices.Concat([]byte("---\n"), data)
	}
	_, err = io.Copy(r.w, bytes.NewReader(data))
	return err
}
