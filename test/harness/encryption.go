package harness

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Encryption is a file with an encryption configuration, which servers may share.
type Encryption struct {
	path      string
	resources []string
}

// Provider is a provider of an encryption configuration, with the name of its key; identity has no
// key.
type Provider struct{ Kind, Key string }

// Keys returns providers of one kind.
func Keys(kind string, keys ...string) (providers []Provider) {
	for _, key := range keys {
		providers = append(providers, Provider{kind, key})
	}
	return providers
}

// NewEncryption writes a configuration of resources.
func NewEncryption(t testing.TB, resources []string, providers ...Provider) Encryption {
	t.Helper()
	e := Encryption{filepath.Join(t.TempDir(), "encryption.json"), resources}
	e.Write(t, providers...)
	return e
}

// Write replaces the configuration; the first provider encrypts, all of them decrypt.
func (e Encryption) Write(t testing.TB, providers ...Provider) {
	t.Helper()
	type object map[string]any
	var list []any
	for _, p := range providers {
		body := object{}
		if p.Key != "" {
			secret := fmt.Sprintf("%-32s", p.Key) // the key's name, padded to the length of a key
			body["keys"] = []any{object{"name": p.Key, "secret": base64.StdEncoding.EncodeToString([]byte(secret))}}
		}
		list = append(list, object{p.Kind: body})
	}
	data, err := json.Marshal(object{
		"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration",
		"resources": []any{object{"resources": e.resources, "providers": list}},
	})
	Check(t, err)
	// A rename, so that a server never reads a partial file.
	Check(t, os.WriteFile(e.path+".new", data, 0o600))
	Check(t, os.Rename(e.path+".new", e.path))
}

// Flag returns the flag of a server that uses the configuration.
func (e Encryption) Flag() string { return "--encryption-provider-config=" + e.path }
