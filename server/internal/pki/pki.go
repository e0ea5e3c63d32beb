// Package pki creates and renews the keys and certificates of a control plane that is its own
// certificate authority.
//
//	ca.pem           certificate authority: signs the serving certificate and all clients        ca.crt   its certificate alone
//	front-proxy-ca.pem   a second authority, for requests that the aggregator passes on          front-proxy-ca.crt
//	apiserver.pem    serving certificate
//	admin.pem, controller-manager.pem, scheduler.pem, kubelets.pem, front-proxy-client.pem    client certificates
//	service-account.key   signs service account tokens
//
// EnsureCluster adds the files of a control plane of several processes:
//
//	etcd-ca.pem      a third authority, for the members of etcd and their clients                etcd-ca.crt
//	etcd-member.pem, etcd-client.pem    certificates of the members, and of their clients
//	replica.pem      client certificate of read replicas, signed by front-proxy-ca.pem
//	balancer.pem     client certificate of health checks
//
// A .pem contains a certificate and its key in one file, so that the pair is replaced atomically;
// all readers of such pairs accept one file for both. All keys are ECDSA P-256, all files have mode
// 0600.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/stratakube/strata/server/internal/datadir"
)

const (
	authorityLifetime = 10 * 365 * 24 * time.Hour
	leafLifetime      = 365 * 24 * time.Hour

	// renewBefore is the remaining lifetime below which a start renews a certificate. It is a
	// quarter of the lifetime of a leaf: a control plane that is started at least every three
	// months never uses an expired certificate.
	renewBefore = 90 * 24 * time.Hour

	// backdate allows for clients whose clock is behind the server's.
	backdate = time.Hour

	authorityFile           = "ca.pem"
	frontProxyAuthorityFile = "front-proxy-ca.pem"

	// adminGroup is the group whose members bypass RBAC.
	adminGroup = "system:masters"

	// ControllerManagerUser is the user name of the controllers; RBAC's bootstrap policy binds
	// their roles to this name.
	ControllerManagerUser = "system:kube-controller-manager"

	// SchedulerUser is the user name of the scheduler; RBAC's bootstrap policy binds its roles to
	// this name.
	SchedulerUser = "system:kube-scheduler"

	// KubeletsUser is the user name of the simulated kubelets, a member of system:masters: one
	// client acts for all nodes, which no role of the bootstrap policy permits.
	KubeletsUser = "strata-kubelets"

	// ReplicaUser is the user name with which read replicas forward requests.
	ReplicaUser = "strata-replica"

	// BalancerUser is the user name of health checks; it has no rights except those of every
	// authenticated user.
	BalancerUser = "strata-balancer"

	// FrontProxyUser is the user name with which the aggregator calls other API servers.
	FrontProxyUser = "front-proxy-client"
)

// Files are the paths of the files that Ensure created or found.
type Files struct {
	CA                string // certificates to verify clients and the server with
	FrontProxyCA      string // certificates to verify the aggregator with
	Serving           string // certificate and key of the API server
	Admin             string // certificate and key of a member of system:masters
	ControllerManager string // certificate and key of ControllerManagerUser
	Scheduler         string // certificate and key of SchedulerUser
	Kubelets          string // certificate and key of KubeletsUser
	FrontProxyClient  string // certificate and key of FrontProxyUser
	ServiceAccountKey string // private key; the public one is derived from it

	// Made lists the descriptions of files that this call created or renewed, for display. It is
	// empty when all files were valid.
	Made []string
}

// Ensure creates missing files in dir, renews certificates that expire within 90 days of now, and
// replaces the serving certificate if it does not cover hosts (DNS names and IP addresses). A
// renewed authority keeps its key, so that certificates signed by it remain valid.
//
// A file that cannot be read or parsed is an error and is not replaced: a new authority would
// invalidate existing kubeconfigs, and a new key would invalidate service account tokens. Only one
// process at a time may call Ensure on a directory.
func Ensure(dir string, hosts []string, now time.Time) (*Files, error) {
	return ensureFiles(dir, hosts, ensurer{now: now, write: datadir.WriteFile})
}

// EnsureTemporary is Ensure for files that do not outlive the process: it does not synchronize them
// to disk.
func EnsureTemporary(dir string, hosts []string, now time.Time) (*Files, error) {
	return ensureFiles(dir, hosts, ensurer{now: now, write: func(path string, data []byte) error { return os.WriteFile(path, data, 0o600) }})
}

// ClusterFiles are the paths of the files of EnsureCluster.
type ClusterFiles struct {
	EtcdCA     string // certificates to verify members of etcd and their clients with
	EtcdMember string // certificate and key of all members, for clients and peers
	EtcdClient string // certificate and key of the clients of etcd
	Replica    string // certificate and key of ReplicaUser
	Balancer   string // certificate and key of BalancerUser

	Made []string // as in Files
}

