package mirror

import (
	"fmt"
	"strings"
	"sync"
)

// command is work for the writer, which runs it between two batches.
type command func(*writer)

// registry holds the resources of a mirror with their claims, and the commands that the writer
// has not run yet. One lock guards both, so that commands arrive in the order of the claims that
// they are about. All methods may be called concurrently.
type registry struct {
	due chan struct{} // holds a value if there are commands

	mu        sync.Mutex // leaf; held briefly; guards what follows and the claims of resources
	resources map[string]*Resource
	commands  []command
}

func newRegistry(root *Resource) registry {
	return registry{due: make(chan struct{}, 1), resources: map[string]*Resource{root.prefix: root}}
}

// claim adds a claim of the prefix, or an exclusion. Errors: ErrClosed.
func (s *shared) claim(prefix string, exclude bool) (*Resource, error) {
	if !strings.HasPrefix(prefix, s.opts.Prefix) || !strings.HasSuffix(prefix, "/") || prefix == s.opts.Prefix {
		return nil, fmt.Errorf("mirror: prefix %q is not below %q or does not end with a slash", prefix, s.opts.Prefix)
	}
	g := &s.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	if s.ctx.Err() != nil {
		return nil, ErrClosed
	}
	r := g.resources[prefix]
	if r == nil {
		r = &Resource{m: s, prefix: prefix}
		g.resources[prefix] = r
	}
	if r.refs > 0 && r.exclude != exclude {
		return nil, fmt.Errorf("mirror: prefix %q cannot be both claimed and excluded", prefix)
	}
	r.refs++
	if r.refs == 1 {
		r.exclude = exclude
		g.enqueueLocked(func(w *writer) { w.adopt(r, exclude) })
	}
	return r, nil
}

// Release ends a claim. With the last one the resource's history is dropped, and
// its values count against Options.UnclaimedBytes until the next claim.
func (r *Resource) Release() {
	g := &r.m.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.refs == 0 {
		panic("mirror: Release of " + r.prefix + ", which is not claimed")
	}
	r.refs--
	if r.refs == 0 {
		g.enqueueLocked(func(w *writer) { w.abandon(r) })
	}
}

// enqueue has the writer run the command between two batches.
func (g *registry) enqueue(c command) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.enqueueLocked(c)
}

func (g *registry) enqueueLocked(c command) {
	g.commands = append(g.commands, c)
	select {
	case g.due <- struct{}{}:
	default:
	}
}

// take returns the commands, which the caller runs, in order.
func (g *registry) take() []command {
	g.mu.Lock()
	defer g.mu.Unlock()
	commands := g.commands
	g.commands = nil
	return commands
}

// isClaimed reports whether the resource has a claim or an exclusion.
func (g *registry) isClaimed(r *Resource) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return r.refs > 0
}

// claimed returns the resources with a claim or an exclusion, in no order.
func (g *registry) claimed() []*Resource {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []*Resource
	for _, r := range g.resources {
		if r.refs > 0 {
			out = append(out, r)
		}
	}
	return out
}

// below returns the prefixes of the resources inside a prefix.
func (g *registry) below(prefix string) (prefixes []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for p := range g.resources {
		if p != prefix && strings.HasPrefix(p, prefix) {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

// countVersions returns the number of versions of the past, over all resources.
func (g *registry) countVersions() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.resources {
		if lin := r.cur.Load(); lin != nil {
			n += lin.versions()
		}
	}
	return n
}

// remove removes a resource without claims, and reports whether it has: the next claim of the
// prefix is of another resource.
func (g *registry) remove(r *Resource) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	// A command may be about a claim that has ended since; it must find the resource.
	if r.refs > 0 || len(g.commands) > 0 || g.resources[r.prefix] != r {
		return false
	}
	delete(g.resources, r.prefix)
	r.forgotten.Store(true)
	return true
}
