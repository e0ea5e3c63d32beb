package testserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/pki"
)

// controlPlane is a control plane: an API server with its own prefix in etcd, certificates and
// port.
type controlPlane struct {
	host  *host
	name  string
	flags []string // beyond those of the host
	dir   string   // of certificates
	files *pki.Files

	listener *cutListener  // nil until build
	serve    chan struct{} // closed by start
	built    chan struct{} // closed when the handlers are built
	ready    chan struct{} // closed when the server is ready
	// closed when a spare one is ready for clients, or cannot be; nil: the start brings it up
	up    chan struct{}
	upErr error // valid when up is closed

	serving context.Context // of the server
	cancel  context.CancelFunc
	done    chan struct{} // closed when the server has stopped
	err     error         // its error; valid when done is closed
}

func (h *host) newControlPlane(flags []string) *controlPlane {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.newControlPlaneLocked(flags)
}

func (h *host) newControlPlaneLocked(flags []string) *controlPlane {
	serving, cancel := context.WithCancel(context.WithoutCancel(h.ctx)) // see run
	h.last++
	name := "control-plane-" + strconv.Itoa(h.last)
	return &controlPlane{host: h, name: name, flags: flags, dir: filepath.Join(h.dir, name), serving: serving, cancel: cancel,
		serve: make(chan struct{}), built: make(chan struct{}), ready: make(chan struct{}), done: make(chan struct{})}
}

// prefix returns the prefix of all keys of the control plane in etcd.
func (p *controlPlane) prefix() string { return "/" + p.name }

// api identifies the flags.
func (p *controlPlane) api() string { return strings.Join(p.flags, "\n") }

// build begins to build the handlers of the server, which awaitBuilt waits for. The caller stops
// the control plane.
func (p *controlPlane) build() {
	go func() {
		defer close(p.done)
		if p.err = p.prepare(); p.err != nil {
			return
		}
		p.err = apiserver.Run(p.serving, apiserver.Options{
			Args:    slices.Concat(p.defaultFlags(), p.host.args, p.flags),
			Out:     os.Stderr,
			OnReady: func(apiserver.Info) { close(p.ready) },
			Colocated: &apiserver.Colocated{
				Process: &p.host.process, API: p.api(), Listener: p.listener,
				Built: func() { close(p.built) }, Serve: p.serve,
			},
		})
	}()
}

// prepare creates the certificates, the listener and the first objects of the control plane.
func (p *controlPlane) prepare() (err error) {
	if p.files, err = pki.EnsureTemporary(p.dir, []string{"localhost", "127.0.0.1", "::1"}, time.Now()); err != nil {
		return fmt.Errorf("certificates: %w", err)
	}
	inner, err := (&net.ListenConfig{}).Listen(p.serving, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen on 127.0.0.1: %w", err)
	}
	p.listener = newCutListener(inner)
	if err := p.host.startEtcd(); err != nil {
		return err
	}
	return p.host.applyTemplate(p.serving, p)
}

// awaitBuilt returns when the handlers are built, building has failed, or ctx ends.
func (p *controlPlane) awaitBuilt(ctx context.Context) error {
	select {
	case <-p.built:
		return nil
	case <-p.done:
		return p.ended()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ended returns the error of a server that has stopped early.
func (p *controlPlane) ended() error {
	if p.err != nil {
		return fmt.Errorf("API server: %w", p.err)
	}
	return errors.New("the API server stopped before it was ready")
}

// start lets the server serve, and returns when it is ready, has failed, or ctx ends.
func (p *controlPlane) start(ctx context.Context) error {
	close(p.serve)
	select {
	case <-p.ready:
		return nil
	case <-p.done:
		return p.ended()
	case <-ctx.Done():
	}
	// Upstream's server exits the process if it is stopped while its start hooks run.
	select {
	case <-p.ready:
	case <-p.done:
	}
	return context.Cause(ctx)
}

// stop stops the server, which cuts off its clients, and deletes its data.
func (p *controlPlane) stop() error {
	p.cancel()
	select {
	case <-p.built:
		p.listener.cut()
	case <-p.done:
	}
	<-p.done
	if p.listener != nil {
		p.listener.Close()
	}
	err := os.RemoveAll(p.dir)
	if p.host.client == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.host.ctx, etcdTimeout)
	defer cancel()
	if _, deleteErr := p.host.client.Delete(ctx, p.prefix()+"/", clientv3.WithPrefix()); deleteErr != nil {
		err = errors.Join(err, fmt.Errorf("delete the data of %s: %w", p.name, deleteErr))
	}
	return err
}

// administrator returns the address of the server and the credentials of a member of
// system:masters.
func (p *controlPlane) administrator() (Response, error) {
	ca, err := os.ReadFile(p.files.CA)
	if err != nil {
		return Response{}, err
	}
	cert, key, err := pki.Split(p.files.Admin)
	if err != nil {
		return Response{}, err
	}
	return Response{ControlPlane: p.name, URL: "https://" + p.listener.Addr().String(), CA: ca, Cert: cert, Key: key}, nil
}

func (p *controlPlane) user(name string, groups []string) (Response, error) {
	cert, key, err := pki.IssueClient(p.dir, name, groups, time.Now())
	if err != nil {
		return Response{}, fmt.Errorf("certificate of user %q: %w", name, err)
	}
	return Response{ControlPlane: p.name, Cert: cert, Key: key}, nil
}

// defaultFlags are the flags of the server. Those that concern the behaviour of the API are
// envtest's: RBAC, and no admission plugin for service accounts, because no controller creates
// them.
func (p *controlPlane) defaultFlags() []string {
	return []string{
		"--etcd-servers=" + p.host.etcd.Endpoint(),
		"--etcd-prefix=" + p.prefix(),
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none", // no pod connects to the service "kubernetes"
		"--tls-cert-file=" + p.files.Serving,
		"--tls-private-key-file=" + p.files.Serving,
		"--client-ca-file=" + p.files.CA,
		"--requestheader-client-ca-file=" + p.files.FrontProxyCA,
		"--requestheader-allowed-names=" + pki.FrontProxyUser,
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-uid-headers=X-Remote-Uid",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + p.files.FrontProxyClient,
		"--proxy-client-key-file=" + p.files.FrontProxyClient,
		"--service-account-issuer=https://" + p.listener.Addr().String() + "/",
		"--service-account-signing-key-file=" + p.files.ServiceAccountKey,
		"--service-account-key-file=" + p.files.ServiceAccountKey,
		"--service-cluster-ip-range=10.0.0.0/24",
		"--authorization-mode=RBAC",
		"--allow-privileged=true",
		"--disable-admission-plugins=ServiceAccount",
		"--strata-feature-gates=WatchHistoryRestore=false",
	}
}
