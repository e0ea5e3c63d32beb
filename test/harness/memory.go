package harness

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Resident returns the resident memory of the process in bytes (VmRSS). It returns an error where
// there is no /proc.
func (p *Process) Resident() (bytes int64, err error) {
	memory, err := p.Memory()
	return int64(memory.Resident), err
}

// Resident is Process.Resident of the etcd's process.
func (e *Etcd) Resident() (bytes int64, err error) { return e.p.Resident() }

// Held is a server's memory after a garbage collection, as reported by its runtime and by the
// kernel.
type Held struct {
	// bytes; Live are those of objects, Heap has the free space between them too
	Live, Heap, Stacks, Resident int64
	Goroutines                   int
}

func (h Held) String() string {
	return fmt.Sprintf("heap %.1f MB, stacks %.1f MB, resident %.1f MB, %d goroutines",
		float64(h.Heap)/1e6, float64(h.Stacks)/1e6, float64(h.Resident)/1e6, h.Goroutines)
}

// Held makes the server collect its garbage, as api's user, and returns its memory afterwards.
func (s *Server) Held(ctx context.Context, api *API) (h Held, err error) {
	var profile *Response
	for range 2 { // the second collection frees the content of sync.Pools
		if profile, err = debugPage(ctx, api, "/debug/pprof/heap", "gc=1&debug=1"); err != nil {
			return h, err
		}
	}
	lines := bufio.NewScanner(bytes.NewReader(profile.Body))
	lines.Buffer(nil, len(profile.Body)+1)
	for lines.Scan() {
		for prefix, value := range map[string]*int64{"# HeapAlloc = ": &h.Live, "# HeapInuse = ": &h.Heap, "# Stack = ": &h.Stacks} {
			if text, ok := strings.CutPrefix(lines.Text(), prefix); ok {
				text, _, _ = strings.Cut(text, " ")
				if *value, err = strconv.ParseInt(text, 10, 64); err != nil {
					return h, fmt.Errorf("heap profile: %w", err)
				}
			}
		}
	}
	goroutines, err := debugPage(ctx, api, "/debug/pprof/goroutine", "debug=1")
	if err != nil {
		return h, err
	}
	if _, err := fmt.Sscanf(string(goroutines.Body), "goroutine profile: total %d", &h.Goroutines); err != nil {
		return h, fmt.Errorf("goroutine profile: %w", err)
	}
	if h.Heap == 0 || h.Stacks == 0 {
		return h, errors.New("the heap profile lacks the memory in use")
	}
	h.Resident, err = s.Resident()
	return h, err
}

func debugPage(ctx context.Context, api *API, path, query string) (*Response, error) {
	r, err := api.DoAs(ctx, http.MethodGet, path, query, "", "text/plain", nil)
	if err == nil && r.Code != http.StatusOK {
		err = fmt.Errorf("%s: %w", path, r.Err())
	}
	return r, err
}

// AwaitReleased waits until the server's memory is about as much as before, for at most patience,
// and reports the remaining difference.
func (s *Server) AwaitReleased(t testing.TB, ctx context.Context, api *API, before Held, spareBytes int64, spareGoroutines int, patience time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not returned within %v", patience))
	defer cancel()
	var last Held
	err := Poll(ctx, func(ctx context.Context) (ok bool, err error) {
		if last, err = s.Held(ctx, api); err != nil {
			return false, err
		}
		more := last.Heap + last.Stacks - before.Heap - before.Stacks
		return more <= spareBytes && last.Goroutines <= before.Goroutines+spareGoroutines, fmt.Errorf("it holds %v; before: %v", last, before)
	})
	t.Log("afterwards:", last)
	if err != nil {
		t.Error("after the clients have disconnected:", err)
	}
}
