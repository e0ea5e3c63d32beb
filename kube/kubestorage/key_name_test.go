package kubestorage

import (
	"testing"

	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// TestKeyOtherThanName_Reads_FollowKey (D-KEY): an object that a direct write to etcd has stored
// under another key than its name is read by that key, at any resource version, and lists have it
// at the place of the key: as in etcd.
func TestKeyOtherThanName_Reads_FollowKey(t *testing.T) {
	t.Parallel()
	moved := newPod("z")
	f := setupInMemory(t, withData(func(client *kubernetes.Client) {
		for key, pod := range map[string]*example.Pod{"a": moved, "b": newPod("b")} {
			data, err := runtime.Encode(testCodec(), pod)
			if err == nil {
				_, err = client.Put(contextFor(t), testPrefix+"pods/ns/"+key, string(data))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}))
	s, ctx := f.engine(t), contextFor(t)
	for _, rv := range []string{"", "0"} {
		for name, from := range map[string]storage.Interface{"engine": s, "etcd": s.etcd} {
			var pod example.Pod
			if err := from.Get(ctx, "/pods/ns/a", storage.GetOptions{ResourceVersion: rv}, &pod); err != nil || pod.Name != "z" {
				t.Errorf("%s: GET by the key at %q: %q, %v; want z", name, rv, pod.Name, err)
			}
			if err := from.Get(ctx, podKey(moved), storage.GetOptions{ResourceVersion: rv}, &pod); !storage.IsNotFound(err) {
				t.Errorf("%s: GET by the name at %q: %v, want not found", name, rv, err)
			}
			var list example.PodList
			opts := everything()
			opts.ResourceVersion = rv
			if err := from.GetList(ctx, "/pods/", opts, &list); err != nil || podNames(&list) != "z b" {
				t.Errorf("%s: LIST at %q: %q, %v; want the order of the keys", name, rv, podNames(&list), err)
			}
		}
	}
}
