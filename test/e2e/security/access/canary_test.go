package access

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

// verbosity of the server's log. At 8 and above, the client-go clients inside the server log
// response bodies.
func verbosity() int {
	if harness.Long() {
		return 10
	}
	return 7
}

// needle is a text that must not be found, in any of its possible encodings.
type needle struct {
	what  string
	forms []string
}

// newNeedle returns a unique text and the needle that finds it.
func newNeedle(what string) (string, needle) {
	text := "canary-" + rand.Text()
	return text, needleOf(what, text)
}

// needleOf returns the encodings of text: plain, hexadecimal, a hex dump with 16 bytes per line,
// and base64 at each of the three alignments.
func needleOf(what, text string) needle {
	n := needle{what: what, forms: []string{text, hex.EncodeToString([]byte(text))}}
	for at := 0; at < 16 && at+16 <= len(text); at++ {
		n.forms = append(n.forms, "|"+text[at:at+16]+"|")
	}
	for shift := range 3 {
		encoded := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", shift) + text + "xxx"))
		// The characters at both ends also encode bits of the neighbouring bytes.
		n.forms = append(n.forms, encoded[4:len(encoded)-8])
	}
	return n
}

// in returns the position of the text in data with its surrounding bytes, or "" if data does not
// contain it.
func (n needle) in(data []byte) string {
	for _, form := range n.forms {
		if i := bytes.Index(data, []byte(form)); i >= 0 {
			return fmt.Sprintf("%s: %.300q", n.what, data[max(0, i-100):min(len(data), i+200)])
		}
	}
	return ""
}

// TestNeedle_IsFoundInEveryEncoding: a needle is found in each encoding.
func TestNeedle_IsFoundInEveryEncoding(t *testing.T) {
	t.Parallel()
	text, n := newNeedle("it")
	for _, data := range []string{
		text, "a" + text, fmt.Sprintf("%q", text), fmt.Sprintf("%x", "a"+text), base64.StdEncoding.EncodeToString([]byte(text + "bcd")),
		base64.StdEncoding.EncodeToString([]byte("a" + text + "b")), base64.StdEncoding.EncodeToString([]byte("ab" + text + "cdef")),
		base64.RawURLEncoding.EncodeToString([]byte("abcdef" + text)), hex.Dump([]byte("abc" + text)), hex.Dump([]byte(text)),
	} {
		if n.in([]byte(data)) == "" {
			t.Errorf("%q is not found in %q", text, data)
		}
	}
	if found := n.in([]byte("canary-" + rand.Text())); found != "" {
		t.Error(found)
	}
}

