// Package dataset makes the objects that the engines serve and puts them into etcd as
// kube-apiserver would have stored them.
package dataset

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

// contentVersion changes when the objects of the same Spec do, so that a cached etcd directory is
// not taken for the new content.
const contentVersion = 2

// Spec contains the numbers of objects. Equal specs have equal objects.
type Spec struct {
	ConfigMaps int // all in Namespace
	Pods       int
	Nodes      int // the pods are spread over as many node names; there are no node objects
	Namespaces int // the pods and custom resources are spread over them; 1 means Namespace
	Things     int // custom resources of one definition
}

// ID names the content of the spec; it is usable as a file name.
func (s Spec) ID() string {
	return fmt.Sprintf("v%d-configmaps-%d-pods-%d-%d-%d-things-%d", contentVersion, s.ConfigMaps, s.Pods, s.Nodes, s.Namespaces, s.Things)
}

// Pod returns the pod with this index.
func (s Spec) Pod(index int) *corev1.Pod { return Pod(index, s.Nodes, s.Namespaces) }

// Len is the number of objects.
func (s Spec) Len() int {
	namespaces := 1
	if s.Namespaces > 1 {
		namespaces += s.Namespaces
	}
	if s.Things > 0 {
		namespaces++ // the definition
	}
	return namespaces + s.ConfigMaps + s.Pods + s.Things
}

// object returns the object with this index of all, and its key. Namespaces come before objects in
// them.
func (s Spec) object(i int) (key string, o runtime.Object) {
	if i == 0 {
		return namespaceObject(Namespace)
	}
	if i--; s.Namespaces > 1 {
		if i < s.Namespaces {
			return namespaceObject(PodNamespace(i, s.Namespaces))
		}
		i -= s.Namespaces
	}
	if i < s.ConfigMaps {
		return ConfigMapKey(ConfigMapName(i)), ConfigMap(i, 0)
	}
	if i -= s.ConfigMaps; i < s.Pods {
		pod := s.Pod(i)
		return PodKey(pod.Namespace, pod.Name), pod
	}
	if i -= s.Pods; i == 0 {
		return definitionKey, Definition()
	}
	return ThingKey(i-1, s.Namespaces), Thing(i-1, s.Namespaces)
}

// PutAll puts n objects into etcd, some at a time: enough that etcd commits many of them together
// (a guess).
func PutAll(ctx context.Context, client *clientv3.Client, n int, object func(i int) (key string, value []byte, err error)) error {
	const putsInFlight = 128
	puts, putting := errgroup.WithContext(ctx)
	puts.SetLimit(putsInFlight)
	for i := 0; i < n && putting.Err() == nil; i++ {
		puts.Go(func() error {
			key, value, err := object(i)
			if err != nil {
				return err
			}
			if _, err := client.Put(putting, key, string(value)); err != nil {
				return fmt.Errorf("put %s: %w", key, err)
			}
			return nil
		})
	}
	if err := puts.Wait(); err != nil {
		return err
	}
	return context.Cause(ctx)
}

// Fill puts every object of the spec into etcd, one revision each, and compacts the history that
// this made.
func Fill(ctx context.Context, client *clientv3.Client, s Spec) error {
	err := PutAll(ctx, client, s.Len(), func(i int) (string, []byte, error) {
		key, o := s.object(i)
		value, err := Encode(o)
		return key, value, err
	})
	if err != nil {
		return err
	}
	revision, err := Revision(ctx, client)
	if err != nil {
		return err
	}
	return Compact(ctx, client, revision)
}

// Revision returns the revision of the latest change.
func Revision(ctx context.Context, client *clientv3.Client) (int64, error) {
	latest, err := client.Get(ctx, "/", clientv3.WithCountOnly())
	if err != nil {
		return 0, fmt.Errorf("read etcd's revision: %w", err)
	}
	return latest.Header.Revision, nil
}

// Compact drops the history below a revision, and returns when etcd has done the work that this
// makes. To compact to the same revision again does nothing.
func Compact(ctx context.Context, client *clientv3.Client, revision int64) error {
	_, err := client.Compact(ctx, revision, clientv3.WithCompactPhysical())
	if err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
		return fmt.Errorf("compact etcd: %w", err)
	}
	return nil
}

// Count returns the number of keys of a resource (for example "configmaps") in etcd.
func Count(ctx context.Context, client *clientv3.Client, resource string) (int, error) {
	response, err := client.Get(ctx, "/registry/"+resource+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return 0, fmt.Errorf("count %s in etcd: %w", resource, err)
	}
	return int(response.Count), nil
}
