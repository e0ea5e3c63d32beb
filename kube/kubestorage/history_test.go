package kubestorage

import (
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"

	"github.com/stratakube/strata/mirror"
)

// TestCompaction_KeepsWatchHistory (KEP-4988): a list below the compacted revision is 410, the
// compacted revision itself can be listed, and watches can start at the same revisions as before.
func TestCompaction_KeepsWatchHistory(t *testing.T) {
	t.Parallel()
	f := setup(t)
	pod := f.create(t, newPod("a"))[0]
	first := f.update(t, pod, "1")
	second := f.update(t, pod, "2")
	third := f.update(t, pod, "3")
	f.catchUp(t) // a feed that has not started cannot start below the compacted revision
	f.compact(contextFor(t), t, second.ResourceVersion)

	at := func(pod *example.Pod) (*example.PodList, error) {
		opts := everything()
		opts.ResourceVersion, opts.ResourceVersionMatch = pod.ResourceVersion, metav1.ResourceVersionMatchExact
		list := &example.PodList{}
		return list, f.GetList(contextFor(t), "/pods/", opts, list)
	}
	if _, err := at(first); !apierrors.IsResourceExpired(err) {
		t.Errorf("list below the compacted revision: %v, want 410", err)
	}
	got := f.requests.during(func() {
		for _, pod := range []*example.Pod{second, third} {
			list, err := at(pod)
			if err != nil || len(list.Items) != 1 || list.Items[0].Annotations["value"] != pod.Annotations["value"] {
				t.Errorf("list at %s: %v, %v", pod.ResourceVersion, list.Items, err)
			}
		}
	})
	got.Revisions = 0 // the mirror reads that of an idle etcd
	if got != (tally{}) {
		t.Errorf("lists at and above the compacted revision: requests to etcd %+v", got)
	}
	for _, pod := range []*example.Pod{second, third} {
		opts := everything()
		opts.ResourceVersion, opts.ResourceVersionMatch = pod.ResourceVersion, metav1.ResourceVersionMatchExact
		r, err := f.engine(t).Read(contextFor(t), "/pods/", opts)
		if err != nil {
			t.Fatal(err)
		}
		if r.FromEtcd() {
			t.Errorf("the list at %s is read from etcd, want from memory", pod.ResourceVersion)
		}
		r.Close()
	}

	w := f.watchPods(t, afterRevision(pod.ResourceVersion))
	for _, want := range []*example.Pod{first, second, third} {
		if got := nextPod(t, w, watch.Modified); got.ResourceVersion != want.ResourceVersion {
			t.Errorf("watch has %s, want %s", got.ResourceVersion, want.ResourceVersion)
		}
	}
}

// TestWindow_UnsetBound_GetsDefault: an unset bound gets its default, independently of the other.
func TestWindow_UnsetBound_GetsDefault(t *testing.T) {
	def := mirror.DefaultWindow
	for _, tt := range []struct {
		set      mirror.Window
		upstream time.Duration
		want     mirror.Window
	}{
		{mirror.Window{}, 75 * time.Second, def},
		{mirror.Window{MaxBytes: 1 << 20}, 75 * time.Second, mirror.Window{MaxAge: def.MaxAge, MaxBytes: 1 << 20}},
		{mirror.Window{MaxAge: 10 * time.Minute}, 75 * time.Second, mirror.Window{MaxAge: 10 * time.Minute, MaxBytes: def.MaxBytes}},
		{mirror.Window{MaxAge: time.Second}, 75 * time.Second, mirror.Window{MaxAge: 75 * time.Second, MaxBytes: def.MaxBytes}},
	} {
		if got := (&Options{Window: tt.set}).window(tt.upstream); got != tt.want {
			t.Errorf("%+v: %+v, want %+v", tt.set, got, tt.want)
		}
	}
}
