package kubestorage

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"

	"github.com/stratakube/strata/kube/internal/watch"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// twin is a storage of pods on the in-memory twin of etcd. It can be read, and runs in a synctest
// bubble.
type twin struct {
	*Store
	etcd  *memory.Store
	codec *countingCodec
}

func newTwin(t testing.TB, window mirror.Window) *twin {
	t.Helper()
	return newTwinWith(t, window, func(*storeConfig) {})
}

// newTwinWith is newTwin for another kind of objects, below the same prefix. A swappable
// transformer has keys that change.
func newTwinWith(t testing.TB, window mirror.Window, change func(*storeConfig)) *twin {
	t.Helper()
	codec := &countingCodec{Codec: testCodec()}
	cfg := storeConfig{
		Codec:          codec,
		Kind:           podKind(schema.GroupResource{Resource: "pods"}),
		ResourcePrefix: "/pods/",
	}
	change(&cfg)
	if cfg.Transformer == nil {
		cfg.Transformer = identity.NewEncryptCheckTransformer()
	}
	var keys func() any
	if swap, ok := cfg.Transformer.(*swappable); ok {
		keys = func() any { return swap.current.Load() }
	}
	etcd := memory.New()
	m, err := mirror.New(mirror.Options{
		Prefix: testPrefix, Source: etcd, Window: window,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	testcheck.NoError(t, err)
	t.Cleanup(m.Close)
	r, err := m.Claim(testPrefix + "pods/")
	testcheck.NoError(t, err)
	testcheck.NoError(t, r.WaitReady(contextFor(t)))
	c := &cluster{prefix: testPrefix, mirror: m, blocks: newBlocks(DefaultRepresentationBytes), detected: detectedSource{latestReads: latestReads{lists: true, gets: true}}}
	c.opts.Converts = func(r schema.GroupResource) bool { return r.Group != withoutWebhook }
	cfg.Decoder = etcd3.NewDefaultDecoder(cfg.Codec, storage.APIObjectVersioner{})
	s := newStore(c, nil, r, cfg, objects.Config{
		Kind: cfg.Kind, Transformer: cfg.Transformer, Keys: keys, Blocks: c.blocks, Conversions: c.conversions(&cfg),
	}, false)
	t.Cleanup(s.stop)
	return &twin{s, etcd, codec}
}

// put writes a pod of the namespace ns and returns its revision.
func (w *twin) put(t testing.TB, pod *example.Pod) mirror.Revision {
	t.Helper()
	return w.etcd.Put(etcdKey(pod), storedPod(t, pod))
}

// storedPod returns the stored value of a pod.
func storedPod(t testing.TB, pod *example.Pod) string {
	t.Helper()
	data, err := runtime.Encode(testCodec(), pod)
	testcheck.NoError(t, err)
	return string(data)
}

// catchUp returns when memory has caught up with etcd.
func (w *twin) catchUp(t testing.TB) {
	t.Helper()
	testcheck.NoError(t, w.mirror.Wait(contextFor(t), w.etcd.Revision()))
}

// open opens a stream of all pods that ends with the test.
func (w *twin) open(t testing.TB, ctx context.Context, opts storage.ListOptions) *watch.Stream {
	t.Helper()
	st, err := w.openStream(ctx, "/pods/", opts)
	testcheck.NoError(t, err)
	t.Cleanup(st.Close)
	return st
}

// fromNow are the options of a watch that starts after the writes so far.
func (w *twin) fromNow() storage.ListOptions {
	return afterRevision(fmt.Sprint(w.etcd.Revision()))
}

func withBookmarks(opts storage.ListOptions) storage.ListOptions {
	opts.Predicate.AllowWatchBookmarks = true
	return opts
}

func parseLabels(t testing.TB, selector string) labels.Selector {
	t.Helper()
	parsed, err := labels.Parse(selector)
	testcheck.NoError(t, err)
	return parsed
}

// recorder is a Sink that keeps what a watch delivers, without decoding it.
type recorder struct {
	entries   int // initial events
	events    []*mirror.Event
	bookmarks []watch.Bookmark
}

func (r *recorder) Refresh() error { return nil }
func (r *recorder) Runs(runs []mirror.Run) error {
	for _, run := range runs {
		r.entries += len(run.Items())
	}
	return nil
}
func (r *recorder) Added(*mirror.Entry) error { r.entries++; return nil }
func (r *recorder) Listed()                   {}
func (r *recorder) Event(_ apiwatch.EventType, ev *mirror.Event) error {
	r.events = append(r.events, ev)
	return nil
}
func (r *recorder) Bookmark(b watch.Bookmark) error { r.bookmarks = append(r.bookmarks, b); return nil }
func (r *recorder) Flush() error                    { return nil }

// record delivers a stream to its end, closes it, and returns what it has delivered.
func record(st *watch.Stream) (got recorder, err error) {
	defer st.Close()
	err = st.Deliver(nil, &got)
	return got, err
}

// pending delivers the pending part of a stream. Errors: also watch.ErrEnded.
func pending(st *watch.Stream, sink watch.Sink) error {
	st.DeliverPending(nil, sink)
	stop := make(chan struct{})
	close(stop)
	if err := st.Deliver(stop, sink); err != nil || st.Context().Err() == nil {
		return err
	}
	return watch.ErrEnded
}
