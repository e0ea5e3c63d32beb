package readpath

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	apiwatch "k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// discard is a ResponseWriter that implements net/http's optional interfaces and discards the
// response.
type discard struct {
	header http.Header
	status int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) WriteHeader(code int)        { d.status = code }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) Flush()                      {}

//nolint:staticcheck // upstream's filters still ask for it
func (d *discard) CloseNotify() <-chan bool { return nil }

// connections is the number of connections that the watches of a benchmark share.
const connections = 8

// BenchmarkWatchFanout writes one event of 1 KB at a time and waits until each of 1,000 watches,
// over 8 HTTP/2 connections in this process, has received it. The floor is a server that only
// writes a prepared frame.
func BenchmarkWatchFanout(b *testing.B) {
	const watchers = 1000
	for _, engine := range []string{"strata", "upstream", "floor"} {
		for _, accept := range []string{jsonType, protobufType} {
			b.Run(fmt.Sprintf("%s/%s", engine, accept[strings.LastIndexAny(accept, "./")+1:]), func(b *testing.B) {
				w := watchedPods(b)
				url := fmt.Sprintf("/apis/%s/%s/namespaces/ns/pods?watch=1&resourceVersion=0", w.resource.GVR.Group, w.resource.GVR.Version)
				server, write := w.server, func(i int) {
					w.put(b, w.object("pod", map[string]string{"i": fmt.Sprint(i), "filler": strings.Repeat("x", 900)}))
				}
				var frame []byte
				if engine == "floor" {
					enc, err := w.resource.encodings.get(w.resource, format{media: media(accept)})
					testcheck.NoError(b, err)
					item, err := enc.appendItem(nil, w.object("pod", map[string]string{"i": "1", "filler": strings.Repeat("x", 900)}))
					testcheck.NoError(b, err)
					framer := enc.framer()
					buf, body, _ := framer.Begin(nil, apiwatch.Modified, item)
					frame = framer.End(append(buf, body...))
					server, write = newFloor(b, accept, frame)
				}
				var received atomic.Int64
				var wg sync.WaitGroup
				ctx, cancel := context.WithCancel(context.Background())
				for c := range connections {
					transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
					defer transport.CloseIdleConnections()
					for range watchers / connections {
						req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+url, nil)
						testcheck.NoError(b, err)
						req.Header.Set("Accept", accept)
						if engine == "upstream" {
							req.Header.Set("Engine", engine)
						}
						resp, err := transport.RoundTrip(req)
						if err != nil || resp.StatusCode != http.StatusOK {
							b.Fatalf("watch on connection %d: %v %v", c, resp, err)
						}
						wg.Go(func() {
							defer resp.Body.Close()
							f := readFrames(resp)
							for {
								if _, err := f.next(); err != nil {
									return
								}
								received.Add(1)
							}
						})
					}
				}
				one := func(i int) {
					want := received.Load() + watchers
					write(i)
					for received.Load() < want {
						runtime.Gosched()
						time.Sleep(20 * time.Microsecond)
					}
				}
				one(0)
				b.ReportAllocs()
				before := cpu()
				n := 0
				for b.Loop() {
					n++
					one(n)
				}
				b.ReportMetric(float64(cpu()-before)/float64(n*watchers), "cpu-ns/event")
				cancel()
				wg.Wait()
			})
		}
	}
}

// newFloor returns a server that sends frame to all its clients at each write.
func newFloor(b *testing.B, contentType string, frame []byte) (*httptest.Server, func(int)) {
	var mu sync.Mutex
	changed := make(chan struct{})
	current := func() chan struct{} {
		mu.Lock()
		defer mu.Unlock()
		return changed
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		for ch := current(); ; {
			select {
			case <-ch:
			case <-req.Context().Done():
				return
			}
			ch = current()
			_, _ = w.Write(frame)
			w.(http.Flusher).Flush()
		}
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	b.Cleanup(server.Close)
	return server, func(int) {
		mu.Lock()
		defer mu.Unlock()
		close(changed)
		changed = make(chan struct{})
	}
}

// cpu returns the CPU time of this process.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkWatchFrames measures the cost of one event for one watch without the connection: reading
// the event, framing it, and writing and flushing the frame.
func BenchmarkWatchFrames(b *testing.B) {
	w := watchedPods(b)
	for _, accept := range []media{mediaJSON, mediaProtobuf} {
		b.Run(string(accept[strings.LastIndexAny(string(accept), "./")+1:]), func(b *testing.B) {
			enc, err := w.resource.encodings.get(w.resource, format{media: accept})
			testcheck.NoError(b, err)
			item, err := enc.appendItem(nil, w.object("pod", map[string]string{"filler": strings.Repeat("x", 900)}))
			testcheck.NoError(b, err)
			sink := &discard{header: http.Header{}}
			out := &watchWriter{FrameEncoder: enc.framer(), w: sink, flusher: sink, count: nopMetric{}, sizes: nopMetric{}}
			b.SetBytes(int64(len(item)))
			b.ReportAllocs()
			for b.Loop() {
				testcheck.NoError(b, out.item(apiwatch.Modified, item))
				testcheck.NoError(b, out.flush())
			}
		})
	}
}
