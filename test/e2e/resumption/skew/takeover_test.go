package skew

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// TestTakeOver_AlternatingServers_InformersEqualEtcd serves one etcd with a peer, then with Strata,
// then with the peer again, and so on, one server at a time, under continuous informers and under
// writes to etcd while no server runs. After each change the informers' stores equal etcd. When
// Strata takes over, it refuses no resuming watch, and informers do not relist, unless their
// revisions are compacted.
func TestTakeOver_AlternatingServers_InformersEqualEtcd(t *testing.T) {
	t.Parallel()
	forEach(t, stockCombinations, func(t *testing.T, ctx context.Context, c combination) {
		peerProgram := program(t, c.peer)
		env := harness.New(t)
		etcd := env.StockEtcd(t, c.etcd)
		client := etcd.Client()
		d := definition{"takeover.example.com"}

		// A stopping server first reports that it is not ready, as in front of a load balancer.
		// client-go relists when the connection of a watch request breaks.
		const delay = "--shutdown-delay-duration=1s"
		peer := startPeer(env, peerProgram, etcd, delay)
		harness.Check(t, peer.Await(ctx, "/readyz"))
		d.create(t, ctx, peer.API())
		d.await(t, ctx, peer.API(), "v1", 200)
		fillEtcd(t, ctx, client, "/registry/configmaps/filled/", 300)
		for i := range 20 {
			create(t, ctx, peer.API(), d.things("v2"), d.thing("v2", fmt.Sprintf("thing-%02d", i)))
			create(t, ctx, peer.API(), defaultSecrets, object{"metadata": object{"name": fmt.Sprintf("secret-%02d", i)}})
		}

		strata := startStrata(env, etcd, delay)
		harness.Check(t, strata.Await(ctx, "/readyz"))
		harness.Check(t, strata.Stop())
		balancer := env.Balancer(peer, strata)
		informers := startInformers(t, ctx, balancer.Config, d)
		informers.requireEqual(t, ctx, client)

		// The first three changes keep history; etcd is compacted in the last two.
		running, stopped := peer, strata
		for i, compact := range []bool{false, false, false, true, true} {
			harness.Check(t, running.Stop())
			before := informers.counts()
			changeEtcd(t, ctx, client, d, i)
			if compact {
				_, err := client.Compact(ctx, etcdRevision(t, ctx, client))
				harness.Check(t, err)
			}
			stopped.Restart()
			running, stopped = stopped, running
			name := map[*harness.Server]string{strata: "strata", peer: "peer " + c.peer}[running]
			create(t, ctx, running.API(), defaultMaps, configMap(fmt.Sprintf("change-%d", i)))
			create(t, ctx, running.API(), d.things("v1"), d.thing("v1", fmt.Sprintf("change-%d", i)))
			_, err := running.API().Patch(ctx, defaultSecrets+"/secret-10", fmt.Sprintf(`{"metadata":{"labels":{"change":"%d"}}}`, i))
			harness.Check(t, err)
			informers.requireEqual(t, ctx, client)
			for informer, n := range informers.counts() {
				n := n.since(before[informer])
				t.Logf("change %d, to %s, compacted %v: %s: %+v", i, name, compact, informer, n)
				if running == strata && !compact && (n.gone != 0 || n.listed > n.broken) {
					t.Errorf("change %d: Strata has its history, and the informer of %s has listed: %+v", i, informer, n)
				}
				if compact && n.listed == 0 {
					t.Errorf("change %d, to %s: the informer of %s has not listed, but its revision was compacted", i, name, informer)
				}
			}
		}
	})
}

// changeEtcd modifies, deletes and creates objects like an API server unknown to the others.
func changeEtcd(t *testing.T, ctx context.Context, client *clientv3.Client, d definition, round int) {
	t.Helper()
	modify := func(key string) {
		t.Helper()
		resp, err := client.Get(ctx, key)
		harness.Check(t, err)
		if len(resp.Kvs) != 1 {
			t.Fatalf("%d keys %s", len(resp.Kvs), key)
		}
		_, err = client.Put(ctx, key, string(resp.Kvs[0].Value))
		harness.Check(t, err)
	}
	remove := func(key string) {
		t.Helper()
		resp, err := client.Delete(ctx, key)
		harness.Check(t, err)
		if resp.Deleted != 1 {
			t.Fatalf("%d keys %s", resp.Deleted, key)
		}
	}
	for i := range 20 {
		modify(fmt.Sprintf("/registry/configmaps/filled/map-%05d", 100+10*round+i))
	}
	for i := range 10 {
		remove(fmt.Sprintf("/registry/configmaps/filled/map-%05d", 10*round+i))
		name := fmt.Sprintf("new-%d-%d", round, i)
		_, err := client.Put(ctx, "/registry/configmaps/filled/"+name, rawConfigMap("filled", name, "new"))
		harness.Check(t, err)
	}
	modify(d.prefix() + "thing-10")
	remove(d.prefix() + fmt.Sprintf("thing-%02d", round))
	modify("/registry/secrets/default/secret-11")
	remove("/registry/secrets/default/" + fmt.Sprintf("secret-%02d", round))
}

// informer is a client-go informer whose requests are counted.
type informer struct {
	cache.SharedIndexInformer
	prefix string // key prefix of its resource in etcd

	mu     sync.Mutex
	counts counts
}

