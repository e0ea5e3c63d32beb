package replica

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// object is an object to write.
type object = map[string]any

func configMap(name string, data map[string]string) object {
	return object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": name}, "data": data}
}

const configMaps = "/api/v1/namespaces/default/configmaps"

// TestReplica_WriteThenConsistentRead_SeesWrite: a client of a replica reads its writes.
func TestReplica_WriteThenConsistentRead_SeesWrite(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	api, configMaps := s.replica.API(), s.maps(ctx, t)
	for i := range 20 {
		name := fmt.Sprintf("own-write-%d", i)
		created, err := api.Create(ctx, configMaps, configMap(name, map[string]string{"n": "1"}))
		harness.Check(t, err)
		read, err := api.Get(ctx, configMaps+"/"+name, "")
		harness.Check(t, err)
		if read.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
			t.Errorf("%s: read resource version %s after the write of %s", name, read.Metadata.ResourceVersion, created.Metadata.ResourceVersion)
		}
		_, err = api.Patch(ctx, configMaps+"/"+name, `{"data":{"n":"2"}}`)
		harness.Check(t, err)
		list, err := api.List(ctx, configMaps, "fieldSelector=metadata.name="+name)
		harness.Check(t, err)
		if len(list.Items) != 1 || list.Items[0].Data["n"] != "2" {
			t.Errorf("%s: listed %+v after the patch", name, list.Items)
		}
		harness.Check(t, api.Delete(ctx, configMaps+"/"+name))
		if r, err := api.Do(ctx, http.MethodGet, configMaps+"/"+name, "", nil); err != nil || r.Code != http.StatusNotFound {
			t.Errorf("%s: read after the deletion: %v, %v", name, r, err)
		}
	}
	passed, err := api.Sum(ctx, "strata_replica_proxy_requests_total", `code="201"`)
	harness.Check(t, err)
	if passed < 20 {
		t.Errorf("the replica has sent %v creations to the primary, want at least 20", passed)
	}
}
