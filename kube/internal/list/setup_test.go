package list

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// fixture is the lists of pods in memory. It can run in a synctest bubble. Its resource has the
// name of the test as its group, so that its metrics are those of the test.
type fixture struct {
	*podtest.Cluster
	env   *Env
	group schema.GroupResource
	kv    *podtest.KV // of upstream's store, and of lists that are older than memory
}

// options of a fixture.
type options struct {
	podtest.Options
	eventsOnly bool            // see freshness.New
	unchunked  bool            // the gate APIListChunking is off
	eager      map[string]bool // see index.Config
	onEtcdRead func() error    // called before each read through fixture.kv; nil does nothing
}

func newFixture(t testing.TB, change ...func(*options)) *fixture {
	t.Helper()
	f := &fixture{group: schema.GroupResource{Group: t.Name(), Resource: "pods"}}
	var o options
	f.Cluster = podtest.New(t, func(of *podtest.Options) {
		o.Options = *of
		o.Config.GroupResource = f.group
		for _, c := range change {
			c(&o)
		}
		*of = o.Options
	})
	ctx, cancel := context.WithCancel(context.Background())
	var goroutines watchset.Group
	lists, watches := metrics.NewLists(f.group), metrics.NewWatches(f.group)
	logger := slog.New(slog.NewTextHandler(io.Discard, nil))
	selections := index.New(index.Config{
		Resource: f.Resource, View: f.View, Blocks: f.Blocks, Context: ctx, Logger: logger, Start: goroutines.Start, Eager: o.eager,
		Unindexed: watches.Unindexed, Filtered: watches.Filtered, Read: lists.Read, Refused: lists.IndexRefused, Measured: lists.Indexes,
	})
	f.kv = podtest.NewKV(f.Etcd, o.onEtcdRead)
	tokens := pages.NewTokens(f.kv, podtest.Prefix, pages.TokenOptions{Logger: logger})
	f.env = &Env{
		Mirror: f.Mirror, Memory: f.Resource,
		Fresh: freshness.New(f.Mirror, f.Resource, f.group, o.eventsOnly), View: f.View, Selections: selections,
		Keys:    pages.Keys{PathPrefix: podtest.Prefix, ResourcePrefix: "/pods/"},
		Pages:   pages.New(f.group, tokens, !o.unchunked),
		Etcd:    f.Upstream(t, f.kv),
		Past:    etcdread.Reader{Places: make(etcdread.Places, 2), Ranges: f.kv, Mirror: f.Mirror, Group: f.group, Keep: KeepBytes},
		Metrics: lists,
		Gates:   Gates{Latest: true, AtRevision: true, UnsafeDelete: o.UnsafeDelete},
	}
	t.Cleanup(func() {
		cancel()
		goroutines.End()
		selections.EndShards()
		selections.DropIndexes()
		tokens.Close()
	})
	return f
}

// olderThanMemory makes memory drop the revisions so far, except for the newest. etcd keeps them.
func (f *fixture) olderThanMemory(t testing.TB) {
	t.Helper()
	f.CatchUp(t)
	now := f.Mirror.PublishedRevision()
	f.Mirror.Compact(now)
	podtest.Eventually(t, "the mirror compacts its history", func() bool { return f.Mirror.Stats().Compacted >= now })
}

// getList is Env.GetList, again while memory is late.
func (f *fixture) getList(ctx context.Context, key string, opts storage.ListOptions, out runtime.Object) error {
	err := f.env.GetList(ctx, key, opts, out)
	for n := 0; apierrors.IsTooManyRequests(err) && n < 10; n++ {
		err = f.env.GetList(ctx, key, opts, out)
	}
	return err
}

// list returns the pods that the options select.
func (f *fixture) list(t testing.TB, key string, opts storage.ListOptions) *example.PodList {
	t.Helper()
	out := &example.PodList{}
	if err := f.getList(podtest.Context(t), key, opts, out); err != nil {
		t.Fatalf("list %s: %v", describe(opts), err)
	}
	return out
}

