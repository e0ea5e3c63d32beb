// Package tokens tests continue tokens from the outside: the servers that open them, and the
// information that a client can read from them.
package tokens

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const testTimeout = 10 * time.Minute

// requireStrata skips a test of a feature that upstream does not have.
func requireStrata(t *testing.T) {
	t.Helper()
	if harness.Engine() == harness.Upstream {
		t.Skip("upstream's tokens are plain")
	}
}

const (
	sealing     = "--strata-feature-gates=SealedContinueTokens=true"
	notSealing  = "--strata-feature-gates=SealedContinueTokens=false"
	refusePlain = "--strata-refuse-plain-continue-tokens"

	ringKey = "/registry/strata/continue-token-keys"

	// secretName is the prefix of all object names: no token may contain it.
	secretName = "very-secret-name-"
)

type object = map[string]any

// newEncryption encrypts Secrets with the first key and decrypts with all of them.
func newEncryption(t *testing.T, keys ...string) harness.Encryption {
	return harness.NewEncryption(t, []string{"secrets"}, harness.Keys("aescbc", keys...)...)
}

// fill creates objects of a resource in a namespace.
func fill(t *testing.T, ctx context.Context, api *harness.API, path string, n int, more object) {
	t.Helper()
	for i := range n {
		o := object{"metadata": object{"name": fmt.Sprintf("%s%03d", secretName, i)}}
		for k, v := range more {
			o[k] = v
		}
		_, err := api.Create(ctx, path, o)
		harness.Check(t, err)
	}
}

func get(t *testing.T, ctx context.Context, api *harness.API, path, query, accept string) *harness.Response {
	t.Helper()
	return harness.Must[*harness.Response](t)(api.DoAs(ctx, http.MethodGet, path, query, "", accept, nil))
}

// page is the common part of a page of a list and of a table.
type page struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
		Continue        string `json:"continue"`
	} `json:"metadata"`
	Items []json.RawMessage `json:"items"`
	Rows  []json.RawMessage `json:"rows"`
}

// readPage reads a page; the token of the first page is "".
func readPage(t *testing.T, ctx context.Context, api *harness.API, path, token string, limit int, accept string) page {
	t.Helper()
	var r *harness.Response
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r = get(t, ctx, api, path, query(limit, token), accept)
		// A slow machine may keep a list waiting for too long.
		return r.Code != http.StatusTooManyRequests || r.Header.Get("Retry-After") == "", r.Err()
	}))
	if r.Code != http.StatusOK {
		t.Fatalf("page of %s with token %q: %v", path, token, r.Err())
	}
	var p page
	harness.Check(t, json.Unmarshal(r.Body, &p))
	return p
}

func query(limit int, token string) string {
	return fmt.Sprintf("limit=%d&continue=%s", limit, url.QueryEscape(token))
}

// requireSealed fails unless a token has the sealed form, and contains no name in any encoding.
func requireSealed(t *testing.T, token string) {
	t.Helper()
	body, ok := strings.CutPrefix(token, "s1.")
	if !ok {
		t.Fatalf("the token %q is not sealed", token)
	}
	data, err := base64.RawURLEncoding.DecodeString(body)
	if err != nil {
		t.Fatalf("the token %q: %v", token, err)
	}
	for _, text := range []string{token, string(data)} {
		if strings.Contains(text, "secret") || strings.Contains(text, "default") {
			t.Fatalf("the token %q shows a name", token)
		}
	}
}

func requirePlain(t *testing.T, token string) {
	t.Helper()
	data, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || !strings.Contains(string(data), `"meta.k8s.io/v1"`) {
		t.Fatalf("the token %q is not plain: %v", token, err)
	}
}

// requireRefused fails unless the answer has the code and the words in its message, and no name of
// an object.
func requireRefused(t *testing.T, what string, r *harness.Response, code int, words string) {
	t.Helper()
	status := r.Status()
	if r.Code != code || !strings.Contains(status.Message, words) || strings.Contains(status.Message, secretName) {
		t.Errorf("%s: got %v, want %d with %q", what, r.Err(), code, words)
	}
}
