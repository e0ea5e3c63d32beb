package watchset

import "sync"

// Group is the goroutines of a storage. The zero value is empty. Safe for concurrent use.
type Group struct {
	mu    sync.Mutex // leaf
	ended bool
	wg    sync.WaitGroup
}

// Start runs f on a goroutine, or reports that the storage has ended.
func (g *Group) Start(f func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.ended {
		g.wg.Go(f)
	}
	return !g.ended
}

// End makes Start refuse from now on, and returns when all goroutines have ended.
func (g *Group) End() {
	g.mu.Lock()
	g.ended = true
	g.mu.Unlock()
	g.wg.Wait()
}
