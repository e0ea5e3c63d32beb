package target

import (
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"k8s.io/client-go/util/cert"
)

// Credentials let an API server prove itself to the benchmark and the benchmark to the API server.
// The benchmark authenticates by tokens, which cost the server a look-up. Unless a workload says
// otherwise it is Admin: so the measurements include neither the verification of a client
// certificate per request nor a queue.
type Credentials struct {
	certFile, keyFile, tokenFile string
	tokens                       map[User]string
	roots                        *x509.CertPool
}

// User is a user whom the API servers know.
type User string

const (
	// Admin is exempt from priority and fairness.
	Admin User = "bench"
	// Node is a kubelet.
	Node User = "system:node:bench"
	// Agent is a service account, such as that of a daemon on every node.
	Agent User = "system:serviceaccount:bench:agent"
)

// groups are the groups of each user.
var groups = map[User]string{
	Admin: "system:masters",
	Node:  "system:nodes",
	Agent: "system:serviceaccounts,system:serviceaccounts:bench",
}

// pemPair is a certificate and its key.
type pemPair struct{ cert, key []byte }

// serving returns a serving certificate, which is the same for all benchmarks of the process. Its
// keys are RSA's, as in most clusters, and expensive to make.
var serving = sync.OnceValues(func() (pemPair, error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", nil, nil)
	return pemPair{certificate, key}, err
})

// NewCredentials makes tokens and writes them into dir for the servers to read, with a serving
// certificate and its key.
func NewCredentials(dir string) (*Credentials, error) {
	dir, err := filepath.Abs(dir) // a kubeconfig names files relative to its own directory
	if err != nil {
		return nil, err
	}
	certificate, err := serving()
	if err != nil {
		return nil, fmt.Errorf("create serving certificate: %w", err)
	}
	c := &Credentials{
		certFile:  filepath.Join(dir, "serving.crt"),
		keyFile:   filepath.Join(dir, "serving.key"),
		tokenFile: filepath.Join(dir, "tokens.csv"),
		tokens:    map[User]string{},
		roots:     x509.NewCertPool(),
	}
	if !c.roots.AppendCertsFromPEM(certificate.cert) {
		return nil, errors.New("create serving certificate: it contains no certificate")
	}
	var tokens []byte
	for user, memberOf := range groups {
		c.tokens[user] = rand.Text()
		tokens = fmt.Appendf(tokens, "%s,%s,%s,%q\n", c.tokens[user], user, user, memberOf)
	}
	for path, data := range map[string][]byte{
		c.certFile:  certificate.cert,
		c.keyFile:   certificate.key,
		c.tokenFile: tokens,
	} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return nil, fmt.Errorf("write credentials: %w", err)
		}
	}
	return c, nil
}

// WriteKubeconfig writes a kubeconfig of Admin, in JSON, for other clients of the engine. It
// returns the files with the key of service accounts and with the certificate of the engine.
func (e *Engine) WriteKubeconfig(path string) (keyFile, certFile string, err error) {
	type named map[string]any
	const name = "bench"
	data, err := json.Marshal(named{
		"apiVersion": "v1", "kind": "Config", "current-context": name,
		"clusters": []named{{"name": name, "cluster": named{"server": e.baseURL, "certificate-authority": e.credentials.certFile}}},
		"users":    []named{{"name": name, "user": named{"token": e.credentials.tokens[Admin]}}},
		"contexts": []named{{"name": name, "context": named{"cluster": name, "user": name}}},
	})
	if err == nil {
		err = os.WriteFile(path, data, 0o600)
	}
	return e.credentials.keyFile, e.credentials.certFile, err
}
