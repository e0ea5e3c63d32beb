package chunks

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/pager"

	"github.com/stratakube/strata/test/harness"
)

// TestClientGoPager_ReturnsCompleteLists reads pages with client-go's pager and the typed, the
// dynamic and the metadata client, and compacts etcd under a pager that falls back to a full list.
func TestClientGoPager_ReturnsCompleteLists(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	namespace := harness.NewName("ns")
	names := s.fill(t, ctx, maps, namespace, "first", 200)
	s.fill(t, ctx, things, namespace, "first", 200)
	resource := schema.GroupVersionResource{Group: thingsGroup, Version: "v1", Resource: things.plural}

	protobuf := rest.CopyConfig(s.replicas[0].Config)
	protobuf.ContentType = runtime.ContentTypeProtobuf
	typed := harness.Must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(protobuf))
	dynamically := harness.Must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(s.replicas[1].Config))
	metadataOnly := harness.Must[metadata.Interface](t)(metadata.NewForConfig(s.inTurn(2).Config))
	for name, list := range map[string]pager.ListPageFunc{
		"typed": func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return typed.CoreV1().ConfigMaps(namespace).List(ctx, o)
		},
		"dynamic": func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return dynamically.Resource(resource).Namespace(namespace).List(ctx, o)
		},
		"metadata of custom resources": func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return metadataOnly.Resource(resource).Namespace(namespace).List(ctx, o)
		},
		"metadata": func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return metadataOnly.Resource(corev1.SchemeGroupVersion.WithResource("configmaps")).Namespace(namespace).List(ctx, o)
		},
	} {
		t.Run(name, func(t *testing.T) {
			pages := 0
			p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				pages++
				return list(ctx, o)
			})
			p.PageSize = 17
			var got []string
			harness.Check(t, p.EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
				accessor, err := meta.Accessor(o)
				if err == nil {
					got = append(got, accessor.GetName())
				}
				return err
			}))
			harness.RequireEqual(t, "each item", got, names)
			if pages != 12 {
				t.Errorf("%d pages of 17 for 200 items", pages)
			}
			all, paged, err := p.List(ctx, metav1.ListOptions{})
			harness.Check(t, err)
			items, err := meta.ExtractList(all)
			harness.Check(t, err)
			if len(items) != len(names) || !paged {
				t.Errorf("%d items, in pages: %t", len(items), paged)
			}
		})
	}
	t.Run("overtaken", func(t *testing.T) {
		pages := 0
		p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if pages++; pages == 3 {
				last := s.commit(t, ctx, things.put(namespace, names[150], "changed"))
				s.compact(t, ctx, last)
				if err := s.replicas[1].awaitExpiry(ctx, things.path(namespace), last-1); err != nil {
					return nil, err
				}
			}
			return dynamically.Resource(resource).Namespace(namespace).List(ctx, o)
		})
		p.PageSize = 17
		all, _, err := p.List(ctx, metav1.ListOptions{})
		harness.Check(t, err) // it then falls back to a full list
		items, err := meta.ExtractList(all)
		harness.Check(t, err)
		var got []string
		for _, item := range items {
			got = append(got, item.(*unstructured.Unstructured).GetName())
		}
		harness.RequireEqual(t, "the list after an expiry", got, names)
		if pages < 4 {
			t.Errorf("%d pages: it was not overtaken", pages)
		}
	})
}

// TestKubectlGet_ChunkSize_ReturnsEveryObject checks kubectl's requests and output.
func TestKubectlGet_ChunkSize_ReturnsEveryObject(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	namespace := harness.NewName("ns")
	names := s.fill(t, ctx, maps, namespace, "first", 100)
	s.fill(t, ctx, things, namespace, "first", 100)
	for _, k := range []kind{maps, things} {
		for _, args := range [][]string{{"--output=name"}, {"--no-headers"}, {"--output=jsonpath={range .items[*]}{.metadata.name}{\"\\n\"}{end}"}} {
			r, err := s.replicas[0].Kubectl(ctx, "", append([]string{"--namespace=" + namespace, "get", k.plural, "--chunk-size=17", "--v=6"}, args...)...)
			harness.Check(t, err)
			if r.Code != 0 {
				t.Fatalf("kubectl get %s %s: %d %s", k.plural, args, r.Code, r.Stderr)
			}
			var got []string
			for line := range strings.Lines(r.Stdout) {
				line = strings.Fields(line)[0]
				got = append(got, line[strings.LastIndexByte(line, '/')+1:])
			}
			harness.RequireEqual(t, fmt.Sprintf("kubectl get %s %s", k.plural, args), got, names)
			if n := strings.Count(r.Stderr, "limit=17"); n != 6 {
				t.Errorf("kubectl get %s %s: %d pages, want 6:\n%s", k.plural, args, n, r.Stderr)
			}
		}
	}
}