// read resolves a list of all pods, which ends with the test.
func (f *fixture) read(t testing.TB, opts storage.ListOptions) *Read {
	t.Helper()
	ctx := podtest.Context(t)
	r, err := f.env.Read(ctx, "/pods/", opts)
	for n := 0; apierrors.IsTooManyRequests(err) && n < 10; n++ {
		r, err = f.env.Read(ctx, "/pods/", opts)
	}
	if err != nil {
		t.Fatalf("read %s: %v", describe(opts), err)
	}
	t.Cleanup(r.Close)
	return r
}

// everything is a list of all pods, linearizable.
func everything() storage.ListOptions {
	return storage.ListOptions{Recursive: true, Predicate: storage.Everything}
}

// selecting is a list of the pods that a selector selects.
func selecting(pred storage.SelectionPredicate) storage.ListOptions {
	return storage.ListOptions{Recursive: true, Predicate: pred}
}

// exactly makes the list one at a revision.
func exactly(opts storage.ListOptions, rev mirror.Revision) storage.ListOptions {
	opts.ResourceVersion, opts.ResourceVersionMatch = strconv.FormatInt(rev, 10), metav1.ResourceVersionMatchExact
	return opts
}

// limited makes the list a page of at most limit pods.
func limited(opts storage.ListOptions, limit int64) storage.ListOptions {
	opts.Predicate.Limit = limit
	return opts
}

// continued makes the list continue at a token.
func continued(opts storage.ListOptions, token string) storage.ListOptions {
	opts.ResourceVersion, opts.ResourceVersionMatch, opts.Predicate.Continue = "", "", token
	return opts
}

// token returns a token that continues after a pod of the namespace ns.
func token(t testing.TB, after string, rev mirror.Revision) string {
	t.Helper()
	token, err := storage.EncodeContinue(podtest.Key(podtest.Pod(after))+"\x00", podtest.Root, rev)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// describe returns the options for the message of a failure.
func describe(opts storage.ListOptions) string {
	p := &opts.Predicate
	return fmt.Sprintf("labels %q, fields %q, version %q %s, limit %d, continue %q", p.Label, p.Field, opts.ResourceVersion, opts.ResourceVersionMatch, p.Limit, p.Continue)
}

// names returns the names of the pods of a list.
func names(list *example.PodList) string {
	var all []string
	for i := range list.Items {
		all = append(all, list.Items[i].Name)
	}
	return strings.Join(all, " ")
}

// paths returns the namespaces and names of the pods of a list.
func paths(list *example.PodList) (all []string) {
	for i := range list.Items {
		all = append(all, list.Items[i].Namespace+"/"+list.Items[i].Name)
	}
	return all
}

// code returns the HTTP code of an error of the API, 0 for another error or none.
func code(err error) int {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return int(status.Status().Code)
	}
	return 0
}

// outcome names the way in which a list was answered: from memory or from etcd and the revision, or
// the error.
func (f *fixture) outcome(r *Read, err error) string {
	var needed *etcdread.Needed
	switch {
	case errors.As(err, &needed):
		return "needs etcd: " + needed.Reason
	case err != nil && code(err) == 0:
		return "error"
	case code(err) == http.StatusGatewayTimeout && storage.IsTooLargeResourceVersion(err):
		return "too large: 504"
	case err != nil:
		return strconv.Itoa(code(err))
	}
	defer r.Close()
	switch {
	case r.FromEtcd():
		return fmt.Sprintf("etcd@%d", r.Rev)
	case r.Rev != r.Snapshot.Rev:
		return fmt.Sprintf("memory@%d, snapshot of %d", r.Rev, r.Snapshot.Rev)
	}
	return fmt.Sprintf("memory@%d", r.Rev)
}

// series returns the value of a metric of the fixture's resource, 0 if there is none.
func (f *fixture) series(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	n, _ := podtest.Series(t, name, f.group, labels...)
	return n
}
