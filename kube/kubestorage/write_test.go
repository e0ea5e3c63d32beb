package kubestorage

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// TestWrite_CachedObject_CostsOneTransaction: the object in memory saves the read before an update
// or a deletion.
func TestWrite_CachedObject_CostsOneTransaction(t *testing.T) {
	f := setupInMemory(t)
	pod := newPod("a")
	for _, step := range []struct {
		name string
		want tally
		do   func()
	}{
		{"create", tally{Writes: 1}, func() { f.create(t, pod) }},
		{"update", tally{Writes: 1}, func() { f.update(t, pod, "1") }},
		{"update again", tally{Writes: 1}, func() { f.update(t, pod, "2") }},
		// Skipping the write requires a comparison with the stored value.
		{"update without a change", tally{Gets: 1}, func() { f.update(t, pod, "2") }},
		{"delete", tally{Writes: 1}, func() { f.remove(t, pod) }},
	} {
		f.catchUp(t)
		if got := f.requests.during(step.do); got != step.want {
			t.Errorf("%s: requests to etcd %+v, want %+v", step.name, got, step.want)
		}
	}
}

// TestWrite_StaleCachedObject_IsRetried: the object in memory is a suggestion. If it is stale the
// transaction fails, and the write is retried on etcd's state; nothing is lost.
func TestWrite_StaleCachedObject_IsRetried(t *testing.T) {
	t.Parallel()
	s := &stallable{}
	f := setupInMemory(t, s.through)
	pod := f.create(t, newPod("a"))[0]
	gone := f.create(t, newPod("b"))[0]
	f.catchUp(t)
	s.feed.shut()
	defer s.feed.open()

	f.putPod(t, withLabel(pod, "by", "another"))
	var out *example.Pod
	if got := f.requests.during(func() { out = f.update(t, pod, "ours") }); got != (tally{Writes: 2}) {
		t.Errorf("the update: requests to etcd %+v, want a transaction that fails and one that succeeds", got)
	}
	if out.Labels["by"] != "another" || out.Annotations["value"] != "ours" {
		t.Errorf("got labels %v and annotations %v, want both writes", out.Labels, out.Annotations)
	}

	f.putPod(t, withLabel(pod, "by", "a third"))
	if last := f.remove(t, pod); last.Labels["by"] != "a third" {
		t.Errorf("deleted the state with labels %v, want the newest", last.Labels)
	}

	if _, err := f.client.Delete(contextFor(t), etcdKey(gone)); err != nil {
		t.Fatal(err)
	}
	err := f.Delete(contextFor(t), podKey(gone), &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	if !storage.IsNotFound(err) {
		t.Errorf("delete of an object that another client has deleted: %v, want not found", err)
	}
}

// TestLease_Expires_DeliversDeletion: a deletion by etcd is an event like any other.
func TestLease_Expires_DeliversDeletion(t *testing.T) {
	t.Parallel()
	f := setup(t)
	created := &example.Pod{}
	create := func() error { return f.Create(contextFor(t), podKey(newPod("a")), newPod("a"), created, 1) }
	err := create()
	for errors.Is(err, rpctypes.ErrLeaseNotFound) {
		err = create() // its lease ended before it was written
	}
	testcheck.NoError(t, err)
	w := f.watchPods(t, afterRevision(created.ResourceVersion))
	deleted := nextPod(t, w, watch.Deleted)
	if parseRevision(t, deleted.ResourceVersion) <= parseRevision(t, created.ResourceVersion) {
		t.Errorf("deleted at %s, created at %s", deleted.ResourceVersion, created.ResourceVersion)
	}
	deleted.ResourceVersion = created.ResourceVersion
	if !apiequality.Semantic.DeepEqual(deleted, created) {
		t.Errorf("deleted %v, want %v", deleted, created)
	}
	if got := podNames(f.list(t, everything())); got != "" {
		t.Errorf("list has %q, want no items", got)
	}
}

// TestEncryption_StoredValues_AreCiphertext: values are ciphertext in etcd and in memory, and bound
// to their key. After the first key of the configuration was replaced an update without a change
// still writes, so that stored values move to the new key.
func TestEncryption_StoredValues_AreCiphertext(t *testing.T) {
	t.Parallel()
	swap := newSwappable(podtest.Encryption(t, "1"))
	f := setupInMemory(t, withTransformer(swap))
	pod := f.create(t, newPod("secret-name"))[0]
	stored := f.stored(t, pod)
	if !bytes.HasPrefix(stored, []byte("key1:")) || bytes.Contains(stored, []byte("secret-name")) {
		t.Fatalf("stored as %q", stored)
	}
	if got := podNames(f.list(t, everything())); got != "secret-name" {
		t.Errorf("list has %q", got)
	}
	e, ok := mustLatest(t, f.engine(t)).Get(etcdKey(pod))
	if !ok || !bytes.Equal(e.Value(), stored) {
		t.Errorf("memory holds something else than etcd")
	}

	swap.set(podtest.Encryption(t, "2", "1"))
	w := f.watchPods(t, afterRevision(pod.ResourceVersion))
	same := func() *example.Pod {
		f.catchUp(t)
		out := &example.Pod{}
		unchanged := func(obj runtime.Object, _ storage.ResponseMeta) (runtime.Object, *uint64, error) {
			return obj, nil, nil
		}
		testcheck.NoError(t, f.GuaranteedUpdate(contextFor(t), podKey(pod), out, false, nil, unchanged, nil))
		return out
	}
	moved := same()
	if moved.ResourceVersion == pod.ResourceVersion || !bytes.HasPrefix(f.stored(t, pod), []byte("key2:")) {
		t.Errorf("the value was not encrypted again: %q", f.stored(t, pod)[:5])
	}
	if again := same(); again.ResourceVersion != moved.ResourceVersion {
		t.Errorf("an update without a change was written at %s", again.ResourceVersion)
	}
	if got := nextPod(t, w, watch.Modified); got.Name != "secret-name" || got.ResourceVersion != moved.ResourceVersion {
		t.Errorf("watch has %s at %s", got.Name, got.ResourceVersion)
	}

	// A value that was copied to another key fails to decrypt there.
	other := newPod("other")
	if _, err := f.client.Put(contextFor(t), etcdKey(other), string(f.stored(t, pod))); err != nil {
		t.Fatal(err)
	}
	expected := storage.IsInternalError
	if utilfeature.DefaultFeatureGate.Enabled(features.AllowUnsafeMalformedObjectDeletion) {
		// the default since v0.37
		expected = storage.IsCorruptObject
	}
	if err := f.Get(contextFor(t), podKey(other), storage.GetOptions{}, &example.Pod{}); !expected(err) {
		t.Errorf("a copied value gives %v", err)
	}
}

// TestStats_CountAndSize_AreOfStoredValues: count and average size come from memory and are those
// of the values in etcd, as encrypted.
func TestStats_CountAndSize_AreOfStoredValues(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.SizeBasedListCostEstimate, true)
	f := setupInMemory(t, withTransformer(podtest.Encryption(t, "1")))
	pods := f.create(t, newPod("a"), newPod("b"), newPod("c"))
	f.update(t, pods[0], strings.Repeat("x", 1000))
	f.remove(t, pods[2])
	f.catchUp(t)
	size := (len(f.stored(t, pods[0])) + len(f.stored(t, pods[1]))) / 2
	want := storage.Stats{ObjectCount: 2, EstimatedAverageObjectSizeBytes: int64(size)}
	got := f.requests.during(func() {
		stats, err := f.Stats(contextFor(t))
		if err != nil || stats != want {
			t.Errorf("got %+v, %v; want %+v", stats, err, want)
		}
	})
	if got != (tally{}) {
		t.Errorf("requests to etcd: %+v", got)
	}
}

