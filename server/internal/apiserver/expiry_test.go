package apiserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// replaced is a provider whose certificate is replaced.
type replaced struct {
	name    string
	content atomic.Pointer[[]byte]
}

func (r *replaced) Name() string                              { return r.name }
func (r *replaced) AddListener(dynamiccertificates.Listener)  {}
func (r *replaced) CurrentCertKeyContent() (cert, key []byte) { return *r.content.Load(), nil }
func (r *replaced) SNINames() []string                        { return nil }

// expire replaces the certificate by one that expires after a duration.
func (r *replaced) expire(t *testing.T, key *ecdsa.PrivateKey, after time.Duration) {
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "api"}, NotAfter: time.Now().Add(after)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	testcheck.NoError(t, err)
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	r.content.Store(&content)
}

// TestLogExpired_EachCertificate_IsLoggedOnce: one of the server and one for a name expire. A
// renewal before that is not logged, and one that expires, too, is.
func TestLogExpired_EachCertificate_IsLoggedOnce(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testcheck.NoError(t, err)
	defer klog.CaptureState().Restore()
	synctest.Test(t, func(t *testing.T) {
		var lines []string
		klog.SetLogger(funcr.New(func(_, args string) {
			if strings.Contains(args, "A certificate for serving") { // others log, too
				lines = append(lines, args)
			}
		}, funcr.Options{}))
		server, name := &replaced{name: "of the server"}, &replaced{name: "of a name"}
		server.expire(t, key, time.Minute)
		name.expire(t, key, time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		go logExpired(ctx, &genericapiserver.SecureServingInfo{Cert: server, SNICerts: []dynamiccertificates.SNICertKeyContentProvider{name}})
		require := func(what string, of ...string) {
			t.Helper()
			synctest.Wait()
			if len(lines) != len(of) {
				t.Fatalf("%s: %q, want %d lines", what, lines, len(of))
			}
			for i, source := range of {
				if !strings.Contains(lines[i], source) || !strings.Contains(lines[i], "CN=api") {
					t.Errorf("%s: %s, want the one %s", what, lines[i], source)
				}
			}
			lines = nil
		}
		time.Sleep(50 * time.Second)
		server.expire(t, key, time.Minute)
		time.Sleep(50 * time.Second)
		require("renewed")
		time.Sleep(11 * time.Second) // a certificate has seconds
		require("expired", "of the server")
		server.expire(t, key, time.Second)
		time.Sleep(expiryInterval + 2*time.Second)
		require("a renewal expires", "of the server")
		time.Sleep(time.Hour)
		require("an hour later", "of a name")
		cancel()
	})
}