// EnsureCluster does for ClusterFiles what Ensure, which has to be called before, does for Files.
// The members of etcd are reachable on hosts.
func EnsureCluster(dir string, hosts []string, now time.Time) (*ClusterFiles, error) {
	f := &ClusterFiles{
		EtcdCA:     filepath.Join(dir, "etcd-ca.crt"),
		EtcdMember: filepath.Join(dir, "etcd-member.pem"),
		EtcdClient: filepath.Join(dir, "etcd-client.pem"),
		Replica:    filepath.Join(dir, "replica.pem"),
		Balancer:   filepath.Join(dir, "balancer.pem"),
	}
	ca, err := readPair(filepath.Join(dir, authorityFile))
	if err != nil {
		return nil, fmt.Errorf("certificate authority: %w", err)
	}
	frontProxyCA, err := readPair(filepath.Join(dir, frontProxyAuthorityFile))
	if err != nil {
		return nil, fmt.Errorf("aggregation authority: %w", err)
	}
	e := ensurer{now: now, write: datadir.WriteFile}
	etcdCA := e.authority(filepath.Join(dir, "etcd-ca.pem"), f.EtcdCA, "strata-etcd-ca", "etcd authority")
	e.leaf(f.EtcdMember, "etcd certificate", etcdCA, memberTemplate(hosts))
	e.leaf(f.EtcdClient, "etcd client certificate", etcdCA, clientTemplate("strata-etcd-client"))
	e.leaf(f.Replica, "replica certificate", frontProxyCA, clientTemplate(ReplicaUser))
	e.leaf(f.Balancer, "balancer certificate", ca, clientTemplate(BalancerUser))
	if e.err != nil {
		return nil, e.err
	}
	f.Made = e.made
	return f, nil
}

func ensureFiles(dir string, hosts []string, e ensurer) (*Files, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f := &Files{
		CA:                filepath.Join(dir, "ca.crt"),
		FrontProxyCA:      filepath.Join(dir, "front-proxy-ca.crt"),
		Serving:           filepath.Join(dir, "apiserver.pem"),
		Admin:             filepath.Join(dir, "admin.pem"),
		ControllerManager: filepath.Join(dir, "controller-manager.pem"),
		Scheduler:         filepath.Join(dir, "scheduler.pem"),
		Kubelets:          filepath.Join(dir, "kubelets.pem"),
		FrontProxyClient:  filepath.Join(dir, "front-proxy-client.pem"),
		ServiceAccountKey: filepath.Join(dir, "service-account.key"),
	}
	ca := e.authority(filepath.Join(dir, authorityFile), f.CA, "strata-ca", "certificate authority")
	frontProxyCA := e.authority(filepath.Join(dir, frontProxyAuthorityFile), f.FrontProxyCA, "strata-front-proxy-ca", "aggregation authority")
	e.leaf(f.Serving, "serving certificate", ca, servingTemplate(hosts))
	e.leaf(f.Admin, "admin certificate", ca, clientTemplate("strata-admin", adminGroup))
	e.leaf(f.ControllerManager, "controller certificate", ca, clientTemplate(ControllerManagerUser))
	e.leaf(f.Scheduler, "scheduler certificate", ca, clientTemplate(SchedulerUser))
	e.leaf(f.Kubelets, "kubelet certificate", ca, clientTemplate(KubeletsUser, adminGroup))
	e.leaf(f.FrontProxyClient, "aggregation certificate", frontProxyCA, clientTemplate(FrontProxyUser))
	e.key(f.ServiceAccountKey, "service account key")
	if e.err != nil {
		return nil, e.err
	}
	f.Made = e.made
	return f, nil
}

// Split returns the certificates and the key in the file at path, each in PEM, for programs that
// need them separately.
func Split(path string) (certs, key []byte, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	if certs, key = split(data); certs == nil || key == nil {
		return nil, nil, fmt.Errorf("%s does not contain a certificate and a key", path)
	}
	return certs, key, nil
}

// IssueClient returns a new client certificate of a user and its key, each in PEM, signed by the
// authority that Ensure created in dir.
func IssueClient(dir, user string, groups []string, now time.Time) (certs, key []byte, err error) {
	ca, err := readPair(filepath.Join(dir, authorityFile))
	if err != nil {
		return nil, nil, err
	}
	e := ensurer{now: now, write: func(_ string, data []byte) error {
		certs, key = split(data)
		return nil
	}}
	err = e.create("", "client certificate", ca, clientTemplate(user, groups...))
	return certs, key, err
}

// split returns the certificates and the key in data.
func split(rest []byte) (certs, key []byte) {
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type == cert.CertificateBlockType {
			certs = append(certs, pem.EncodeToMemory(block)...)
		} else {
			key = append(key, pem.EncodeToMemory(block)...)
		}
	}
	return certs, key
}

// pair is a certificate with its key.
type pair struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// ensurer keeps the first error of a sequence of steps; later steps do nothing.
type ensurer struct {
	now   time.Time
	write func(path string, data []byte) error
	made  []string
	err   error
}

