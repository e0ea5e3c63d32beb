package readpath

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"testing"

	"k8s.io/kube-openapi/pkg/handler3"

	"github.com/stratakube/strata/test/harness"
)

// TestOpenAPI_CustomResource_DocumentEqualsUpstream compares the OpenAPI v3 documents of custom
// resources, which are built on request, with those of upstream's controller: for a new definition,
// for a second one in the same group, after a change, and after the deletion.
func TestOpenAPI_CustomResource_DocumentEqualsUpstream(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const document = "apis/" + group + "/v7" // no other test has this version
	// address returns the address of the document in the list of a server, or "".
	address := func(ctx context.Context, from *harness.API) (string, error) {
		r, err := from.Do(ctx, http.MethodGet, "/openapi/v3", "", nil)
		if err != nil {
			return "", err
		}
		var list handler3.OpenAPIV3Discovery
		err = json.Unmarshal(r.Body, &list)
		return list.Paths[document].ServerRelativeURL, err
	}
	// equal waits until both servers have a document with texts, and compares the documents.
	equal := func(texts ...string) {
		t.Helper()
		for _, accept := range []string{"application/json", "application/com.github.proto-openapi.spec.v3.v1.0+protobuf"} {
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				var bodies [2][]byte
				for i, from := range []*harness.API{api, upstream} {
					path, err := address(ctx, from)
					if err != nil || path == "" {
						return false, fmt.Errorf("server %d has no document: %v", i, err)
					}
					u, err := url.Parse(path)
					if err != nil {
						return false, err
					}
					r, err := from.DoAs(ctx, http.MethodGet, u.Path, u.RawQuery, "", accept, nil)
					if err != nil {
						return false, err
					}
					if got := r.Header.Get("Content-Type"); r.Code != http.StatusOK || got != accept || r.Header.Get("Cache-Control") != "public, immutable" {
						return false, fmt.Errorf("server %d: status %d, %s, header %v", i, r.Code, got, r.Header)
					}
					for _, text := range texts {
						if !bytes.Contains(r.Body, []byte(text)) {
							return false, fmt.Errorf("server %d: the document lacks %q", i, text)
						}
					}
					bodies[i] = r.Body
				}
				return bytes.Equal(bodies[0], bodies[1]), fmt.Errorf("%s: the documents differ: %d and %d bytes", accept, len(bodies[0]), len(bodies[1]))
			}))
		}
	}

	schema := func(field string) string {
		return fmt.Sprintf(`{"type":"object","properties":{%q:{"type":"string","description":"a text","default":"x"}}}`, field)
	}
	first := definition{plural: "pages", kind: "Page", versions: []version{{name: "v7", spec: schema("heading"), fields: []string{".spec.heading"}}}}
	first.create(t, ctx)
	equal("Page", "heading")
	second := definition{plural: "books", kind: "Book", versions: []version{{name: "v7", spec: schema("author")}}}
	second.create(t, ctx)
	equal("Page", "heading", "Book", "author")
	first.versions[0].spec, first.versions[0].fields = schema("headline"), nil
	first.update(t, ctx)
	equal("Page", "headline", "Book", "author")

	first.delete(t, ctx)
	second.delete(t, ctx)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		path, err := address(ctx, api)
		return path == "", fmt.Errorf("the document is still at %q: %v", path, err)
	}))
}
