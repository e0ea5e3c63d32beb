package status

import (
	"encoding/json"
	"math"
	"net/http"
	"runtime/metrics"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Path is where servers mount Handler.
const Path = "/debug/strata/status"

// fresh is the age up to which a reading answers further requests, so that many readers cost as
// much as two per second.
const fresh = 500 * time.Millisecond

// Handler returns a handler that answers GET with a Status. read is called at most twice per
// second, and never without requests. The handler does not authorize requests: mount it behind
// filters that do.
func Handler(read func() Status) http.Handler {
	var last struct {
		sync.Mutex // held during read: requests of one moment share its result
		at         time.Time
		body       []byte
	}
	current := func() ([]byte, error) {
		last.Lock()
		defer last.Unlock()
		if last.body != nil && time.Since(last.at) < fresh {
			return last.body, nil
		}
		s := read()
		s.Now = time.Now()
		s.Memory.read()
		body, err := json.Marshal(s)
		if err == nil {
			last.at, last.body = time.Now(), append(body, '\n')
		}
		return last.body, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed: use GET or HEAD", http.StatusMethodNotAllowed)
			return
		}
		body, err := current()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if _, err := w.Write(body); err != nil {
			klog.FromContext(r.Context()).V(4).Info("Failed to write the status", "err", err)
		}
	})
}

// read sets the values of the Go runtime. It does not stop the world.
func (m *Memory) read() {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/gomemlimit:bytes"},
	}
	metrics.Read(samples)
	value := func(i int) int64 {
		if samples[i].Value.Kind() != metrics.KindUint64 {
			return 0
		}
		return int64(min(samples[i].Value.Uint64(), math.MaxInt64))
	}
	m.UsedBytes, m.HeapBytes = value(0)-value(1), value(2)
	if limit := value(3); limit < math.MaxInt64 {
		m.LimitBytes = limit
	}
}
