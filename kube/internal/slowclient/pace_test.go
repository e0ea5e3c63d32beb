package slowclient

import (
	"errors"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// slowReader is a ResponseWriter whose writes take a given time.
type slowReader struct {
	*httptest.ResponseRecorder
	each  time.Duration
	cut   atomic.Bool
	sizes []int
}

func (s *slowReader) Write(p []byte) (int, error) {
	s.sizes = append(s.sizes, len(p))
	for end := time.Now().Add(s.each); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if s.cut.Load() {
			return 0, errors.New("cut")
		}
	}
	return len(p), nil
}

// TestPace_ClientReadsTooSlowly_IsEnded: only the response of a client that reads too slowly is
// ended.
func TestPace_ClientReadsTooSlowly_IsEnded(t *testing.T) {
	const chunk = 64 << 10
	for _, tt := range []struct {
		name  string
		each  time.Duration // for each chunk
		idle  time.Duration // of the server, between two chunks
		after time.Duration // time at which slow is called; 0: not within a minute
	}{
		{"at once", 0, 0, 0},
		{"above the rate", 200 * time.Millisecond, 0, 0},
		// half of the rate: patience is used up at half speed
		{"below the rate", 500 * time.Millisecond, 0, 20 * time.Second},
		{"hardly anything", 5 * time.Second, 0, patience + time.Second},
		{"nothing", time.Hour, 0, patience + time.Second},
		{"a server that takes its time", 200 * time.Millisecond, 5 * time.Second, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				conn := new(Connections).Begin(httptest.NewRequest("GET", "/", nil))
				response := &slowReader{ResponseRecorder: httptest.NewRecorder(), each: tt.each}
				var ended time.Duration
				calls := 0
				w := &Writer{ResponseWriter: response, Counts: true, Pace: NewPace(conn, MinBytesPerSecond, func() {
					calls++
					ended = time.Since(began)
					response.cut.Store(true)
				})}
				for time.Since(began) < time.Minute {
					if _, err := w.Write(make([]byte, chunk)); err != nil {
						break
					}
					time.Sleep(tt.idle + time.Millisecond)
				}
				synctest.Wait()
				switch {
				case tt.after == 0 && calls > 0:
					t.Errorf("ended after %s", ended)
				case tt.after > 0 && (calls != 1 || ended < patience || ended > tt.after+time.Second):
					t.Errorf("ended %d times, after %s; want once after %s", calls, ended, tt.after)
				}
			})
		})
	}
}

// TestPace_LongWriteToFastClient_IsNotEnded: a long write to a client that reads fast enough does
// not count as a stall.
func TestPace_LongWriteToFastClient_IsNotEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := new(Connections).Begin(httptest.NewRequest("GET", "/", nil))
		response := &slowReader{ResponseRecorder: httptest.NewRecorder(), each: 900 * time.Millisecond}
		w := &Writer{ResponseWriter: response, Counts: true, Pace: NewPace(conn, MinBytesPerSecond, func() { t.Error("ended") })}
		const size = 40*writeChunk + 1
		if n, err := w.Write(make([]byte, size)); n != size || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
		if n := len(response.sizes); n != 41 {
			t.Errorf("%d writes", n)
		}
	})
}

// TestPace_ResponsesOfOneConnection_ShareRate: responses on one connection share its rate.
func TestPace_ResponsesOfOneConnection_ShareRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, req := new(Connections), httptest.NewRequest("GET", "/", nil)
		var conns []*Conn
		for range 10 {
			conns = append(conns, p.Begin(req))
		}
		response := &slowReader{ResponseRecorder: httptest.NewRecorder(), each: 2 * time.Second}
		w := &Writer{ResponseWriter: response, Counts: true, Pace: NewPace(conns[0], MinBytesPerSecond, func() { t.Error("ended") })}
		for range 30 { // 32 KiB/s, and nine others
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range conns {
			c.End()
		}
		if len(p.conns) != 0 {
			t.Error("a connection without responses is known")
		}
	})
}
