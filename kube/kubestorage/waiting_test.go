package kubestorage

import (
	"fmt"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestRead_HistoryBeingRestored_Waits: reads wait while etcd is being listed, and a watch from
// before the start until the history since then is restored.
func TestRead_HistoryBeingRestored_Waits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		etcd := memory.New()
		f := setup(t, inMemory(etcd))
		pod := f.create(t, newPod("a"))[0]
		f.update(t, pod, "1")

		opts := Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
		s := &stallable{Source: etcd}
		s.lists.shut()
		defer s.lists.open()
		feed := detectedSource{source: s, latestReads: latestReads{lists: true, gets: true}}
		c, err := startCluster(f.client, nil, feed, testPrefix, opts, newBlocks(DefaultRepresentationBytes))
		testcheck.NoError(t, err)
		t.Cleanup(c.close)
		c.ranges = f.client.KV
		storages, destroy, err := c.open(storeConfig{
			Codec: testCodec(), Kind: podKind(schema.GroupResource{Resource: "pods"}), ResourcePrefix: "/pods/",
			Transformer: identity.NewEncryptCheckTransformer(), Leases: etcd3.NewDefaultLeaseManagerConfig(),
		})
		testcheck.NoError(t, err)
		t.Cleanup(destroy)
		store := storages.(*Store)

		at := everything()
		at.ResourceVersion = pod.ResourceVersion
		exactly := at
		exactly.ResourceVersionMatch = metav1.ResourceVersionMatchExact
		page := exactly
		page.Predicate.Limit = 1
		answered := make(chan string, 5)
		read := func(name string, f func() error) {
			go func() {
				if err := f(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				answered <- name
			}()
		}
		for name, opts := range map[string]storage.ListOptions{"exact": exactly, "page": page, "not older": at, "now": everything()} {
			read("list "+name, func() error {
				list := &example.PodList{}
				err := store.GetList(contextFor(t), "/pods/", opts, list)
				if err == nil && podNames(list) != "a" {
					err = fmt.Errorf("has %q", podNames(list))
				}
				return err
			})
		}
		read("watch", func() error {
			w, err := store.Watch(contextFor(t), "/pods/", at)
			if err != nil {
				return err
			}
			defer w.Stop()
			if ev := <-w.ResultChan(); ev.Type != "MODIFIED" {
				return fmt.Errorf("begins with %s: %v", ev.Type, ev.Object)
			}
			return nil
		})
		synctest.Wait()
		early := len(answered)
		for range early {
			t.Errorf("%s is answered before the list of etcd", <-answered)
		}
		s.lists.open()
		synctest.Wait()
		if n := early + len(answered); n != 5 {
			t.Errorf("%d of 5 reads are answered", n)
		}
		if st := store.mirror.Stats(); st.Replays != 1 || st.ReplayedEvents == 0 || st.Restoring != 0 {
			t.Errorf("history was restored %d times, %d events of it; %d are being restored", st.Replays, st.ReplayedEvents, st.Restoring)
		}
	})
}
