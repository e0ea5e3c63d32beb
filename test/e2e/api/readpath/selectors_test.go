package readpath

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestSelectors_NumberOutOfRange_FailsEveryList: a decoder of JSON fails at a number out of range.
// A list by a label that the object does not have reports it as one without a selector, and as
// upstream does, though the label could be read in the stored bytes; when the object is gone, lists
// succeed again.
func TestSelectors_NumberOutOfRange_FailsEveryList(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "floats")
	d := definition{group: "floats.example.com", plural: "floats", kind: "Float", versions: []version{{name: "v1", spec: anySpec}}}
	d.create(t, ctx)
	put := func(name, label, spec string) (key string) {
		t.Helper()
		key = "/registry/" + d.in() + "/floats/floats/" + name
		_, err := etcd.Put(ctx, key, fmt.Sprintf(`{"apiVersion":"%s/v1","kind":"Float","metadata":{"name":%q,"namespace":"floats","uid":%q,"labels":{"n":%q}},"spec":%s}`, d.in(), name, name, label, spec))
		harness.Check(t, err)
		return key
	}
	for i := range 70 { // more than a list examines without a plan
		put(fmt.Sprintf("float-%02d", i), fmt.Sprint(i%2), `{"n":1.5}`)
	}
	answer := func(code int) {
		t.Helper()
		for _, server := range []*harness.API{api, upstream} {
			for _, query := range []string{"", "labelSelector=n%3D0", "labelSelector=n%3D0", "labelSelector=n%3D7"} {
				// by stored values, and by the index
				harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					r, err := server.Do(ctx, http.MethodGet, d.path("v1", "floats"), query, nil)
					if err != nil {
						return false, err
					}
					return r.Code == code, fmt.Errorf("%q: %d %s, want %d", query, r.Code, r.Err(), code)
				}))
			}
		}
	}
	answer(http.StatusOK)
	bad := put("float-35-x", "7", `{"n":1e999}`)
	answer(http.StatusInternalServerError)
	_, err := etcd.Delete(ctx, bad)
	harness.Check(t, err)
	answer(http.StatusOK)
}
