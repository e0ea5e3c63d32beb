package readpath

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// bodyCounter is a response writer that counts the bytes of the body.
type bodyCounter struct {
	header http.Header
	bytes  int
}

func (c *bodyCounter) Header() http.Header         { return c.header }
func (c *bodyCounter) WriteHeader(int)             {}
func (c *bodyCounter) Write(p []byte) (int, error) { c.bytes += len(p); return len(p), nil }

// manyPods returns a server of n pods of 1 KB.
func manyPods(b *testing.B, n int) *watched {
	b.Helper()
	w := watchedPods(b)
	var wg sync.WaitGroup
	work := make(chan int)
	for range 32 {
		wg.Go(func() {
			for i := range work {
				w.put(b, w.object(fmt.Sprintf("pod-%05d", i), map[string]string{"filler": strings.Repeat("x", 900)}))
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	w.catchUp(b)
	return w
}

// BenchmarkList measures cached lists of 10,000 pods of 1 KB, and a page of 500 of them, without a
// connection.
func BenchmarkList(b *testing.B) {
	w := manyPods(b, 10_000)
	for _, c := range []struct{ name, accept, encoding, query string }{
		{"json", jsonType, "", "resourceVersion=0"},
		{"protobuf", protobufType, "", "resourceVersion=0"},
		{"gzip", jsonType, "gzip", "resourceVersion=0"},
		{"page", jsonType, "", "limit=500"},
		{"namespace", protobufType, "", "resourceVersion=0&fieldSelector=metadata.namespace=ns"},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			list := func() {
				req := httptest.NewRequest(http.MethodGet, "/apis/example.apiserver.k8s.io/v1/pods?"+c.query, nil)
				req.Header.Set("Accept", c.accept)
				if c.encoding != "" {
					req.Header.Set("Accept-Encoding", c.encoding)
				}
				d := &bodyCounter{header: http.Header{}}
				if w.ServeHTTP(d, req); d.bytes < 10_000 {
					b.Fatalf("%d bytes", d.bytes)
				}
			}
			list() // encodes
			for b.Loop() {
				list()
			}
		})
	}
}
