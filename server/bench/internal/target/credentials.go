package target

import (
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/client-go/util/cert"
)

// Credentials let an API server prove itself to the benchmark and the benchmark to the API server. The benchmark authenticates by a
// token, which costs the server a look-up, and belongs to system:masters, which priority and fairness exempts: so the measurements
// include neither the verification of a client certificate per request nor a queue.
type Credentials struct {
	certFile, keyFile, tokenFile string
	token                        string
	roots                        *x509.CertPool
}

// NewCredentials makes a serving certificate, its key and a token, and writes them into dir for the servers to read.
func NewCredentials(dir string) (*Credentials, error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", nil, nil)
	if err != nil {
		return nil, fmt.Errorf("create serving certificate: %w", err)
	}
	c := &Credentials{
		certFile:  filepath.Join(dir, "serving.crt"),
		keyFile:   filepath.Join(dir, "serving.key"),
		tokenFile: filepath.Join(dir, "tokens.csv"),
		token:     rand.Text(),
		roots:     x509.NewCertPool(),
	}
	if !c.roots.AppendCertsFromPEM(certificate) {
		return nil, errors.New("create serving certificate: it contains no certificate")
	}
	for path, data := range map[string][]byte{
		c.certFile:  certificate,
		c.keyFile:   key,
		c.tokenFile: []byte(c.token + ",bench,bench,system:masters\n"),
	} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return nil, fmt.Errorf("write credentials: %w", err)
		}
	}
	return c, nil
}
