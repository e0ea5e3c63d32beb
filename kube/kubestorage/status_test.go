package kubestorage

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/stratakube/strata/kube/status"
	"github.com/stratakube/strata/mirror"
)

func TestStatus_Resource_HasItsObjectsBytesWatchesAndLists(t *testing.T) {
	t.Parallel()
	f := setupInMemory(t, func(o *options) { o.store.GroupResource = schema.GroupResource{Group: "status", Resource: "pods"} })
	e := &Engine{blocks: newBlocks(1 << 20), clusters: map[string]*cluster{"": f.cluster}}
	f.create(t, newPod("a"), newPod("b"))
	f.list(t, everything())
	st, err := f.engine(t).openStream(t.Context(), "/pods/", everything())
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()

	s := e.Status()
	if len(s.Clusters) != 1 || !s.Clusters[0].Ready || s.Clusters[0].Revision < 3 || s.Clusters[0].EtcdRevision < s.Clusters[0].Revision {
		t.Errorf("clusters: %+v", s.Clusters)
	}
	i := slices.IndexFunc(s.Resources, func(r status.Resource) bool { return r.Group == "status" })
	if i < 0 {
		t.Fatalf("the resource is absent: %+v", s.Resources)
	}
	r := s.Resources[i]
	if !r.Ready || r.Objects != 2 || r.Bytes == 0 || r.Events != 2 || r.Watches != 1 || r.Lists.Memory != 1 || s.Watches != 1 || s.Reads.Memory < 1 {
		t.Errorf("%+v of %+v, want 2 objects and events, 1 watch, 1 list", r, s)
	}
	if s.Memory.RepresentationLimitBytes != 1<<20 {
		t.Errorf("memory: %+v", s.Memory)
	}
}

func TestStatus_WatchWithOldPendingEvent_IsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		from := w.fromNow()
		ctx := request.WithUser(t.Context(), &user.DefaultInfo{Name: "jane"})
		ctx = request.WithRequestInfo(ctx, &request.RequestInfo{Namespace: "front"})
		st := w.open(t, ctx, from)
		defer st.Close()
		readings := func() []status.Watch {
			w.catchUp(t)
			count, lagging := w.cluster.openStreams()
			if count[w.group] != 1 {
				t.Fatalf("open streams: %v", count)
			}
			return slow(lagging, w.mirror.PublishedRevision())
		}
		if all := readings(); len(all) != 0 {
			t.Errorf("a watch without pending events is slow: %+v", all)
		}
		w.put(t, newPod("a"))
		w.put(t, newPod("b"))
		if all := readings(); len(all) != 0 {
			t.Errorf("a watch with new events is slow: %+v", all)
		}
		time.Sleep(3 * time.Second)
		all := readings()
		if len(all) != 1 || all[0].User != "jane" || all[0].Namespace != "front" || all[0].Resource != w.group.Resource ||
			all[0].BehindSeconds < 3 || all[0].BehindSeconds > 4 || all[0].BehindRevisions != 2 {
			t.Errorf("slow watches: %+v, want the one of jane, 3 s and 2 revisions behind", all)
		}
		st.DeliverPending(nil, &recorder{})
		if all := readings(); len(all) != 0 {
			t.Errorf("a watch that has examined its events is slow: %+v", all)
		}
	})
}
