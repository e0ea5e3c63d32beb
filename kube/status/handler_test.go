package status

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

func get(t *testing.T, h http.Handler, method string) (*httptest.ResponseRecorder, Status) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, Path, nil))
	var s Status
	if w.Code == http.StatusOK {
		if err := json.Unmarshal(w.Body.Bytes(), &s); err != nil {
			t.Fatalf("%v: %s", err, w.Body)
		}
	}
	return w, s
}

func TestHandler_ManyRequests_ReadTwicePerSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		h := Handler(func() Status {
			reads++
			return Status{Watches: reads}
		})
		for range 10 {
			if _, s := get(t, h, http.MethodGet); s.Watches != 1 {
				t.Fatalf("reading %d", s.Watches)
			}
		}
		time.Sleep(fresh)
		_, s := get(t, h, http.MethodGet)
		if s.Watches != 2 || !s.Now.Equal(time.Now()) {
			t.Errorf("reading %d of %v, want the second one, of now", s.Watches, s.Now)
		}
		if s.Memory.UsedBytes <= 0 || s.Memory.HeapBytes <= 0 || s.Memory.HeapBytes > s.Memory.UsedBytes {
			t.Errorf("memory: %+v", s.Memory)
		}
	})
}

func TestHandler_Post_IsRefused(t *testing.T) {
	h := Handler(func() Status { t.Error("a refused request reads"); return Status{} })
	if w, _ := get(t, h, http.MethodPost); w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "GET, HEAD" {
		t.Errorf("%d, %v", w.Code, w.Header())
	}
}
