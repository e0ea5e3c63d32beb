package readpath

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// old are objects of old releases, without fields that were added later, and the fields that reads
// return in addition.
var old = []struct{ key, path, spec, shows string }{
	{"services/specs", "services", `{"clusterIP":"10.0.0.77","ports":[{"port":80,"protocol":"TCP","targetPort":80}],"sessionAffinity":"None","type":"ClusterIP"}`,
		`"clusterIPs":["10.0.0.77"]`},
	{"services/specs", "services", `{"clusterIP":"10.0.0.78","ports":[{"port":80,"protocol":"TCP","targetPort":80}],"sessionAffinity":"None","type":"ClusterIP"}`,
		`"ipFamilyPolicy":"SingleStack"`},
	{"services/specs", "services", `{"clusterIP":"None","selector":{"a":"b"},"sessionAffinity":"None","type":"ClusterIP"}`, `"ipFamilies":["IPv4"]`},
	{"services/specs", "services", `{"clusterIP":"None","sessionAffinity":"None","type":"ClusterIP"}`, `"ipFamilies":["IPv4","IPv6"]`},
	{"services/specs", "services", `{"externalName":"example.com","sessionAffinity":"None","type":"ExternalName","internalTrafficPolicy":"Cluster"}`,
		`"externalName":"example.com"`},
	{"persistentvolumeclaims", "persistentvolumeclaims",
		`{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}},"volumeMode":"Filesystem","dataSource":{"kind":"PersistentVolumeClaim","name":"other"}}`,
		`"dataSourceRef":{"apiGroup":null,"kind":"PersistentVolumeClaim","name":"other"}`},
}

// TestOldStoredObject_IsDecoratedOnRead: Services and PersistentVolumeClaims are changed above the
// storage layer.
func TestOldStoredObject_IsDecoratedOnRead(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "old")
	kinds := map[string]string{"services": "Service", "persistentvolumeclaims": "PersistentVolumeClaim"}
	type watch struct{ path, query, shows string }
	var watches []watch
	for i, o := range old {
		base := "/api/v1/namespaces/old/" + o.path
		since, err := api.List(ctx, base, "")
		harness.Check(t, err)
		name := fmt.Sprintf("old-%d", i)
		_, err = etcd.Put(ctx, "/registry/"+o.key+"/old/"+name, fmt.Sprintf(
			`{"kind":%q,"apiVersion":"v1","metadata":{"name":%q,"namespace":"old","uid":"uid-%d","creationTimestamp":"2019-01-01T00:00:00Z"},"spec":%s,"status":{}}`,
			kinds[o.path], name, i, o.spec))
		harness.Check(t, err)

		untilBody(t, ctx, base+"/"+name, "", o.shows)
		untilBody(t, ctx, base, "fieldSelector=metadata.name%3D"+name, o.shows)
		list := untilBody(t, ctx, base, "", o.shows)
		untilBody(t, ctx, "/api/v1/"+o.path, "resourceVersion=0", o.shows)
		if bytes.Contains(list.Body, []byte(`"externalName":"example.com","internalTrafficPolicy"`)) {
			t.Errorf("%s shows %s", base, list.Body)
		}
		for _, query := range []string{"timeoutSeconds=1&fieldSelector=metadata.name%3D" + name, "timeoutSeconds=1&resourceVersion=" + since.Metadata.ResourceVersion} {
			watches = append(watches, watch{base, "watch=true&" + query, o.shows})
		}
		allByBytes(t, ctx, [2]string{base, ""}, [2]string{base + "/" + name, ""})
	}
	var reads [][2]string
	t.Run("watch", func(t *testing.T) {
		for _, w := range watches { // each takes a second
			reads = append(reads, [2]string{w.path, w.query})
			t.Run(w.query, func(t *testing.T) {
				t.Parallel()
				if r := same(t, ctx, w.path, w.query); !bytes.Contains(r.Body, []byte(w.shows)) {
					t.Errorf("%s?%s shows %s", w.path, w.query, r.Body)
				}
			})
		}
	})
	allByBytes(t, ctx, reads...)
}
