package pki

import (
	"crypto/tls"
	"crypto/x509"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
)

var (
	start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	hosts = []string{"localhost", "127.0.0.1", "::1"}
)

func ensure(t *testing.T, dir string, hosts []string, now time.Time) *Files {
	t.Helper()
	f, err := Ensure(dir, hosts, now)
	testcheck.NoError(t, err)
	return f
}

// contents returns the text of every file in dir by name.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	testcheck.NoError(t, err)
	all := map[string]string{}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		testcheck.NoError(t, err)
		all[e.Name()] = string(data)
	}
	return all
}

// verify checks the certificate at path like a peer that trusts the current content of ca.
func verify(t *testing.T, ca, path string, opts x509.VerifyOptions) {
	t.Helper()
	opts.Roots = x509.NewCertPool()
	pem, err := os.ReadFile(ca)
	if err != nil || !opts.Roots.AppendCertsFromPEM(pem) {
		t.Fatalf("%s: no certificate (%v)", ca, err)
	}
	pair, err := tls.LoadX509KeyPair(path, path)
	testcheck.NoError(t, err)
	if _, err := pair.Leaf.Verify(opts); err != nil {
		t.Errorf("%s: %v", path, err)
	}
}

func verifyAll(t *testing.T, f *Files, now time.Time) {
	t.Helper()
	for _, host := range hosts {
		verify(t, f.CA, f.Serving, x509.VerifyOptions{DNSName: host, CurrentTime: now})
	}
	client := x509.VerifyOptions{CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	verify(t, f.CA, f.Admin, client)
	verify(t, f.CA, f.ControllerManager, client)
	verify(t, f.CA, f.Scheduler, client)
	verify(t, f.CA, f.Kubelets, client)
	verify(t, f.FrontProxyCA, f.FrontProxyClient, client)
}

func TestEnsure_Certificates_VerifyAndArePrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	f := ensure(t, dir, hosts, start)
	verifyAll(t, f, start)
	verifyAll(t, f, start.Add(-backdate+time.Second)) // a client whose clock is behind

	for name := range contents(t, dir) {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v (%v), want 0600", name, info.Mode(), err)
		}
	}
}

func TestEnsure_FrontProxyClient_IsNotTrustedByAPICA(t *testing.T) {
	f := ensure(t, t.TempDir(), hosts, start)
	roots := x509.NewCertPool()
	pem, err := os.ReadFile(f.CA)
	if err != nil || !roots.AppendCertsFromPEM(pem) {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(f.FrontProxyClient, f.FrontProxyClient)
	testcheck.NoError(t, err)
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: start, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil {
		t.Error("the aggregator's certificate passes as a client of the API")
	}
}

func TestEnsure_SecondStart_ChangesNothing(t *testing.T) {
	dir := t.TempDir()
	ensure(t, dir, hosts, start)
	before := contents(t, dir)
	f := ensure(t, dir, hosts[:2], start.Add(leafLifetime-renewBefore-time.Hour))
	if len(f.Made) != 0 {
		t.Errorf("made %q", f.Made)
	}
	for name, text := range contents(t, dir) {
		if before[name] != text {
			t.Errorf("%s changed", name)
		}
	}
}

func TestEnsure_LeafNearExpiry_IsRenewed(t *testing.T) {
	dir := t.TempDir()
	ensure(t, dir, hosts, start)
	before := contents(t, dir)
	now := start.Add(leafLifetime - renewBefore + time.Hour)
	f := ensure(t, dir, hosts, now)
	if len(f.Made) != 6 {
		t.Errorf("made %q, want the six certificates that are no authority", f.Made)
	}
	after := contents(t, dir)
	for _, kept := range []string{"ca.pem", "ca.crt", "front-proxy-ca.pem", "service-account.key"} {
		if before[kept] != after[kept] {
			t.Errorf("%s changed", kept)
		}
	}
	verifyAll(t, f, now.Add(leafLifetime-time.Hour))
}

func TestEnsure_RenewedCA_VerifiesOldCertificates(t *testing.T) {
	dir := t.TempDir()
	ensure(t, dir, hosts, start)
	late := start.Add(authorityLifetime - renewBefore - 24*time.Hour)
	old := ensure(t, dir, hosts, late) // the leaves are renewed, the authorities not yet
	admin := filepath.Join(t.TempDir(), "admin.pem")
	data, err := os.ReadFile(old.Admin)
	testcheck.NoError(t, err)
	testcheck.NoError(t, os.WriteFile(admin, data, 0o600))
	now := late.Add(48 * time.Hour)
	renewed := ensure(t, dir, hosts, now)
	if !slices.Equal(renewed.Made, []string{"certificate authority", "aggregation authority"}) {
		t.Errorf("made %q, want the two authorities", renewed.Made)
	}
	afterOldEnd := start.Add(authorityLifetime + time.Hour)
	verify(t, renewed.CA, admin, x509.VerifyOptions{CurrentTime: afterOldEnd, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	verifyAll(t, renewed, afterOldEnd)
}

func TestEnsure_NewHost_ReplacesServingCertificate(t *testing.T) {
	dir := t.TempDir()
	ensure(t, dir, hosts, start)
	for _, host := range []string{"example.test", "192.0.2.1"} {
		more := append(slices.Clone(hosts), host)
		f := ensure(t, dir, more, start)
		if !slices.Equal(f.Made, []string{"serving certificate"}) {
			t.Errorf("made %q for %s", f.Made, host)
		}
		verify(t, f.CA, f.Serving, x509.VerifyOptions{DNSName: host, CurrentTime: start})
	}
}

func TestEnsure_DamagedFile_ReturnsErrorAndKeepsFile(t *testing.T) {
	for _, name := range []string{"ca.pem", "front-proxy-ca.pem", "apiserver.pem", "service-account.key"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ensure(t, dir, hosts, start)
			testcheck.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("damaged"), 0o600))
			before := contents(t, dir)
			if f, err := Ensure(dir, hosts, start); err == nil {
				t.Errorf("made %q", f.Made)
			}
			for name, text := range contents(t, dir) {
				if before[name] != text {
					t.Errorf("%s changed", name)
				}
			}
		})
	}
}