// TestSecrets_AppearInNoOutput: the content of Secrets, the bearer tokens of requests and the
// server's own keys appear in no output of a control plane: log, audit log, metrics, debug pages,
// errors for unreadable objects. With encryption at rest they do not appear in etcd's files either,
// nor do the keys of continue tokens.
func TestSecrets_AppearInNoOutput(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	dir := env.Dir("canary")
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	encryption := env.WriteFile("encryption.yaml", []byte(`apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - secretbox: {keys: [{name: key1, secret: `+base64.StdEncoding.EncodeToString(key)+`}]}
  - identity: {}
`))
	audit := env.WriteFile("audit.yaml", []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]\n"))
	server := env.Up("--", fmt.Sprintf("--v=%d", verbosity()), "--encryption-provider-config="+encryption, "--audit-policy-file="+audit,
		"--audit-log-path="+filepath.Join(dir, "audit.log"), "--audit-log-mode=blocking")
	data := filepath.Dir(server.Kubeconfig)
	api := server.API()

	secret, inSecrets := newNeedle("the content of a Secret")
	needles := []needle{inSecrets, needleOf("the encryption key", base64.StdEncoding.EncodeToString(key))}
	bearer, err := useServiceAccount(ctx, server)
	harness.Check(t, err)
	_, signature, _ := strings.Cut(bearer[strings.Index(bearer, ".")+1:], ".")
	needles = append(needles, needleOf("a bearer token", signature))
	for _, name := range []string{"ca.pem", "admin.pem", "controller-manager.pem", "apiserver.pem", "front-proxy-ca.pem", "front-proxy-client.pem", "service-account.key"} {
		pem, err := os.ReadFile(filepath.Join(data, "pki", name))
		harness.Check(t, err)
		lines := strings.Split(strings.TrimSpace(string(pem)), "\n")
		needles = append(needles, needle{what: "the key " + name, forms: []string{lines[len(lines)-3]}})
	}
	harness.Check(t, useSecrets(ctx, api, secret))

	// The test writes unreadable Secrets to etcd in plain text; no output may contain them.
	broken, inBroken := newNeedle("the content of a Secret that cannot be read")
	kv, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + filepath.Join(data, "etcd", "client.sock")}, DialTimeout: testTimeout})
	harness.Check(t, err)
	defer kv.Close()
	harness.Check(t, requireEncrypted(ctx, kv))
	useBroken(t, ctx, api, kv, broken, inBroken)
	harness.Check(t, func() error { _, err := kv.Delete(ctx, brokenPrefix, clientv3.WithPrefix()); return err }())

	shown := 0
	for _, path := range append(pagesOf(t, ctx, api), "/", "/metrics", "/metrics/slis", "/debug/pprof/goroutine?debug=2", "/debug/pprof/cmdline", "/statusz", "/flagz", "/configz", "/debug/strata/consistency", "/debug/strata/status") {
		path, query, _ := strings.Cut(path, "?")
		r, err := api.DoAs(ctx, http.MethodGet, path, query, "", "*/*", nil)
		harness.Check(t, err)
		if r.Code == http.StatusOK {
			shown++
		}
		for _, n := range append(needles, inBroken) {
			if found := n.in(r.Body); found != "" {
				t.Errorf("%s shows %s", path, found)
			}
		}
	}
	if shown < 10 {
		t.Errorf("only %d pages were shown", shown)
	}
	kv.Close()
	harness.Check(t, server.Stop())

	logged := 0
	for _, root := range []string{data, dir} {
		harness.Check(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if strings.HasSuffix(path, ".log") {
				logged += len(text)
			}
			rel, _ := filepath.Rel(root, path)
			for _, n := range append(needles, inBroken) {
				mayHave := strings.HasPrefix(n.what, "the key") && (strings.HasPrefix(rel, "pki/") || rel == "kubeconfig") ||
					n.what == inBroken.what && strings.HasPrefix(rel, "etcd/")
				if found := n.in(text); found != "" && !mayHave {
					t.Errorf("%s has %s", rel, found)
				}
			}
			return nil
		}))
	}
	for _, n := range append(needles, inBroken) {
		if found := n.in([]byte(server.Output())); found != "" {
			t.Errorf("the terminal shows %s", found)
		}
	}
	if logged < 100<<10 {
		t.Errorf("the logs have %d bytes: the search covered none", logged)
	}
}

const defaultSecrets = "/api/v1/namespaces/default/secrets"

// useServiceAccount creates a token for a service account, sends it with a request and returns it.
func useServiceAccount(ctx context.Context, s *harness.Server) (string, error) {
	var r *harness.Response
	err := harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
		// a controller creates the account
		r, err = s.API().Do(ctx, http.MethodPost, "/api/v1/namespaces/default/serviceaccounts/default/token", "", object{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"})
		return err == nil && r.Code != http.StatusNotFound, err
	})
	if err != nil {
		return "", err
	}
	o, err := r.Object()
	if err != nil {
		return "", err
	}
	status, _ := o.Object["status"].(map[string]any)
	token, _ := status["token"].(string)
	if token == "" {
		return "", fmt.Errorf("no token: %w", r.Err())
	}
	refused, err := s.APIFor(s.ConfigFor(token)).Do(ctx, http.MethodGet, defaultSecrets, "", nil)
	if err != nil {
		return "", err
	}
	if refused.Code != http.StatusForbidden {
		return "", refused.Err()
	}
	// Also an invalid token, as sent by a client whose token has expired.
	if _, err = s.APIFor(s.ConfigFor(token+"x")).Do(ctx, http.MethodGet, defaultSecrets, "", nil); err != nil {
		return "", err
	}
	return token, nil
}

