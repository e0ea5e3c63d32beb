package skew

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// requireDefinitionsShared creates a definition of custom resources through one server, changes its
// storage version and its served versions, and deletes it: the other server follows each step.
func requireDefinitionsShared(t *testing.T, ctx context.Context, p *pair) {
	for i, dir := range p.directions() {
		t.Run(dir.name, func(t *testing.T) {
			d := definition{fmt.Sprintf("shared-%d.example.com", i)}
			d.create(t, ctx, dir.from)
			apis := []*harness.API{dir.from, dir.to}
			for _, api := range apis {
				for _, version := range []string{"v1", "v2"} {
					d.await(t, ctx, api, version, http.StatusOK)
				}
			}
			first := create(t, ctx, dir.from, d.things("v1"), d.thing("v1", "first"))
			d.requireStored(t, ctx, p, "first", "v1")
			got, err := dir.to.Get(ctx, d.things("v2")+"/first", "")
			harness.Check(t, err)
			if got.APIVersion != d.group+"/v2" || got.Metadata.ResourceVersion != first.Metadata.ResourceVersion {
				t.Errorf("the first is %s at %s, want %s/v2 at %s", got.APIVersion, got.Metadata.ResourceVersion, d.group, first.Metadata.ResourceVersion)
			}
			watches := map[string]*harness.Watch{}
			for _, version := range []string{"v1", "v2"} {
				watches[version] = watchFrom(t, ctx, dir.to, d.things(version), first.Metadata.ResourceVersion)
			}

			// A change of the storage version ends no open watch of upstream, and does not change
			// stored objects: each server writes the new version once it has observed the change.
			d.change(t, ctx, dir.to, d.versions("v2", "v1", "v2"))
			var written []harness.Object
			for j, api := range apis {
				harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					o, err := api.Create(ctx, d.things("v1"), object{"apiVersion": d.group + "/v1", "kind": "Thing",
						"metadata": object{"generateName": fmt.Sprintf("changed-%d-", j)}})
					if err != nil {
						return false, err
					}
					written = append(written, o)
					stored := d.stored(t, ctx, p, o.Metadata.Name)
					return stored == d.group+"/v2", fmt.Errorf("server %d stores %s", j, stored)
				}))
			}
			d.requireStored(t, ctx, p, "first", "v1")
			for _, api := range apis {
				for _, version := range []string{"v1", "v2"} {
					l := list(t, ctx, api, d.things(version), "")
					if len(l.Items) != 1+len(written) || slices.ContainsFunc(l.Items, func(o harness.Object) bool { return o.APIVersion != d.group+"/"+version }) {
						t.Errorf("%s lists %d things, want %d of its version: %+v", version, len(l.Items), 1+len(written), l.Items)
					}
				}
			}
			for version, w := range watches {
				d.requireDelivered(t, ctx, dir.to, version, w, written)
			}

			// v1 is no longer served: upstream ends its watches.
			d.change(t, ctx, dir.from, d.versions("v2", "v2"))
			for _, api := range apis {
				d.await(t, ctx, api, "v1", http.StatusNotFound)
				d.await(t, ctx, api, "v2", http.StatusOK)
			}

			harness.Check(t, dir.to.Delete(ctx, d.path()))
			for _, api := range apis {
				d.await(t, ctx, api, "v2", http.StatusNotFound)
			}
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				r, err := dir.from.Do(ctx, http.MethodGet, d.path(), "", nil)
				if err != nil {
					return false, err
				}
				return r.Code == http.StatusNotFound, fmt.Errorf("get of the deleted definition: %d", r.Code)
			}))
			resp, err := p.client.Get(ctx, d.prefix())
			harness.Check(t, err)
			if resp.Count != 0 {
				t.Errorf("%d things of a deleted definition", resp.Count)
			}
		})
	}
}

// requireDelivered requires that a watch delivers all written objects. If the server ends the watch
// because of a change of the definition, a new watch after the last event continues, as in an
// informer.
func (d definition) requireDelivered(t *testing.T, ctx context.Context, api *harness.API, version string, w *harness.Watch, written []harness.Object) {
	t.Helper()
	last := ""
	for i := 0; i < len(written); {
		e, err := w.Next(ctx)
		if err != nil && ctx.Err() == nil {
			if last == "" {
				last = fmt.Sprint(harness.Revision(t, written[0].Metadata.ResourceVersion) - 1)
			}
			w = watchFrom(t, ctx, api, d.things(version), last)
			continue
		}
		harness.Check(t, err)
		if e.Type == "BOOKMARK" {
			continue
		}
		if e.Type != "ADDED" || e.Object.Key() != written[i].Key() || e.Object.APIVersion != d.group+"/"+version {
			t.Fatalf("watch of %s: got %s of %s %s (%s), want ADDED of %s", version, e.Type, e.Object.APIVersion, e.Object.Key(), e.Status.Message, written[i].Key())
		}
		last = e.Object.Metadata.ResourceVersion
		i++
	}
}

// stored returns the API version of a stored object of the default namespace.
func (d definition) stored(t *testing.T, ctx context.Context, p *pair, name string) string {
	t.Helper()
	resp, err := p.client.Get(ctx, d.prefix()+name)
	harness.Check(t, err)
	if len(resp.Kvs) != 1 {
		t.Fatalf("%d keys %s%s", len(resp.Kvs), d.prefix(), name)
	}
	var o struct{ APIVersion string }
	harness.Check(t, json.Unmarshal(resp.Kvs[0].Value, &o))
	return o.APIVersion
}

func (d definition) requireStored(t *testing.T, ctx context.Context, p *pair, name, version string) {
	t.Helper()
	if got := d.stored(t, ctx, p, name); strings.TrimPrefix(got, d.group+"/") != version {
		t.Errorf("%s is stored as %s, want %s", name, got, version)
	}
}
