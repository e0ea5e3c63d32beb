package kubestorage

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testetcd"
)

// gates returns the engine's gates as a flag sets them.
func gates(t *testing.T, specs map[featuregate.Feature]featuregate.FeatureSpec, flag string) featuregate.FeatureGate {
	t.Helper()
	g := featuregate.NewFeatureGate()
	utilruntime.Must(g.Add(specs))
	testcheck.NoError(t, g.Set(flag))
	return g
}

// TestSafeguard_EtcdVersion_DecidesReadsFromMemory has the cases of KEP-2340, for a settable gate
// and for a locked one.
func TestSafeguard_EtcdVersion_DecidesReadsFromMemory(t *testing.T) {
	old := fmt.Errorf("endpoint e: %w: version 3.5.12", etcdsource.ErrProgressBug)
	unknown := fmt.Errorf("%w: endpoint e: no answer", etcdsource.ErrVersionUnknown)
	locked := Gates()
	for _, f := range []featuregate.Feature{ConsistentListFromCache, ConsistentGetFromCache} {
		locked[f] = featuregate.FeatureSpec{Default: true, PreRelease: featuregate.GA, LockToDefault: true}
	}
	const list, get = "ConsistentListFromCache", "ConsistentGetFromCache"
	both := latestReads{true, true}
	for _, tt := range []struct {
		name       string
		gates      featuregate.FeatureGate
		versions   error
		want       latestReads
		eventsOnly bool
		aborts     string // names the gate
		warns      bool
	}{
		{name: "new, unset", gates: gates(t, Gates(), ""), want: both},
		{name: "new, off", gates: gates(t, Gates(), list+"=false"), want: latestReads{gets: true}},
		{name: "new, on", gates: gates(t, Gates(), list+"=true,"+get+"=true"), want: both},
		{name: "unknown, unset", gates: gates(t, Gates(), ""), versions: unknown, want: both, warns: true},
		{name: "unknown, off", gates: gates(t, Gates(), get+"=false"), versions: unknown, want: latestReads{lists: true}, warns: true},
		{name: "unknown, on", gates: gates(t, Gates(), list+"=true"), versions: unknown, want: both, warns: true},
		{name: "old, unset", gates: gates(t, Gates(), ""), versions: old, eventsOnly: true, warns: true},
		{name: "old, off", gates: gates(t, Gates(), list+"=false,"+get+"=false"), versions: old, eventsOnly: true, warns: true},
		{name: "old, one off", gates: gates(t, Gates(), list+"=false"), versions: old, eventsOnly: true, warns: true},
		{name: "old, lists on", gates: gates(t, Gates(), list+"=true"), versions: old, aborts: list},
		{name: "old, gets on", gates: gates(t, Gates(), get+"=true"), versions: old, aborts: get},
		{name: "old, one on, one off", gates: gates(t, Gates(), list+"=false,"+get+"=true"), versions: old, aborts: get},
		{name: "old, another gate on", gates: gates(t, Gates(), "ByteReadPath=true"), versions: old, eventsOnly: true, warns: true},
		{name: "old, no gates", versions: old, eventsOnly: true, warns: true},
		{name: "locked, new", gates: gates(t, locked, ""), want: both},
		{name: "locked, unknown", gates: gates(t, locked, ""), versions: unknown, want: both, warns: true},
		{name: "locked, old", gates: gates(t, locked, ""), versions: old, aborts: list},
		{name: "locked and set, old", gates: gates(t, locked, list+"=true"), versions: old, aborts: list},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var log bytes.Buffer
			opts := Options{Gates: tt.gates, Logger: slog.New(slog.NewTextHandler(&log, nil))}
			got, eventsOnly, err := opts.safeguard(tt.versions, []string{"e"})
			if tt.aborts != "" {
				if !errors.Is(err, etcdsource.ErrProgressBug) || !strings.Contains(err.Error(), tt.aborts) || !strings.Contains(err.Error(), "endpoint e") {
					t.Errorf("%v, want that %s is refused and why", err, tt.aborts)
				}
				return
			}
			if err != nil || got != tt.want || eventsOnly != tt.eventsOnly {
				t.Errorf("memory answers %+v, events only %t, %v; want %+v and %t", got, eventsOnly, err, tt.want, tt.eventsOnly)
			}
			if lines := strings.Count(log.String(), "level=WARN"); lines > 1 || (lines == 1) != tt.warns {
				t.Errorf("warnings: %q", log.String())
			}
		})
	}
}

