package dropin

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// corrupt is a resource with a value that cannot be decoded or decrypted.
type corrupt struct {
	what, path, key, value string
	body                   func(name string) object
}

var corruptions = []corrupt{
	{"not decodable", defaultMaps, "/registry/configmaps/default/", "garbage", configMap},
	{"cut off", "/apis/coordination.k8s.io/v1/namespaces/default/leases", "/registry/leases/default/",
		"k8s\x00\n\x1d\n\x16coordination.k8s.io/v1\x12\x05Lease\x12\xff\xff\x01cut", func(name string) object { return object{"metadata": object{"name": name}} }},
	{"unknown key", defaultSecrets, secretsPrefix, "k8s:enc:aescbc:v1:nobody:garbage",
		func(name string) object { return object{"metadata": object{"name": name}} }},
	{"custom, not decodable", thingsPath, thingsPrefix, "garbage", func(name string) object { return thing(name, "") }},
}

// TestUndecodableValue_FailsListOnly writes such values to etcd, for a running server and for a
// starting one. LIST returns an error; all other requests for the same resource succeed; after the
// value is deleted, LIST succeeds again.
func TestUndecodableValue_FailsListOnly(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	config := newEncryption(t, harness.Provider{Kind: "aescbc", Key: "key1"}, identity)
	s := env.APIServer(etcd, config.Flag(), "--feature-gates=AllowUnsafeMalformedObjectDeletion=true")
	api := s.API()
	createThings(t, ctx, api)

	for _, c := range corruptions {
		t.Run(c.what+" while running", func(t *testing.T) {
			create(t, ctx, api, c.path, c.body("a"))
			list, err := api.List(ctx, c.path, "")
			harness.Check(t, err)
			watch := harness.StartWatch(t, ctx, api, c.path, "fieldSelector=metadata.name%3Da&resourceVersion="+list.Metadata.ResourceVersion)
			_, err = client.Put(ctx, c.key+"garbage", c.value)
			harness.Check(t, err)
			requireNeighboursServed(t, ctx, api, c, watch)
		})
	}
	if harness.Engine() == harness.Upstream {
		// Its cacher retries its start, and recovers within some seconds.
		for _, c := range corruptions {
			_, err := client.Delete(ctx, c.key+"garbage")
			harness.Check(t, err)
			harness.AwaitList(t, ctx, api, c.path)
		}
		return
	}
	// The same for a server that starts with the corrupt value. It is not ready, because its own
	// informer of Secrets cannot list them, but it serves.
	harness.Check(t, s.Stop())
	s.StartAgain()
	harness.Check(t, s.Await(ctx, "/livez"))
	for _, c := range corruptions {
		t.Run(c.what+" at the start", func(t *testing.T) {
			harness.Check(t, s.Await(ctx, c.path+"/a"))
			requireNeighboursServed(t, ctx, api, c, nil)
		})
		t.Run(c.what+" goes", func(t *testing.T) {
			_, err := client.Delete(ctx, c.key+"garbage")
			harness.Check(t, err)
			list := harness.AwaitList(t, ctx, api, c.path)
			w := harness.StartWatch(t, ctx, api, c.path, "resourceVersion="+list.Metadata.ResourceVersion)
			create(t, ctx, api, c.path, c.body("z"))
			expectEvent(t, ctx, w, "ADDED", "z")
		})
		t.Run(c.what+" is deleted by force", func(t *testing.T) {
			_, err := client.Put(ctx, c.key+"garbage", c.value)
			harness.Check(t, err)
			requireNotReadable(t, ctx, api, c.path)
			r, err := api.Do(ctx, http.MethodDelete, c.path+"/garbage", "", object{
				"apiVersion": "v1", "kind": "DeleteOptions", "ignoreStoreReadErrorWithClusterBreakingPotential": true})
			harness.Check(t, err)
			if r.Code != http.StatusOK {
				t.Errorf("unsafe deletion: %v", r.Err())
			}
			harness.AwaitList(t, ctx, api, c.path)
		})
	}
}

// requireNotReadable checks the error for the object: GET and LIST fail, with an error other than
// 404.
func requireNotReadable(t *testing.T, ctx context.Context, api *harness.API, path string) {
	t.Helper()
	for _, target := range []string{path, path + "/garbage"} {
		var r *harness.Response
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
			r, err = api.Do(ctx, http.MethodGet, target, "", nil)
			return err == nil && r.Code != http.StatusOK && r.Code != http.StatusTooManyRequests, err
		}))
		if status := r.Status(); r.Code != http.StatusInternalServerError || status.Status != metav1.StatusFailure {
			t.Errorf("get %s: %v, want 500", target, r.Err())
		}
	}
}

// requireNeighboursServed checks that other objects of the resource can be read, written and
// watched.
func requireNeighboursServed(t *testing.T, ctx context.Context, api *harness.API, c corrupt, running *harness.Watch) {
	t.Helper()
	path := c.path
	requireNotReadable(t, ctx, api, path)
	if harness.Engine() == harness.Upstream {
		return // its cacher ends all watches and cannot restart
	}
	if _, err := api.Get(ctx, path+"/a", ""); err != nil {
		t.Errorf("get of another: %v", err)
	}
	if _, err := api.Get(ctx, path+"/a", "resourceVersion=0"); err != nil {
		t.Errorf("get of another at any resource version: %v", err)
	}
	patched, err := api.Patch(ctx, path+"/a", fmt.Sprintf(`{"metadata":{"annotations":{"touched":"%d"}}}`, time.Now().UnixNano()))
	harness.Check(t, err)
	if running != nil {
		if o := expectEvent(t, ctx, running, "MODIFIED", "a"); o.Metadata.ResourceVersion != patched.Metadata.ResourceVersion {
			t.Errorf("event at %s, want %s", o.Metadata.ResourceVersion, patched.Metadata.ResourceVersion)
		}
	}
	w := harness.StartWatch(t, ctx, api, path, "fieldSelector=metadata.name%3Dneighbour&resourceVersion="+patched.Metadata.ResourceVersion)
	create(t, ctx, api, path, c.body("neighbour"))
	expectEvent(t, ctx, w, "ADDED", "neighbour")
	harness.Check(t, api.Delete(ctx, path+"/neighbour"))
	expectEvent(t, ctx, w, "DELETED", "neighbour")
	w.Close()
	one := harness.StartWatch(t, ctx, api, path, "fieldSelector=metadata.name%3Da")
	expectEvent(t, ctx, one, "ADDED", "a")
	one.Close()
}
