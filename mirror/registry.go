package mirror

import (
	"strings"
	"sync"
)

// registry holds the resources of a mirror with their claims, and the pending commands of the
// writer. One lock guards both, so that commands are in the order of their claims. All methods may
// be called concurrently.
type registry struct {
	due chan struct{} // contains a value if there are commands

	mu        sync.Mutex // leaf; held briefly; guards the fields below and the claims of resources
	resources map[string]*Resource
	commands  []command
}

// command is work for the writer, which runs it between two batches.
type command func(*writer)

func newRegistry(root *Resource) registry {
	return registry{due: make(chan struct{}, 1), resources: map[string]*Resource{root.prefix: root}}
}

// enqueue makes the writer run the command between two batches.
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

// take removes and returns the commands, in order. The caller runs them.
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

// histories returns the number of old versions, and the highest floor of a log, over all resources.
func (g *registry) histories() (versions int, floor Revision) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.resources {
		if lin := r.lineage.Load(); lin != nil {
			versions += lin.versions()
			floor = max(floor, lin.log.Floor())
		}
	}
	return versions, floor
}

// remove removes a resource without claims, and reports whether it did. The next claim of the
// prefix creates another resource.
func (g *registry) remove(r *Resource) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	// A pending command may concern a claim that has ended since; it must find the resource.
	if r.refs > 0 || len(g.commands) > 0 || g.resources[r.prefix] != r {
		return false
	}
	delete(g.resources, r.prefix)
	r.removed.Store(true)
	return true
}