// TestGate_Off_SendsReadsToEtcd: with a gate off etcd answers the reads of the gate, as fresh, and
// memory the others.
func TestGate_Off_SendsReadsToEtcd(t *testing.T) {
	t.Parallel()
	yes := true
	for _, tt := range []struct {
		flag        string
		lists, gets bool // from etcd
	}{
		{"", false, false},
		{"ConsistentListFromCache=false", true, false},
		{"ConsistentGetFromCache=false", false, true},
		{"ConsistentListFromCache=false,ConsistentGetFromCache=false", true, true},
	} {
		t.Run(tt.flag, func(t *testing.T) {
			f := setup(t, withGates(gates(t, Gates(), tt.flag)))
			pod := f.create(t, newPod("a"))[0]
			f.catchUp(t)
			ctx := contextFor(t)
			want := func(what string, fromEtcd bool, read func()) {
				t.Helper()
				got := f.requests.during(read)
				// a GET may go to etcd while the machine is full
				for !fromEtcd && got.Gets > 0 && ctx.Err() == nil {
					got = f.requests.during(read)
				}
				if reads := got.Gets + got.Ranges; (reads > 0) != fromEtcd {
					t.Errorf("%s: requests to etcd %+v, want any: %t", what, got, fromEtcd)
				}
			}
			get := func(rv string) func() {
				return func() {
					out := &example.Pod{}
					if err := f.Get(ctx, podKey(pod), storage.GetOptions{ResourceVersion: rv}, out); err != nil || out.ResourceVersion != pod.ResourceVersion {
						t.Errorf("get at %q: %s, %v", rv, out.ResourceVersion, err)
					}
				}
			}
			list := func(opts storage.ListOptions) func() {
				return func() {
					if got := podNames(f.list(t, opts)); got != "a" {
						t.Errorf("list has %q", got)
					}
				}
			}
			watchAdded := func(opts storage.ListOptions) func() {
				return func() {
					nextPod(t, f.watchPods(t, opts), watch.Added)
				}
			}
			initial := withBookmarks(everything())
			initial.SendInitialEvents = &yes
			want("get", tt.gets, get(""))
			want("get at 0", false, get("0"))
			want("get not older", false, get(pod.ResourceVersion))
			want("list", tt.lists, list(everything()))
			want("list at 0", false, list(afterRevision("0")))
			want("list not older", false, list(afterRevision(pod.ResourceVersion)))
			want("watch", tt.lists, watchAdded(everything()))
			want("watch at 0", false, watchAdded(afterRevision("0")))
			want("initial events", tt.lists, watchAdded(initial))
		})
	}
}

// TestEventsOnly_RevisionNotReached_IsReadFromEtcd: where the published revision moves by events
// only, etcd answers at once the reads at or above a revision that etcd has returned and no event
// has reached.
func TestEventsOnly_RevisionNotReached_IsReadFromEtcd(t *testing.T) {
	t.Parallel()
	f := setup(t, eventsOnly)
	pod := f.create(t, newPod("a"))[0]
	ctx := contextFor(t)
	eventually(t, "memory has the pod", func() bool { return f.cluster.mirror.PublishedRevision() >= parseRevision(t, pod.ResourceVersion) })
	resp, err := f.client.Put(ctx, "/elsewhere", "1")
	testcheck.NoError(t, err)
	rev := fmt.Sprint(resp.Header.Revision)
	if got := f.list(t, everything()); got.ResourceVersion != rev {
		t.Fatalf("a consistent list is at %s, want %s", got.ResourceVersion, rev)
	}
	yes := true
	initial := withBookmarks(afterRevision(rev))
	initial.SendInitialEvents = &yes
	initial.ResourceVersionMatch = metav1.ResourceVersionMatchNotOlderThan
	exact := afterRevision(rev)
	exact.ResourceVersionMatch = metav1.ResourceVersionMatchExact
	var begun watch.Interface
	got := f.requests.during(func() {
		for name, opts := range map[string]storage.ListOptions{"not older": afterRevision(rev), "exact": exact} {
			if got := f.list(t, opts); podNames(got) != "a" || parseRevision(t, got.ResourceVersion) < resp.Header.Revision {
				t.Errorf("%s: list has %q at %s", name, podNames(got), got.ResourceVersion)
			}
		}
		if err := f.Get(ctx, podKey(pod), storage.GetOptions{ResourceVersion: rev}, &example.Pod{}); err != nil {
			t.Errorf("get: %v", err)
		}
		begun, err = f.Watch(ctx, "/pods/", initial)
		testcheck.NoError(t, err)
		nextPod(t, begun, watch.Added)
	})
	defer begun.Stop()
	if mark := nextPod(t, begun, watch.Bookmark); mark.ResourceVersion != rev || mark.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Errorf("the initial events end with %s %v, want %s", mark.ResourceVersion, mark.Annotations, rev)
	}
	if got.Gets+got.Ranges < 4 {
		t.Errorf("requests to etcd: %+v, want one for each read", got)
	}
	got = f.requests.during(func() {
		if got := podNames(f.list(t, afterRevision(pod.ResourceVersion))); got != "a" {
			t.Errorf("list has %q", got)
		}
		w := f.watchPods(t, afterRevision(rev))
		updated := f.update(t, pod, "1")
		for _, w := range []watch.Interface{w, begun} { // from memory, for each start
			if got := nextPod(t, w, watch.Modified); got.ResourceVersion != updated.ResourceVersion {
				t.Errorf("watch has %s, want %s", got.ResourceVersion, updated.ResourceVersion)
			}
		}
	})
	if got.Gets+got.Ranges != 0 {
		t.Errorf("requests to etcd: %+v, want no gets and no ranges", got)
	}
}

// TestFeed_EtcdWithoutProgress_IsRefused: a server that cannot feed others says so to their
// requests, in place of that it is loading.
func TestFeed_EtcdWithoutProgress_IsRefused(t *testing.T) {
	for _, mode := range []etcdsource.ProgressMode{etcdsource.ByEvents, etcdsource.NoProgress} {
		t.Run(mode.String(), func(t *testing.T) {
			client := startEtcd(t, testetcd.Config{})
			feed := etcdfeed.New(etcdfeed.Options{})
			defer feed.Close()
			opts := Options{ReadOnly: true, FeedServer: feed, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
			source := etcdsource.New(client.Client, "feed", testPrefix+"probe").OfAllKeys()
			c, err := startCluster(client, nil, detectedSource{source: source, progressMode: mode}, testPrefix, opts, newBlocks(DefaultRepresentationBytes))
			testcheck.NoError(t, err)
			defer c.close()
			_, err = feed.Range(t.Context(), &pb.RangeRequest{Key: []byte(testPrefix)})
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "has no reliable progress ("+mode.String()+")") {
				t.Errorf("%v, want FailedPrecondition with the reason", err)
			}
		})
	}
}
