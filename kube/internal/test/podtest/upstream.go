package podtest

import (
	"context"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
)

// NewList returns an empty list of pods.
func NewList() runtime.Object { return &example.PodList{} }

// Upstream returns upstream's store of the pods, which reads and writes through kv. It cannot watch
// or use leases. It ends with the test.
func (c *Cluster) Upstream(t testing.TB, kv *KV) storage.Interface {
	t.Helper()
	client := &kubernetes.Client{Client: clientv3.NewCtxClient(context.Background())}
	client.KV, client.Kubernetes = kv, client
	s, err := etcd3.New(client, nil, &c.codec, c.config.NewFunc, NewList, Prefix, "/pods/", c.config.GroupResource,
		c.config.Transformer, etcd3.NewDefaultLeaseManagerConfig(), c.config.Decoder, storage.APIObjectVersioner{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if c.unsafeDelete {
		return etcd3.NewStoreWithUnsafeCorruptObjectDeletion(s, c.config.GroupResource)
	}
	return s
}
