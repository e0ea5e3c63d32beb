package testserver

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/embedetcd"
)

// etcdTimeout bounds the start of etcd and each of its requests; both take milliseconds.
const etcdTimeout = 30 * time.Second

// host runs control planes on one etcd.
type host struct {
	ctx     context.Context // of the process
	dir     string
	args    []string // flags of the process
	process apiserver.Process

	etcdOnce sync.Once
	etcd     *embedetcd.Server
	client   *clientv3.Client
	etcdErr  error

	mu            sync.Mutex // guards the fields below; held briefly
	last          int        // number of the newest control plane
	controlPlanes map[string]*controlPlane
	copied        map[string]template // by controlPlane.api
	spares        []*controlPlane     // the oldest first; all have the same flags
	reused        bool                // a start took a spare
}

// runningSpares is the number of spare control planes that run, in a process that has started a
// second one: one that the next start takes, and one whose handlers are built meanwhile on another
// processor. Each has 70 MiB.
const runningSpares = 2

// newHost returns a host and starts its etcd in the background.
func newHost(ctx context.Context, dir string, args []string) *host {
	h := &host{ctx: ctx, dir: dir, args: args, controlPlanes: map[string]*controlPlane{}, copied: map[string]template{}}
	go func() { _ = h.startEtcd() }() // start returns its error
	return h
}

// startEtcd returns when etcd serves.
func (h *host) startEtcd() error {
	h.etcdOnce.Do(func() {
		ctx, cancel := context.WithTimeout(h.ctx, etcdTimeout)
		defer cancel()
		if h.etcd, h.etcdErr = embedetcd.Start(ctx, embedetcd.Config{Dir: filepath.Join(h.dir, "etcd"), UnsafeNoFsync: true}); h.etcdErr != nil {
			return
		}
		h.client, h.etcdErr = clientv3.New(clientv3.Config{Endpoints: []string{h.etcd.Endpoint()}, Context: h.ctx})
	})
	return h.etcdErr
}

// start starts a control plane and returns when it is ready. flags are added to those that the host
// sets.
func (h *host) start(ctx context.Context, flags []string) (Response, error) {
	if err := checkFlags(flags); err != nil {
		return Response{}, err
	}
	p := h.takeSpare(flags)
	if p == nil {
		p = h.newControlPlane(flags)
		p.build()
	}
	if err := h.await(ctx, p); err != nil {
		_ = p.stop()
		return Response{}, err
	}
	h.mu.Lock()
	h.controlPlanes[p.name] = p
	h.mu.Unlock()
	h.makeSpares(flags)
	return p.administrator()
}

// await returns when p is ready for clients.
func (h *host) await(ctx context.Context, p *controlPlane) error {
	if p.up == nil {
		return h.bringUp(ctx, p)
	}
	select {
	case <-p.up:
		return p.upErr
	case <-ctx.Done():
		<-p.up // as controlPlane.start
		return context.Cause(ctx)
	}
}

// bringUp returns when p is ready for clients.
func (h *host) bringUp(ctx context.Context, p *controlPlane) error {
	if err := p.awaitBuilt(ctx); err != nil {
		return err
	}
	if err := p.start(ctx); err != nil {
		return err
	}
	if err := h.awaitFirstObjects(ctx, p); err != nil {
		return err
	}
	return h.keepTemplate(ctx, p)
}

// takeSpare returns the oldest spare control plane, which runs, or whose handlers are built or
// being built, and begins to prepare others. It returns nil if there is none with the flags.
func (h *host) takeSpare(flags []string) *controlPlane {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.spares) == 0 || !slices.Equal(h.spares[0].flags, flags) {
		return nil
	}
	p := h.spares[0]
	h.spares, h.reused = slices.Delete(h.spares, 0, 1), true
	h.makeSparesLocked(flags)
	return p
}

// makeSpares begins to prepare spare control planes with the flags of one that was started, unless
// there are some. After the first start the handlers of one are built, which is half of a start,
// and nothing of it runs: a process that starts one control plane usually starts another. A process
// that has started a second one gets runningSpares, which are ready.
func (h *host) makeSpares(flags []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.makeSparesLocked(flags)
}

func (h *host) makeSparesLocked(flags []string) {
	if len(h.spares) > 0 && !slices.Equal(h.spares[0].flags, flags) {
		return
	}
	wanted := 1
	if h.reused {
		wanted = runningSpares
	}
	for len(h.spares) < wanted {
		p := h.newControlPlaneLocked(flags)
		if h.reused {
			p.up = make(chan struct{})
			go func() {
				defer close(p.up)
				p.upErr = h.bringUp(h.ctx, p)
			}()
		}
		p.build()
		h.spares = append(h.spares, p)
	}
}

// user issues a client certificate.
func (h *host) user(r UserRequest) (Response, error) {
	h.mu.Lock()
	p := h.controlPlanes[r.ControlPlane]
	h.mu.Unlock()
	switch {
	case p == nil:
		return Response{}, fmt.Errorf("no control plane %q: it was stopped", r.ControlPlane)
	case r.Name == "":
		return Response{}, errors.New("the name of the user is empty")
	}
	return p.user(r.Name, r.Groups)
}

// stop stops a control plane and deletes its data. It is idempotent.
func (h *host) stop(name string) error {
	h.mu.Lock()
	p := h.controlPlanes[name]
	delete(h.controlPlanes, name)
	h.mu.Unlock()
	if p == nil {
		return nil
	}
	return p.stop()
}
