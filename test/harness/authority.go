package harness

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// Authority is a certificate authority of a test.
type Authority struct {
	CertFile string
	CertPEM  []byte

	env  *Env
	cert *x509.Certificate
	key  crypto.Signer
}

// Certificate is a certificate for loopback, good for servers and clients, with its key.
type Certificate struct {
	CertFile, KeyFile string
	CertPEM, KeyPEM   []byte
}

// Authority creates a certificate authority.
func (e *Env) Authority() *Authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	e.check(err)
	cert, err := certutil.NewSelfSignedCACert(certutil.Config{CommonName: "test-ca"}, key)
	e.check(err)
	certPEM := pem.EncodeToMemory(&pem.Block{Type: certutil.CertificateBlockType, Bytes: cert.Raw})
	return &Authority{CertFile: e.WriteFile("ca.crt", certPEM), CertPEM: certPEM, env: e, cert: cert, key: key}
}

// Issue creates a certificate for the name that is valid for a day.
func (a *Authority) Issue(name string) Certificate {
	return a.IssueUntil(name, time.Now().Add(24*time.Hour))
}

// IssueUntil is Issue of a certificate that expires, or has expired, at a time.
func (a *Authority) IssueUntil(name string, expires time.Time) Certificate {
	e := a.env
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	e.check(err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	e.check(err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    expires.Add(-25 * time.Hour),
		NotAfter:     expires,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}, a.cert, key.Public(), a.key)
	e.check(err)
	keyPEM, err := keyutil.MarshalPrivateKeyToPEM(key)
	e.check(err)
	dir := e.Dir("certificate")
	c := Certificate{
		CertFile: filepath.Join(dir, "tls.crt"),
		KeyFile:  filepath.Join(dir, "tls.key"),
		CertPEM:  pem.EncodeToMemory(&pem.Block{Type: certutil.CertificateBlockType, Bytes: der}),
		KeyPEM:   keyPEM,
	}
	e.check(os.WriteFile(c.CertFile, c.CertPEM, 0o600))
	e.check(os.WriteFile(c.KeyFile, c.KeyPEM, 0o600))
	return c
}

// Replace writes another certificate, with its key, into the files of c, as a renewal does.
func (c Certificate) Replace(other Certificate) error {
	for file, content := range map[string][]byte{c.KeyFile: other.KeyPEM, c.CertFile: other.CertPEM} {
		if err := os.WriteFile(file+".new", content, 0o600); err != nil {
			return err
		}
		if err := os.Rename(file+".new", file); err != nil {
			return err
		}
	}
	return nil
}
