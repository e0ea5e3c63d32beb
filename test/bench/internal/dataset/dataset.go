// Package dataset makes the objects that the engines serve and puts them into etcd as
// kube-apiserver would have stored them.
package dataset

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

// contentVersion changes when the objects of the same Spec do, so that a cached etcd directory is
// not taken for the new content.
const contentVersion = 1

// Spec contains the numbers of objects. Equal specs have equal objects.
type Spec struct {
	ConfigMaps int // all in Namespace
	Pods       int
	Nodes      int // the pods are spread over as many node names; there are no node objects
	Namespaces int // the pods and custom resources are spread over them; 1 means Namespace
	PodBytes   int // random bytes of each pod; 0 means as many as other objects have
	Things     int // custom resources of one definition

	Managed bool // the pods are those of ManagedPod, the custom resources those of ManagedThing
}

// ID names the content of the spec; it is usable as a file name.
func (s Spec) ID() string {
	id := fmt.Sprintf("v%d-configmaps-%d-pods-%d-%d-%d", contentVersion, s.ConfigMaps, s.Pods, s.Nodes, s.Namespaces)
	if s.PodBytes > 0 {
		id += fmt.Sprintf("-of-%d", s.PodBytes)
	}
	if s.Things > 0 {
		id += fmt.Sprintf("-things-%d", s.Things)
	}
	if s.Managed {
		id += "-managed-2"
	}
	return id
}

// Pod returns the pod with this index.
func (s Spec) Pod(index int) *corev1.Pod {
	pod := Pod(index, s.Nodes, s.Namespaces)
	switch {
	case s.Managed:
		pod = ManagedPod(index, s.Nodes, s.Namespaces)
	case s.PodBytes > 0:
		pod.Annotations[dataKey] = textOf(s.PodBytes, "pod "+pod.Name, 0)
	}
	return pod
}

// Thing returns the custom resource with this index.
func (s Spec) Thing(index int) *unstructured.Unstructured {
	if s.Managed {
		return ManagedThing(index, s.Namespaces)
	}
	return Thing(index, s.Namespaces)
}

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

// builders yields a function per object, which makes it. They may be called concurrently; making an
// object costs far more than drawing its function.
func (s Spec) builders() iter.Seq[func() (string, runtime.Object)] {
	return func(yield func(func() (string, runtime.Object)) bool) {
		namespaces := []string{Namespace}
		if s.Namespaces > 1 {
			for i := range s.Namespaces {
				namespaces = append(namespaces, PodNamespace(i, s.Namespaces))
			}
		}
		for _, name := range namespaces {
			if !yield(func() (string, runtime.Object) { return "/registry/namespaces/" + name, namespaceObject(name) }) {
				return
			}
		}
		for i := range s.ConfigMaps {
			if !yield(func() (string, runtime.Object) { return ConfigMapKey(ConfigMapName(i)), ConfigMap(i, 0) }) {
				return
			}
		}
		for i := range s.Pods {
			if !yield(func() (string, runtime.Object) {
				pod := s.Pod(i)
				return PodKey(pod.Namespace, pod.Name), pod
			}) {
				return
			}
		}
		if s.Things > 0 && !yield(func() (string, runtime.Object) { return definitionKey, Definition() }) {
			return
		}
		for i := range s.Things {
			if !yield(func() (string, runtime.Object) { return ThingKey(i, s.Namespaces), s.Thing(i) }) {
				return
			}
		}
	}
}

// putsInFlight is the number of puts that Fill keeps in flight: enough that etcd commits many of
// them together (a guess).
const putsInFlight = 128

// Fill puts every object of the spec into etcd, one revision each, and compacts the history that
// this made. It calls progress, if not nil, about every thousandth object, from several goroutines.
func Fill(ctx context.Context, client *clientv3.Client, s Spec, progress func(done, total int)) error {
	work := make(chan func() (string, runtime.Object))
	var done atomic.Int64
	g, fillCtx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(work)
		for build := range s.builders() {
			select {
			case work <- build:
			case <-fillCtx.Done():
				return context.Cause(fillCtx)
			}
		}
		return nil
	})
	for range putsInFlight {
		g.Go(func() error {
			for build := range work {
				key, obj := build()
				value, err := Encode(obj)
				if err != nil {
					return err
				}
				if _, err := client.Put(fillCtx, key, string(value)); err != nil {
					return fmt.Errorf("fill etcd: put %s: %w", key, err)
				}
				if n := int(done.Add(1)); progress != nil && n%1000 == 0 {
					progress(n, s.Len())
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
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