// step runs a step unless an earlier one has failed.
func (e *ensurer) step(what string, run func() error) {
	if e.err != nil {
		return
	}
	if err := run(); err != nil {
		e.err = fmt.Errorf("%s: %w", what, err)
	}
}

func (e *ensurer) authority(path, certPath, commonName, what string) (found *pair) {
	e.step(what, func() (err error) {
		found, err = readPair(path)
		if errors.Is(err, os.ErrNotExist) {
			found = &pair{}
			found.key, err = newKey()
		}
		if err != nil {
			return err
		}
		if found.cert == nil || e.endsSoon(found.cert) {
			template := &x509.Certificate{
				Subject:               pkix.Name{CommonName: commonName},
				NotBefore:             e.now.Add(-backdate),
				NotAfter:              e.now.Add(authorityLifetime),
				KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
				BasicConstraintsValid: true,
				IsCA:                  true,
			}
			if found, err = e.issue(path, what, template, &pair{cert: template, key: found.key}, found.key); err != nil {
				return err
			}
		}
		want := encodeCert(found.cert)
		if got, err := os.ReadFile(certPath); err == nil && string(got) == string(want) {
			return nil
		}
		return e.write(certPath, want)
	})
	return found
}

// leaf creates the certificate at path unless a usable one exists: signed by authority, not about
// to expire, and with the same name, use and hosts as template.
func (e *ensurer) leaf(path, what string, authority *pair, template *x509.Certificate) {
	e.step(what, func() error {
		found, err := readPair(path)
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			return err
		case !e.endsSoon(found.cert) && found.cert.CheckSignatureFrom(authority.cert) == nil && covers(found.cert, template):
			return nil
		}
		return e.create(path, what, authority, template)
	})
}

// create issues a certificate for a new key.
func (e *ensurer) create(path, what string, authority *pair, template *x509.Certificate) error {
	key, err := newKey()
	if err != nil {
		return err
	}
	template.NotBefore = e.now.Add(-backdate)
	template.NotAfter = e.now.Add(leafLifetime)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.BasicConstraintsValid = true
	_, err = e.issue(path, what, template, authority, key)
	return err
}

// issue signs template for key, and writes the certificate and the key to path.
func (e *ensurer) issue(path, what string, template *x509.Certificate, authority *pair, key crypto.Signer) (*pair, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, authority.cert, key.Public(), authority.key)
	if err != nil {
		return nil, err
	}
	issued, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &pair{issued, key}, e.writeKey(path, what, encodeCert(issued), key)
}

// writeKey writes a key, after its certificate, to path.
func (e *ensurer) writeKey(path, what string, certPEM []byte, key crypto.Signer) error {
	keyPEM, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return err
	}
	if err := e.write(path, append(certPEM, keyPEM...)); err != nil {
		return err
	}
	e.made = append(e.made, what)
	return nil
}

// key creates the private key at path unless it exists.
func (e *ensurer) key(path, what string) {
	e.step(what, func() error {
		if _, err := keyutil.PrivateKeyFromFile(path); err == nil {
			return nil
		} else if !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s: %w", path, err)
		}
		key, err := newKey()
		if err != nil {
			return err
		}
		return e.writeKey(path, what, nil, key)
	})
}

func (e *ensurer) endsSoon(c *x509.Certificate) bool { return e.now.Add(renewBefore).After(c.NotAfter) }

func servingTemplate(hosts []string) *x509.Certificate {
	t := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "kube-apiserver"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	return t
}

// memberTemplate is a server for clients and peers, and a client of peers.
func memberTemplate(hosts []string) *x509.Certificate {
	t := servingTemplate(hosts)
	t.Subject.CommonName = "strata-etcd"
	t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	return t
}

func clientTemplate(user string, groups ...string) *x509.Certificate {
	return &x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
}

// covers reports whether found has the same subject and use as want, and at least its hosts.
func covers(found, want *x509.Certificate) bool {
	if found.Subject.CommonName != want.Subject.CommonName ||
		!slices.Equal(found.Subject.Organization, want.Subject.Organization) ||
		!slices.Equal(found.ExtKeyUsage, want.ExtKeyUsage) {
		return false
	}
	for _, name := range want.DNSNames {
		if !slices.Contains(found.DNSNames, name) {
			return false
		}
	}
	for _, ip := range want.IPAddresses {
		if !slices.ContainsFunc(found.IPAddresses, ip.Equal) {
			return false
		}
	}
	return true
}

// readPair reads a certificate and its key. Errors wrap os.ErrNotExist if there is no file.
func readPair(path string) (*pair, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	certs, err := cert.ParseCertsPEM(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	parsed, err := keyutil.ParsePrivateKeyPEM(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	key, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s: a key of type %T cannot sign", path, parsed)
	}
	public, ok := certs[0].PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !public.Equal(key.Public()) {
		return nil, fmt.Errorf("%s: the key does not match the certificate", path)
	}
	return &pair{cert: certs[0], key: key}, nil
}

func newKey() (crypto.Signer, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

func encodeCert(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: c.Raw})
}
