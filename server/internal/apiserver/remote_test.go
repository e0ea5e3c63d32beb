package apiserver

import (
	"context"
	"strconv"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/tools/cache"
	fakesource "k8s.io/client-go/tools/cache/testing"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"github.com/stratakube/strata/internal/test/testcheck"
)

var widgets = schema.GroupVersion{Group: "example.com", Version: "v1"}

// registered returns the APIService of widgets as of a revision.
func registered(revision int, remote bool) *apiregistrationv1.APIService {
	s := &apiregistrationv1.APIService{
		ObjectMeta: metav1.ObjectMeta{Name: "v1.example.com", ResourceVersion: strconv.Itoa(revision)},
		Spec:       apiregistrationv1.APIServiceSpec{Group: widgets.Group, Version: widgets.Version},
	}
	if remote {
		s.Spec.Service = &apiregistrationv1.ServiceReference{Namespace: "default", Name: "elsewhere"}
	}
	return s
}

// TestAPIService_BeforeInformerSync_VersionIsLocalUntilReceived: the aggregator proxies no version
// before its informer has the APIService.
func TestAPIService_BeforeInformerSync_VersionIsLocalUntilReceived(t *testing.T) {
	informer := cache.NewSharedIndexInformer(fakesource.NewFakeControllerSource(), &apiregistrationv1.APIService{}, 0, cache.Indexers{})
	r := newRemoteVersions()
	testcheck.NoError(t, r.follow(informer))
	if informer.HasSynced() || !r.local(widgets) {
		t.Error("not local, though the aggregator has no APIService")
	}
	if _, err := r.received(registered(1, true)); err != nil {
		t.Fatal(err)
	}
	if informer.HasSynced() || r.local(widgets) {
		t.Error("local after the informer has received a remote APIService")
	}
}

// TestAPIService_BeforeHandlersSync_NothingIsStored: a replica proxies every version until it knows
// which of them are local.
func TestAPIService_BeforeHandlersSync_NothingIsStored(t *testing.T) {
	informer := cache.NewSharedIndexInformer(fakesource.NewFakeControllerSource(), &apiregistrationv1.APIService{}, 0, cache.Indexers{})
	r := newRemoteVersions()
	testcheck.NoError(t, r.follow(informer))
	resource := widgets.WithResource("widgets")
	resources := &Resources{follow: &followedInformers{remote: r}, builtIn: map[schema.GroupVersionResource][]string{resource: {""}}}
	info := &request.RequestInfo{APIGroup: resource.Group, APIVersion: resource.Version, Resource: resource.Resource}
	if resources.Stored(info) {
		t.Error("stored before the APIServices have arrived")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go informer.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), r.known) {
		t.Fatal("the informer did not sync")
	}
	if !resources.Stored(info) {
		t.Error("not stored after the APIServices have arrived")
	}
}

// TestAPIService_StaleEvent_IsIgnored: an object that the informer receives takes precedence over
// later notifications of earlier changes.
func TestAPIService_StaleEvent_IsIgnored(t *testing.T) {
	receive := func(revision int, remote bool) func(*remoteVersions) {
		return func(r *remoteVersions) {
			if obj, err := r.received(registered(revision, remote)); err != nil || obj == nil {
				t.Errorf("received %v, %v", obj, err)
			}
		}
	}
	notify := func(revision int, remote bool) func(*remoteVersions) {
		return func(r *remoteVersions) { r.changed(registered(revision, remote)) }
	}
	for name, test := range map[string]struct {
		steps []func(*remoteVersions)
		local bool
	}{
		"nothing":                           {local: true},
		"received as local":                 {steps: []func(*remoteVersions){receive(1, false)}, local: true},
		"received as remote":                {steps: []func(*remoteVersions){receive(1, true)}},
		"then an event with an older state": {steps: []func(*remoteVersions){receive(1, false), receive(2, true), notify(1, false)}},
		"then an event with the same state": {steps: []func(*remoteVersions){receive(2, true), notify(1, false), notify(2, true)}},
		"received as local again":           {steps: []func(*remoteVersions){receive(2, true), notify(2, true), receive(3, false)}},
		"event: local again":                {steps: []func(*remoteVersions){receive(2, true), notify(2, true), receive(3, false), notify(3, false)}, local: true},
		"the same event twice":              {steps: []func(*remoteVersions){receive(2, true), notify(2, true), notify(2, true)}},
		"deleted":                           {steps: []func(*remoteVersions){receive(2, true), notify(2, true), func(r *remoteVersions) { r.deleted(registered(3, true)) }}, local: true},
		"deleted, then listed again":        {steps: []func(*remoteVersions){receive(2, true), receive(4, true), notify(2, true), func(r *remoteVersions) { r.deleted(registered(3, true)) }}},
		"deletion missed": {steps: []func(*remoteVersions){receive(2, true), notify(2, true), func(r *remoteVersions) {
			r.deleted(cache.DeletedFinalStateUnknown{Key: "v1.example.com", Obj: registered(2, true)})
		}}, local: true},
		"deletion missed, then listed again": {steps: []func(*remoteVersions){receive(2, true), notify(2, true), receive(5, true), func(r *remoteVersions) {
			r.deleted(cache.DeletedFinalStateUnknown{Key: "v1.example.com", Obj: registered(2, true)})
		}}},
	} {
		r := newRemoteVersions()
		for _, step := range test.steps {
			step(r)
		}
		if r.local(widgets) != test.local {
			t.Errorf("%s: local is %v", name, !test.local)
		}
		if !r.local(schema.GroupVersion{Group: "example.com", Version: "v2"}) {
			t.Errorf("%s: another version is remote", name)
		}
	}
}

// TestAPIService_CachedAsRemote_VersionIsNotLocal: a version is remote as soon as the informer's
// cache contains it, independent of notifications.
func TestAPIService_CachedAsRemote_VersionIsNotLocal(t *testing.T) {
	source := fakesource.NewFakeControllerSource() // it assigns resource versions
	source.Add(registered(0, false))
	informer := cache.NewSharedIndexInformer(source, &apiregistrationv1.APIService{}, 0, cache.Indexers{})
	r := newRemoteVersions()
	testcheck.NoError(t, r.follow(informer))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go informer.RunWithContext(ctx)
	local := func() bool { return r.local(widgets) }
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) || !local() {
		t.Fatal("not local")
	}
	cachedAsRemote := func() bool {
		obj, ok, err := informer.GetIndexer().GetByKey("v1.example.com")
		return err == nil && ok && obj.(*apiregistrationv1.APIService).Spec.Service != nil
	}
	for range 100 {
		source.Modify(registered(0, true))
		for !cachedAsRemote() {
			if ctx.Err() != nil {
				t.Fatal("the informer does not see a change")
			}
		}
		if local() {
			t.Fatal("local, though the cached APIService is remote")
		}
		source.Modify(registered(0, false))
		for !local() {
			if ctx.Err() != nil {
				t.Fatal("not local again")
			}
		}
	}
	source.Modify(registered(0, true))
	source.Delete(registered(0, true))
	if !cache.WaitForCacheSync(ctx.Done(), local) {
		t.Fatal("not local after the deletion")
	}
}