func TestEnsure_MismatchedKey_ReturnsError(t *testing.T) {
	dir := t.TempDir()
	f := ensure(t, dir, hosts, start)
	cert, err := os.ReadFile(f.CA)
	testcheck.NoError(t, err)
	key, err := os.ReadFile(f.ServiceAccountKey)
	testcheck.NoError(t, err)
	testcheck.NoError(t, os.WriteFile(filepath.Join(dir, "ca.pem"), append(cert, key...), 0o600))
	if _, err := Ensure(dir, hosts, start); err == nil {
		t.Error("accepted a key that does not belong to the certificate")
	}
}

// TestEnsure_MissingCACertificate_IsRestored: a derived file is restored from its source.
func TestEnsure_MissingCACertificate_IsRestored(t *testing.T) {
	dir := t.TempDir()
	f := ensure(t, dir, hosts, start)
	before := contents(t, dir)
	testcheck.NoError(t, os.Remove(f.CA))
	ensure(t, dir, hosts, start)
	if got := contents(t, dir)["ca.crt"]; got != before["ca.crt"] {
		t.Error("ca.crt differs from the authority's certificate")
	}
}

func TestSplit_ReturnsMatchingCertAndKey(t *testing.T) {
	f := ensure(t, t.TempDir(), hosts, start)
	certs, key, err := Split(f.Admin)
	testcheck.NoError(t, err)
	if _, err := tls.X509KeyPair(certs, key); err != nil {
		t.Error(err)
	}
	if _, _, err := Split(f.CA); err == nil {
		t.Error("found a key in a file of certificates")
	}
}

func TestIssueClient_CertificateOfUser_IsSignedByAuthority(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	files, err := EnsureTemporary(dir, []string{"localhost"}, now)
	testcheck.NoError(t, err)
	before, err := os.ReadDir(dir)
	testcheck.NoError(t, err)
	certs, key, err := IssueClient(dir, "jane", []string{"testers", "readers"}, now)
	testcheck.NoError(t, err)
	pair, err := tls.X509KeyPair(certs, key)
	testcheck.NoError(t, err)
	issued := pair.Leaf
	if subject := issued.Subject; subject.CommonName != "jane" || len(subject.Organization) != 2 {
		t.Errorf("subject is %v, want jane of two groups", subject)
	}
	authority, err := os.ReadFile(files.CA)
	testcheck.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	if _, err := issued.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Error(err)
	}
	if after, err := os.ReadDir(dir); err != nil || len(after) != len(before) {
		t.Errorf("%d files in place of %d, error %v", len(after), len(before), err)
	}
	if _, _, err := IssueClient(t.TempDir(), "jane", nil, now); err == nil {
		t.Error("a certificate was issued without an authority")
	}
}

func TestEnsureCluster_Certificates_VerifyByTheirAuthorities(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	f := ensure(t, dir, hosts, start)
	c, err := EnsureCluster(dir, []string{"127.0.0.1"}, start)
	testcheck.NoError(t, err)
	client := x509.VerifyOptions{CurrentTime: start, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	verify(t, c.EtcdCA, c.EtcdMember, x509.VerifyOptions{DNSName: "127.0.0.1", CurrentTime: start})
	verify(t, c.EtcdCA, c.EtcdMember, client) // of its peers
	verify(t, c.EtcdCA, c.EtcdClient, client)
	verify(t, f.FrontProxyCA, c.Replica, client)
	verify(t, f.CA, c.Balancer, client)
	if len(c.Made) != 5 {
		t.Errorf("made %q, want 5 files", c.Made)
	}

	before := contents(t, dir)
	if c, err = EnsureCluster(dir, []string{"127.0.0.1"}, start); err != nil || len(c.Made) != 0 || !maps.Equal(before, contents(t, dir)) {
		t.Errorf("a second call made %q, %v", c.Made, err)
	}
}

func TestEnsureCluster_ClientOfTheAPIServer_IsNoClientOfEtcd(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	f := ensure(t, dir, hosts, start)
	c, err := EnsureCluster(dir, hosts, start)
	testcheck.NoError(t, err)
	pem, err := os.ReadFile(c.EtcdCA)
	testcheck.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	pair, err := tls.LoadX509KeyPair(f.Admin, f.Admin)
	testcheck.NoError(t, err)
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: start, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil {
		t.Error("the authority of etcd accepts the administrator's certificate")
	}
}