// etcdKey returns the key of the pod in etcd.
func etcdKey(pod *example.Pod) string { return testPrefix + podKey(pod)[1:] }

// stored returns the pod's value in etcd.
func (f *fixture) stored(t testing.TB, pod *example.Pod) []byte {
	t.Helper()
	resp, err := f.client.Client.Get(contextFor(t), etcdKey(pod))
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("read %s: %v", etcdKey(pod), err)
	}
	return resp.Kvs[0].Value
}

// putPod writes the pod to etcd, bypassing the storage, transformed by the last argument if there
// is one, and returns the revision.
func (f *fixture) putPod(t testing.TB, pod *example.Pod, encrypt ...value.Transformer) int64 {
	t.Helper()
	pod = pod.DeepCopy()
	pod.ResourceVersion = ""
	data, err := runtime.Encode(f.codec, pod)
	for _, tr := range encrypt {
		if err == nil {
			data, err = tr.TransformToStorage(contextFor(t), data, value.DefaultContext(etcdKey(pod)))
		}
	}
	testcheck.NoError(t, err)
	resp, err := f.client.Put(contextFor(t), etcdKey(pod), string(data))
	testcheck.NoError(t, err)
	return resp.Header.Revision
}

func withLabel(pod *example.Pod, key, value string) *example.Pod {
	pod = pod.DeepCopy()
	metav1.SetMetaDataLabel(&pod.ObjectMeta, key, value)
	return pod
}