// useSecrets puts text into Secrets and uses them with every verb and in every form; some of the
// requests fail.
func useSecrets(ctx context.Context, api *harness.API, text string) error {
	encoded := base64.StdEncoding.EncodeToString([]byte(text))
	forms := []string{"", protobuf, table, partial, partialProto, yaml, "text/html", "application/json;as=Table;v=v1;g=meta.k8s.io;includeObject=Object"}
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	var watches []*harness.Watch
	for range 2 {
		w, refusal, err := api.Watch(watching, defaultSecrets, "resourceVersion=0")
		if err != nil || refusal != nil {
			return fmt.Errorf("watch: %v: %w", refusal, err)
		}
		watches = append(watches, w)
	}
	for i := range 3 {
		name := fmt.Sprintf("secret-%d", i)
		if _, err := api.Create(ctx, defaultSecrets, object{"metadata": object{"name": name, "labels": object{"l": "v"}}, "stringData": object{"text": text}, "data": object{"encoded": encoded}}); err != nil {
			return err
		}
		if _, err := api.Patch(ctx, defaultSecrets+"/"+name, `{"stringData":{"more":"`+text+`"}}`); err != nil {
			return err
		}
	}
	for method, all := range map[string][]struct{ path, query, media, body string }{
		http.MethodPost: {
			// exists
			{defaultSecrets, "", "", `{"metadata":{"name":"secret-0"},"stringData":{"text":"` + text + `"}}`},
			// is invalid
			{defaultSecrets, "", "", `{"metadata":{"name":"UPPER"},"stringData":{"text":"` + text + `"}}`},
			// is not base64
			{defaultSecrets, "", "", `{"metadata":{"name":"x"},"data":{"text":"` + text + `"}}`},
			// ends early
			{defaultSecrets, "", "", `{"metadata":{"name":"x"},"stringData":{"text":"` + text},
			// a bad key
			{defaultSecrets, "", "", `{"metadata":{"name":"x"},"stringData":{"` + strings.Repeat("k", 300) + `":"v"}}`},
			{defaultSecrets, "dryRun=All", "", `{"metadata":{"name":"dry"},"stringData":{"text":"` + text + `"}}`},
			{defaultSecrets, "", protobuf, "k8s\x00" + text},
			{"/api/v1/namespaces/nowhere/secrets", "", "", `{"metadata":{"name":"x"},"stringData":{"text":"` + text + `"}}`},
		},
		http.MethodPut: {
			// a conflict
			{defaultSecrets + "/secret-0", "", "", `{"metadata":{"name":"secret-0","resourceVersion":"1"},"stringData":{"text":"` + text + `"}}`},
			{defaultSecrets + "/secret-0", "", "", `{"metadata":{"name":"secret-0"},"stringData":{"other":"` + text + `"}}`},
		},
		http.MethodPatch: {
			{defaultSecrets + "/secret-1", "fieldManager=test&force=true", "application/apply-patch+yaml", `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"secret-1"},"stringData":{"applied":"` + text + `"}}`},
			{defaultSecrets + "/secret-1", "", "application/json-patch+json", `[{"op":"test","path":"/data/text","value":"` + encoded + `x"}]`},
			// No patch that makes the object undecodable: upstream's patch handler answers with the
			// whole object, and the audit log then contains it.
		},
	} {
		for _, r := range all {
			if _, err := api.DoAs(ctx, method, r.path, r.query, r.media, "", r.body); err != nil {
				return err
			}
		}
	}
	group, reading := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for _, form := range forms {
		for path, queries := range map[string][]string{
			defaultSecrets + "/secret-1": {"", "resourceVersion=0", "resourceVersion=x", "pretty=true"},
			defaultSecrets: {"", "resourceVersion=0", "limit=1", "limit=1&continue=x", "labelSelector=l%3Dv", "fieldSelector=metadata.name%3Dsecret-1", "fieldSelector=type%3DOpaque",
				"watch=true&timeoutSeconds=1&resourceVersion=0", "watch=true&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true", "fieldSelector=data.text%3D" + url.QueryEscape("x")},
			"/api/v1/secrets": {"", "resourceVersion=1", "resourceVersion=1&resourceVersionMatch=Exact"},
		} {
			for _, query := range queries {
				group.Go(func() error {
					_, err := api.DoAs(reading, http.MethodGet, path, query, "", form, nil)
					return err
				})
			}
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	// Pages, to create continue tokens and their keys.
	if _, _, err := api.ListAll(ctx, defaultSecrets, "", 1); err != nil {
		return err
	}
	if err := api.Delete(ctx, defaultSecrets+"/secret-0"); err != nil {
		return err
	}
	if _, err := api.Do(ctx, http.MethodDelete, defaultSecrets, "labelSelector=l%3Dv", nil); err != nil {
		return err
	}
	for _, w := range watches {
		w.Close()
	}
	return nil
}

// requireEncrypted returns an error unless Secrets and the keys of continue tokens are encrypted in
// etcd.
func requireEncrypted(ctx context.Context, kv *clientv3.Client) error {
	for _, prefix := range []string{"/registry/secrets/", "/registry/strata/"} {
		resp, err := kv.Get(ctx, prefix, clientv3.WithPrefix())
		if err != nil {
			return err
		}
		for _, stored := range resp.Kvs {
			if !bytes.HasPrefix(stored.Value, []byte("k8s:enc:secretbox:v1:key1:")) {
				return fmt.Errorf("%s is stored as %.40q", stored.Key, stored.Value)
			}
		}
		if prefix == "/registry/strata/" && len(resp.Kvs) == 0 {
			return fmt.Errorf("there are no keys of continue tokens")
		}
	}
	return nil
}

const brokenPrefix = "/registry/secrets/broken/"

// useBroken puts Secrets into etcd that cannot be decrypted or decoded, reads them in every way and
// looks for their content in the answers.
func useBroken(t *testing.T, ctx context.Context, api *harness.API, kv *clientv3.Client, text string, n needle) {
	t.Helper()
	const head = `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"NAME","namespace":"broken"}`
	values := map[string]string{
		"not-encrypted": "k8s:enc:secretbox:v1:key1:" + strings.Repeat(text, 10),
		"other-key":     "k8s:enc:secretbox:v1:key2:" + strings.Repeat(text, 10),
		"other-kind":    "k8s:enc:unknown:v1:key1:" + text,
		"no-base64":     head + `,"data":{"key":"` + text + `!"}}`,
		"no-map":        head + `,"data":"` + text + `"}`,
		"no-string":     head + `,"data":{"key":{"` + text + `":1}}}`,
		"number":        head + `,"data":{"key":[1,"` + text + `"]}}`,
		"cut-off":       head + `,"data":{"key":"` + text,
		"garbage":       text,
		"other-version": strings.Replace(head, `"v1"`, `"v9"`, 1) + `,"data":{"key":"` + base64.StdEncoding.EncodeToString([]byte(text)) + `"}}`,
		"no-version":    `{"data":{"key":"` + text + `"}}`,
		"protobuf":      "k8s\x00" + text,
		"protobuf-raw":  "k8s\x00\n\x0c\n\x02v1\x12\x06Secret\x12" + string(rune(len(text))) + text,
		"empty":         "",
	}
	read := func(query string) {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(16)
		for name := range values {
			for _, form := range []string{"", protobuf, table, partial, partialProto} {
				for _, target := range []string{"/api/v1/namespaces/broken/secrets/" + name + "?", "/api/v1/namespaces/broken/secrets?fieldSelector=metadata.name%3D" + name + "&"} {
					group.Go(func() error {
						path, q, _ := strings.Cut(target+query, "?")
						r, err := api.DoAs(ctx, http.MethodGet, path, q, "", form, nil)
						if err != nil {
							return err
						}
						if found := n.in(r.Body); found != "" {
							t.Errorf("GET %s?%s as %s: %d, and shows %s", path, q, form, r.Code, found)
						}
						return nil
					})
				}
			}
		}
		harness.Check(t, group.Wait())
	}
	// A watch is open while the objects are created, updated and deleted.
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, form := range []string{"", protobuf, partial} {
		live, refusal, err := api.WatchAs(watching, "/api/v1/namespaces/broken/secrets", "resourceVersion=0", form)
		harness.Check(t, err)
		if refusal != nil {
			t.Fatal(refusal.Err())
		}
		if form == "" { // the other forms are not JSON, and the test does not decode them
			go func() {
				for {
					e, err := live.Next(watching)
					if err != nil {
						return
					}
					if found := n.in([]byte(fmt.Sprint(e.Status, string(e.Object.Metadata.Name)))); found != "" {
						t.Errorf("a watch shows %s", found)
					}
				}
			}()
		}
	}
	for range 2 {
		for name, value := range values {
			_, err := kv.Put(ctx, brokenPrefix+name, strings.ReplaceAll(value, "NAME", name))
			harness.Check(t, err)
		}
	}
	read("")
	read("resourceVersion=0")
	read("watch=true&timeoutSeconds=1&resourceVersion=0")
	for _, query := range []string{"", "resourceVersion=0", "limit=2", "labelSelector=a%3Db", "watch=true&timeoutSeconds=1&resourceVersion=0",
		"watch=true&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"} {
		for _, path := range []string{"/api/v1/namespaces/broken/secrets", "/api/v1/secrets"} {
			r, err := api.Do(ctx, http.MethodGet, path, query, nil)
			harness.Check(t, err)
			if found := n.in(r.Body); found != "" {
				t.Errorf("GET %s?%s: %d, and shows %s", path, query, r.Code, found)
			}
		}
	}
}

// pagesOf returns the paths that the server's index page lists.
func pagesOf(t *testing.T, ctx context.Context, api *harness.API) []string {
	t.Helper()
	r, err := api.Do(ctx, http.MethodGet, "/", "", nil)
	harness.Check(t, err)
	return paths(r.Body)
}