// counts are the counts of an informer's requests.
type counts struct {
	listed int // LISTs, and watches with initial events
	gone   int // resource versions refused by a server
	broken int // requests without an answer; client-go relists after such a watch
}

func (c counts) since(before counts) counts {
	return counts{c.listed - before.listed, c.gone - before.gone, c.broken - before.broken}
}

// count counts a request, which starts with the whole state or resumes, and its error.
func (i *informer) count(begins bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if begins {
		i.counts.listed++
	}
	switch {
	case err == nil:
	case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
		i.counts.gone++
	case apierrors.ReasonForError(err) == metav1.StatusReasonUnknown:
		i.counts.broken++
	}
}

// informers are keyed by the description of their objects.
type informers map[string]*informer

// startInformers starts informers of built-in and custom resources, in protobuf and JSON, of whole
// objects and of metadata.
func startInformers(t *testing.T, ctx context.Context, config *rest.Config, d definition) informers {
	t.Helper()
	encoded := rest.CopyConfig(config)
	encoded.ContentType = runtime.ContentTypeProtobuf
	encoded.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	typed, err := kubernetes.NewForConfig(encoded)
	harness.Check(t, err)
	untyped, err := dynamic.NewForConfig(config)
	harness.Check(t, err)
	partial, err := metadata.NewForConfig(metadata.ConfigFor(config))
	harness.Check(t, err)

	all := informers{}
	add := func(name, prefix string, kind runtime.Object, list func(context.Context, metav1.ListOptions) (runtime.Object, error),
		watches func(context.Context, metav1.ListOptions) (watch.Interface, error)) {
		i := &informer{prefix: "/registry/" + prefix + "/"}
		i.SharedIndexInformer = cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				l, err := list(ctx, o)
				i.count(o.Continue == "", err)
				return l, err
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				w, err := watches(ctx, o)
				i.count(o.SendInitialEvents != nil && *o.SendInitialEvents, err)
				if err != nil {
					return nil, err
				}
				return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
					if e.Type == watch.Error {
						i.count(false, apierrors.FromObject(e.Object))
					}
					return e, true
				}), nil
			},
		}, typed), kind, 0, cache.Indexers{})
		all[name] = i
	}
	configMaps, secrets := typed.CoreV1().ConfigMaps(""), typed.CoreV1().Secrets("")
	add("configmaps", "configmaps", &corev1.ConfigMap{}, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return configMaps.List(ctx, o)
	}, configMaps.Watch)
	add("secrets", "secrets", &corev1.Secret{}, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return secrets.List(ctx, o)
	}, secrets.Watch)
	for _, version := range []string{"v1", "v2"} {
		things := untyped.Resource(schema.GroupVersionResource{Group: d.group, Version: version, Resource: "things"})
		add("things "+version, d.group+"/things", &unstructured.Unstructured{}, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return things.List(ctx, o)
		}, things.Watch)
	}
	metadataOf := partial.Resource(schema.GroupVersionResource{Version: "v1", Resource: "configmaps"})
	add("metadata of configmaps", "configmaps", &metav1.PartialObjectMetadata{}, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return metadataOf.List(ctx, o)
	}, metadataOf.Watch)

	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{}, len(all))
	for _, i := range all {
		go func() { i.RunWithContext(ctx); done <- struct{}{} }()
	}
	t.Cleanup(func() {
		cancel()
		for range all {
			<-done
		}
	})
	for name, i := range all {
		if !cache.WaitForCacheSync(ctx.Done(), i.HasSynced) {
			t.Fatalf("the informer of %s: %v", name, context.Cause(ctx))
		}
	}
	return all
}

// counts returns the counts of each informer.
func (all informers) counts() map[string]counts {
	n := map[string]counts{}
	for name, i := range all {
		i.mu.Lock()
		n[name] = i.counts
		i.mu.Unlock()
	}
	return n
}

// requireEqual waits until each informer's store has the objects of etcd, at their revisions.
func (all informers) requireEqual(t *testing.T, ctx context.Context, client *clientv3.Client) {
	t.Helper()
	for name, i := range all {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			resp, err := client.Get(ctx, i.prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
			if err != nil {
				return false, err
			}
			want := map[string]string{}
			for _, kv := range resp.Kvs {
				want[strings.TrimPrefix(string(kv.Key), i.prefix)] = fmt.Sprint(kv.ModRevision)
			}
			got := map[string]string{}
			for _, item := range i.GetStore().List() {
				o, err := meta.Accessor(item)
				if err != nil {
					return false, err
				}
				got[o.GetNamespace()+"/"+o.GetName()] = o.GetResourceVersion()
			}
			return maps.Equal(got, want), fmt.Errorf("the informer of %s holds %d objects, etcd %d: %s", name, len(got), len(want), difference(got, want))
		}))
	}
}

// difference lists the keys with different values.
func difference(got, want map[string]string) string {
	var text strings.Builder
	for key, value := range want {
		if got[key] != value {
			fmt.Fprintf(&text, "%s at %q, want %q; ", key, got[key], value)
		}
	}
	for key := range got {
		if _, ok := want[key]; !ok {
			fmt.Fprintf(&text, "%s is too much; ", key)
		}
	}
	return text.String()
}
