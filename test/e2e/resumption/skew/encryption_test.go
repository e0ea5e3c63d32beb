package skew

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// requireEncryptionShared creates Secrets through each server; the other reads them. Then a restart
// of Strata alone makes it encrypt with the second key, so that the servers use different keys, as
// in the middle of a rotation.
func requireEncryptionShared(t *testing.T, ctx context.Context, p *pair, e harness.Encryption) {
	keys := map[*harness.Server]string{p.strata: "one", p.peer: "one"}
	written := 0
	both := func() {
		t.Helper()
		for _, dir := range [][2]*harness.Server{{p.strata, p.peer}, {p.peer, p.strata}} {
			from, to := dir[0].API(), dir[1].API()
			at := list(t, ctx, to, defaultSecrets, "").Metadata.ResourceVersion
			w := watchFrom(t, ctx, to, defaultSecrets, at)
			name := fmt.Sprintf("secret-%d", written)
			written++
			o := create(t, ctx, from, defaultSecrets, object{"metadata": object{"name": name}, "stringData": object{"text": "of " + name}})
			expectEvent(t, ctx, w, "ADDED", o)
			w.Close()
			resp, err := p.client.Get(ctx, "/registry/secrets/default/"+name)
			harness.Check(t, err)
			if want := "k8s:enc:secretbox:v1:" + keys[dir[0]] + ":"; len(resp.Kvs) != 1 || !bytes.HasPrefix(resp.Kvs[0].Value, []byte(want)) {
				t.Errorf("%s is not stored as %s", name, want)
			}
		}
		for _, s := range []*harness.Server{p.strata, p.peer} {
			r, err := s.API().Read(ctx, defaultSecrets, "", "")
			harness.Check(t, err)
			for i := range written {
				text := base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "of secret-%d", i))
				if !strings.Contains(string(r.Body), text) {
					t.Errorf("a list does not show secret-%d", i)
				}
			}
		}
	}
	both()
	e.Write(t, harness.Keys("secretbox", "two", "one")...)
	harness.Check(t, p.strata.Stop())
	p.strata.Restart()
	keys[p.strata] = "two"
	both()
	// Each server rewrites an object that the other wrote with another key.
	for _, name := range []string{"secret-0", "secret-1"} {
		r, err := p.strata.API().Do(ctx, http.MethodGet, defaultSecrets+"/"+name, "", nil)
		harness.Check(t, err)
		updated, err := p.strata.API().Update(ctx, defaultSecrets+"/"+name, r.Body)
		harness.Check(t, err)
		resp, err := p.client.Get(ctx, "/registry/secrets/default/"+name)
		harness.Check(t, err)
		if len(resp.Kvs) != 1 || !bytes.HasPrefix(resp.Kvs[0].Value, []byte("k8s:enc:secretbox:v1:two:")) ||
			fmt.Sprint(resp.Kvs[0].ModRevision) != updated.Metadata.ResourceVersion {
			t.Errorf("%s is not rewritten with the second key", name)
		}
		if got, err := p.peer.API().Get(ctx, defaultSecrets+"/"+name, ""); err != nil || got.Metadata.ResourceVersion != updated.Metadata.ResourceVersion {
			t.Errorf("%s is %+v, %v, want it at %s", name, got.Metadata, err, updated.Metadata.ResourceVersion)
		}
	}
}
