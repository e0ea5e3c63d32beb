package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// watch is one stream that is read to its end.
type watch struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// watchPool opens watches and counts their frames.
type watchPool struct {
	ctx    context.Context
	frames map[scaling.Op]*atomic.Int64 // by the operation of the watch; Bookmark for bookmarks

	mu   sync.Mutex // guards err
	err  error      // the first unexpected end of a watch
	open atomic.Int64
}

func newWatchPool(ctx context.Context) *watchPool {
	p := &watchPool{ctx: ctx, frames: map[scaling.Op]*atomic.Int64{}}
	for _, op := range []scaling.Op{scaling.DeliverPod, scaling.DeliverAll, scaling.DeliverSlice, scaling.Bookmark} {
		p.frames[op] = new(atomic.Int64)
	}
	return p
}

// fail records the first error.
func (p *watchPool) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = errors.Join(p.err, err)
}

// failure returns the errors of watches so far.
func (p *watchPool) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// start opens a watch of path, which has a query, after revision, and returns when the server has accepted it. Its frames count as op.
func (p *watchPool) start(conn *target.Conn, path string, op scaling.Op, revision string) (*watch, error) {
	ctx, cancel := context.WithCancel(p.ctx)
	response, err := conn.Do(ctx, target.Request{
		Path:   path + "&watch=true&allowWatchBookmarks=true&resourceVersion=" + revision,
		Accept: protobufType + ";stream=watch",
	})
	if err != nil {
		cancel()
		return nil, err
	}
	w := &watch{cancel: cancel, done: make(chan struct{})}
	p.open.Add(1)
	go func() {
		defer close(w.done)
		defer response.Body.Close()
		defer p.open.Add(-1)
		if err := p.read(response.Body, op); ctx.Err() == nil {
			p.fail(fmt.Errorf("watch %s ended: %w", path, err))
		}
	}()
	return w, nil
}

// stop ends the watch.
func (w *watch) stop() {
	w.cancel()
	<-w.done
}

// bookmarkFrame and errorFrame begin the frames of these types: field 1 of WatchEvent.
const (
	bookmarkFrame = "\n\x08BOOKMARK"
	errorFrame    = "\n\x05ERROR"
)

// read counts frames until the stream ends.
func (p *watchPool) read(r io.Reader, op scaling.Op) error {
	var head [4 + len(bookmarkFrame)]byte
	for {
		if _, err := io.ReadFull(r, head[:4]); err != nil {
			return err
		}
		length := int(binary.BigEndian.Uint32(head[:4]))
		begin := head[4 : 4+min(length, len(bookmarkFrame))]
		if _, err := io.ReadFull(r, begin); err != nil {
			return err
		}
		if string(begin[:min(len(begin), len(errorFrame))]) == errorFrame {
			return errors.New("the server sent an ERROR event")
		}
		if _, err := io.CopyN(io.Discard, r, int64(length-len(begin))); err != nil {
			return err
		}
		if string(begin) == bookmarkFrame {
			p.frames[scaling.Bookmark].Add(1)
		} else {
			p.frames[op].Add(1)
		}
	}
}

// nodeWatch is one watch of a node: its path, with a query, and the operation that its frames count as.
type nodeWatch struct {
	path string
	op   scaling.Op
}

const proxySelector = "labelSelector=%21service.kubernetes.io%2Fheadless%2C%21service.kubernetes.io%2Fservice-proxy-name"

// nodeWatches returns the watches of a kubelet and of kube-proxy on node i: scaling.NodeWatches of them.
func nodeWatches(i int) []nodeWatch {
	self := nodePath + "?fieldSelector=metadata.name%3D" + nodeName(i)
	list := []nodeWatch{
		{"/api/v1/pods?fieldSelector=spec.nodeName%3D" + nodeName(i), scaling.DeliverPod},
		{self, scaling.DeliverAll},
		{"/api/v1/services?timeoutSeconds=3600", scaling.DeliverAll},
		{"/apis/storage.k8s.io/v1/csidrivers?timeoutSeconds=3600", scaling.DeliverAll},
		{"/apis/node.k8s.io/v1/runtimeclasses?timeoutSeconds=3600", scaling.DeliverAll},
		{self, scaling.DeliverAll},
		{"/api/v1/services?" + proxySelector, scaling.DeliverAll},
		{"/apis/discovery.k8s.io/v1/endpointslices?" + proxySelector, scaling.DeliverSlice},
		{"/apis/networking.k8s.io/v1/servicecidrs?timeoutSeconds=3600", scaling.DeliverAll},
	}
	for j := range scaling.ObjectWatches {
		kind := [...]string{"configmaps", "secrets"}[j%2]
		list = append(list, nodeWatch{fmt.Sprintf("/api/v1/namespaces/%s/%s?fieldSelector=metadata.name%%3Dobject-%d", namespaceName(i*20), kind, j), scaling.DeliverAll})
	}
	return list
}

// informerWatches returns the watches of informers of everything.
func informerWatches() []nodeWatch {
	var list []nodeWatch
	for path, n := range map[string]int{
		"/api/v1/pods": scaling.PodInformers, nodePath: scaling.NodeInformers, "/apis/coordination.k8s.io/v1/leases": scaling.LeaseInformers,
		"/api/v1/events": scaling.EventInformers,
	} {
		for range n {
			list = append(list, nodeWatch{path + "?timeoutSeconds=3600", scaling.DeliverAll})
		}
	}
	for range scaling.SliceInformers {
		list = append(list, nodeWatch{"/apis/discovery.k8s.io/v1/endpointslices?timeoutSeconds=3600", scaling.DeliverSlice})
	}
	return list
}
