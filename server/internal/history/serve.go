package history

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"

	"github.com/stratakube/strata/server/internal/cli"
)

// pastServer serves the state of a clock's time: it reads revisions of the server of a client, with
// the rights of its user. Requests need its token, because they may come from other users of the
// machine.
type pastServer struct {
	rest     *rest.RESTClient
	host     string // of the server
	clock    *clock
	listener net.Listener
	tls      *tls.Config
	ca       []byte
	token    string
}

// loopback returns the IP address of an address with a port, which must be a loopback address.
func loopback(address string) (net.IP, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, cli.Misusef("parse --listen %s: %w; give a loopback address, such as 127.0.0.1:0", address, err)
	}
	ip := net.ParseIP(host)
	if ip == nil || !ip.IsLoopback() {
		return nil, cli.Misusef("--listen %s is no loopback address: the server has your rights, so it serves this machine only", address)
	}
	return ip, nil
}

func newPastServer(c *client, clock *clock, address string) (*pastServer, error) {
	ip, err := loopback(address)
	if err != nil {
		return nil, err
	}
	certificate, key, err := cert.GenerateSelfSignedCertKey(ip.String(), []net.IP{ip}, nil)
	if err != nil {
		return nil, fmt.Errorf("make a serving certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("make a serving certificate: %w", err)
	}
	config := rest.CopyConfig(c.config)
	config.QPS = -1 // the clients have limits of their own
	restClient, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w; choose another port with --listen", address, err)
	}
	return &pastServer{rest: restClient, host: config.Host, clock: clock, listener: listener, ca: certificate,
		tls:   &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		token: base64.RawURLEncoding.EncodeToString(secret)}, nil
}

// writeKubeconfig writes a kubeconfig for the server, to a temporary file if path is "". It creates
// the file, with mode 0600: an existing file or link is an error, because the file has a token of
// the user. remove deletes that file, unless path names another one by then.
func (s *pastServer) writeKubeconfig(path, namespace string) (written string, remove func(), err error) {
	const name = "strata-history"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + s.listener.Addr().String(), CertificateAuthorityData: s.ca}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: s.token}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: namespace}
	config.CurrentContext = name
	data, err := clientcmd.Write(*config)
	if err != nil {
		return "", nil, err
	}
	if path != "" {
		remove, err = createFile(path, data)
		return path, remove, err
	}
	dir, err := os.MkdirTemp("", "strata-history-")
	if err != nil {
		return "", nil, fmt.Errorf("create a directory for the kubeconfig: %w", err)
	}
	path = filepath.Join(dir, "kubeconfig")
	removeFile, err := createFile(path, data)
	if err != nil {
		_ = os.Remove(dir)
		return "", nil, err
	}
	return path, func() {
		removeFile()
		_ = os.Remove(dir)
	}, nil
}

// createFile creates the file of a kubeconfig. remove deletes it if path still names this file. The
// file is open until then, so that no other file can have its identity.
func createFile(path string, data []byte) (remove func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("create the kubeconfig: %w; choose a name that does not exist with --write-kubeconfig", err)
	}
	if err != nil {
		return nil, fmt.Errorf("create the kubeconfig: %w; choose another file with --write-kubeconfig", err)
	}
	remove = func() {
		defer file.Close()
		ours, err := file.Stat()
		if err != nil {
			return
		}
		removeSame(path, ours)
	}
	if _, err := file.Write(data); err != nil {
		remove()
		return nil, fmt.Errorf("write the kubeconfig: %w; choose another file with --write-kubeconfig", err)
	}
	return remove, nil
}

// removeSame deletes the file at path if it is a given one, and not one that has replaced it.
func removeSame(path string, file os.FileInfo) {
	if named, err := os.Lstat(path); err == nil && os.SameFile(file, named) {
		_ = os.Remove(path)
	}
}

// run serves until ctx ends, and then ends open watches after the grace period.
func (s *pastServer) run(ctx context.Context, grace time.Duration) error {
	server := &http.Server{Handler: s, TLSConfig: s.tls, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		shutdown, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		if server.Shutdown(shutdown) != nil {
			server.Close()
		}
	})
	s.clock.elapsed() // the replay begins
	err := server.ServeTLS(s.listener, "", "")
	if stop() {
		return err
	}
	<-ended
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// authorized reports whether a request has the server's token.
func (s *pastServer) authorized(req *http.Request) bool {
	return subtle.ConstantTimeCompare([]byte(req.Header.Get("Authorization")), []byte("Bearer "+s.token)) == 1
}
