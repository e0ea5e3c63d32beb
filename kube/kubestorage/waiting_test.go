package kubestorage

import (
	"fmt"
	"io"
	"log/slog"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
)

// TestRead_HistoryBeingRestored_Waits: reads wait while etcd is being listed, and a watch from
// before the start until the history since then is restored.
func TestRead_HistoryBeingRestored_Waits(t *testing.T) {
	t.Parallel()
	f := setup(t)
	pod := f.create(t, newPod("a"))[0]
	f.update(t, pod, "1")

	opts := Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	feed, err := detectSource(f.client, testPrefix, opts)
	if err != nil {
		t.Fatal(err)
	}
	s := &stallable{Source: feed.source}
	s.lists.shut()
	defer s.lists.open()
	feed.source = s
	c, err := startCluster(f.client, nil, feed, testPrefix, opts, newBlocks(DefaultRepresentationBytes))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	storages, destroy, err := c.open(storeConfig{
		Codec: testCodec(), Kind: podKind(schema.GroupResource{Resource: "pods"}), ResourcePrefix: "/pods/",
		Transformer: identity.NewEncryptCheckTransformer(), Leases: etcd3.NewDefaultLeaseManagerConfig(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(destroy)
	store := storages.(*Store)

	at := everything()
	at.ResourceVersion = pod.ResourceVersion
	exactly := at
	exactly.ResourceVersionMatch = metav1.ResourceVersionMatchExact
	page := exactly
	page.Predicate.Limit = 1
	results := make(chan error)
	for name, opts := range map[string]storage.ListOptions{"exact": exactly, "page": page, "not older": at, "now": everything()} {
		go func() {
			list := &example.PodList{}
			err := store.GetList(contextFor(t), "/pods/", opts, list)
			if err == nil && podNames(list) != "a" {
				err = fmt.Errorf("has %q", podNames(list))
			}
			if err != nil {
				err = fmt.Errorf("list %s: %w", name, err)
			}
			results <- err
		}()
	}
	go func() {
		w, err := store.Watch(contextFor(t), "/pods/", at)
		if err == nil {
			defer w.Stop()
			if ev := <-w.ResultChan(); ev.Type != "MODIFIED" {
				err = fmt.Errorf("begins with %s: %v", ev.Type, ev.Object)
			}
		}
		if err != nil {
			err = fmt.Errorf("watch: %w", err)
		}
		results <- err
	}()
	select {
	case err := <-results:
		t.Fatalf("answered before there is anything: %v", err)
	default:
	}
	s.lists.open()
	for range 5 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	// The watch is answered as soon as the events are joined; the restore is counted after that.
	eventually(t, "the restore ends", func() bool { return store.mirror.Stats().Restoring == 0 })
	if st := store.mirror.Stats(); st.Replays != 1 || st.ReplayedEvents == 0 {
		t.Errorf("history was restored %d times, %d events of it", st.Replays, st.ReplayedEvents)
	}
}
