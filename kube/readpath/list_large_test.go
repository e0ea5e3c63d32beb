package readpath

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"testing"

	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"

	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/kube/kubestorage"
)

// meter is a response writer that measures the live heap in the middle of the response.
type meter struct {
	httptest.ResponseRecorder
	after int
	looks int // 0: once
	alive uint64
}

func (m *meter) Write(p []byte) (int, error) {
	if m.after -= len(p); m.after <= 0 && m.alive == 0 {
		m.alive = heapAlive()
		for range m.looks { // other goroutines run meanwhile
			m.alive = max(m.alive, heapAlive())
		}
	}
	return len(p), nil
}

func heapAlive() uint64 {
	runtime.GC()
	runtime.GC() // frees pooled buffers
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// TestList_LargeObjectsSlowClient_HoldsFewObjects: the request of a slow client references few
// large objects and not whole leaves of them, even if no encoding can be cached.
func TestList_LargeObjectsSlowClient_HoldsFewObjects(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	if testrace.Enabled {
		t.Skip("measures the heap: not under the race detector")
	}
	const objects, size = 120, 100 << 10
	w := watchedPodsWith(t, func(o *kubestorage.Options) { o.RepresentationBytes = 1 })
	half := make([]byte, size/2)
	for i := range objects {
		_, _ = rand.Read(half)
		w.put(t, w.object(fmt.Sprintf("large-%03d", i), map[string]string{"a": hex.EncodeToString(half)}))
	}
	w.catchUp(t)
	for _, media := range []media{mediaJSON, mediaProtobuf} {
		t.Run(string(media), func(t *testing.T) {
			send := func(rw http.ResponseWriter) {
				req := httptest.NewRequest(http.MethodGet, "/apis/example.apiserver.k8s.io/v1/pods?resourceVersion=0", nil)
				req.Header.Set("Accept", string(media))
				w.ServeHTTP(rw, req)
			}
			whole := httptest.NewRecorder()
			send(whole)
			if n := whole.Body.Len(); n < objects*size || strconv.Itoa(n) != whole.Header().Get("Content-Length") {
				t.Fatalf("%d bytes with Content-Length %q", n, whole.Header().Get("Content-Length"))
			}
			if media == mediaJSON {
				var list examplev1.PodList
				if err := json.NewDecoder(bytes.NewReader(whole.Body.Bytes())).Decode(&list); err != nil || len(list.Items) != objects {
					t.Fatalf("%d objects, %v", len(list.Items), err)
				}
			}
			whole = nil
			before := heapAlive()
			m := &meter{after: objects * size / 2}
			m.ResponseRecorder = *httptest.NewRecorder()
			send(m)
			if m.alive == 0 {
				t.Fatal("nothing was written")
			}
			if grown := int64(m.alive) - int64(before); grown > objects*size/8 {
				t.Errorf("%d KiB more are alive in the middle of a list of %d MiB", grown>>10, objects*size>>20)
			}
		})
	}
}
