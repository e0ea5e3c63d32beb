package inprocess

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"
)

const testURL = "https://127.0.0.1:6443"

// newTransport returns a client whose requests handler answers; others fail.
func newTransport(t *testing.T, handler http.HandlerFunc) (*http.Client, *Transport) {
	t.Helper()
	transport, err := New(&rest.Config{Host: testURL})
	if err != nil {
		t.Fatal(err)
	}
	transport.Serve(handler)
	return &http.Client{Transport: transport.wrap(&http.Transport{})}, transport
}

// stop stops the transport; it fails if a handler does not return.
func stop(t *testing.T, transport *Transport) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := transport.Stop(ctx); err != nil {
		t.Error(err)
	}
}

func get(t *testing.T, ctx context.Context, client *http.Client) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, testURL+"/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// TestTransport_FlushedEvents_ArriveBeforeEnd: a client reads each flushed part while the handler
// runs.
func TestTransport_FlushedEvents_ArriveBeforeEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := make(chan string)
		client, transport := newTransport(t, func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			for line := range next {
				fmt.Fprintln(w, line)
				w.(http.Flusher).Flush()
			}
		})
		defer stop(t, transport)
		resp := get(t, t.Context(), client)
		lines := bufio.NewScanner(resp.Body)
		for _, line := range []string{"a", "b", strings.Repeat("c", 60000)} {
			next <- line
			if !lines.Scan() || lines.Text() != line {
				t.Fatalf("got %d bytes, %v", len(lines.Text()), lines.Err())
			}
		}
		close(next)
		if lines.Scan() || lines.Err() != nil {
			t.Errorf("after the end: %q, %v", lines.Text(), lines.Err())
		}
	})
}

// TestTransport_ClientStopsReading_BlocksHandler: a handler gets no further than the window ahead
// of its client, and continues with it.
func TestTransport_ClientStopsReading_BlocksHandler(t *testing.T) {
	const part, parts = 10000, 200
	synctest.Test(t, func(t *testing.T) {
		var written atomic.Int64
		client, transport := newTransport(t, func(w http.ResponseWriter, _ *http.Request) {
			for range parts {
				n, _ := w.Write(bytes.Repeat([]byte("x"), part))
				written.Add(int64(n))
			}
		})
		defer stop(t, transport)
		resp := get(t, t.Context(), client)
		synctest.Wait()
		if n := written.Load(); n > window || n < window/2 {
			t.Errorf("%d bytes were written before the first read", n)
		}
		if _, err := io.CopyN(io.Discard, resp.Body, 5*part); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n := written.Load(); n > window+5*part || n < window/2 {
			t.Errorf("%d bytes were written after the first read", n)
		}
		rest, err := io.ReadAll(resp.Body)
		if err != nil || len(rest) != (parts-5)*part {
			t.Errorf("%d bytes, %v", len(rest), err)
		}
	})
}

// blocked is a handler that writes without end; its error and the state of its context go to the
// channel.
func blocked(ends chan<- error) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		for {
			if _, err := w.Write(make([]byte, window/3)); err != nil {
				<-req.Context().Done()
				ends <- err
				return
			}
		}
	}
}

// TestTransport_ClientLeaves_UnblocksHandler: a blocked write ends, and the handler's context is
// cancelled, when the client cancels its request, closes the body, or the server stops.
func TestTransport_ClientLeaves_UnblocksHandler(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, resp *http.Response, cancel func(), transport *Transport) (want error){
		"cancel": func(_ *testing.T, _ *http.Response, cancel func(), _ *Transport) error {
			cancel()
			return context.Canceled
		},
		"close": func(t *testing.T, resp *http.Response, _ func(), _ *Transport) error {
			if err := resp.Body.Close(); err != nil {
				t.Error(err)
			}
			return http.ErrBodyReadAfterClose
		},
		"stop": func(t *testing.T, _ *http.Response, _ func(), transport *Transport) error {
			stop(t, transport)
			return errStopped
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ends := make(chan error, 1)
				client, transport := newTransport(t, blocked(ends))
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				resp := get(t, ctx, client)
				synctest.Wait()
				want := leave(t, resp, cancel, transport)
				if err := <-ends; !errors.Is(err, want) {
					t.Errorf("the write failed with %v, want %v", err, want)
				}
				if _, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, want) {
					t.Errorf("the read failed with %v, want %v", err, want)
				}
				stop(t, transport)
			})
		})
	}
}

// TestTransport_ClientLeaves_UnblocksRead: a handler that waits for the body of its request ends
// like one that waits for its client.
func TestTransport_ClientLeaves_UnblocksRead(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, resp *http.Response, cancel func(), transport *Transport){
		"cancel": func(_ *testing.T, _ *http.Response, cancel func(), _ *Transport) { cancel() },
		"stop":   func(t *testing.T, _ *http.Response, _ func(), transport *Transport) { stop(t, transport) },
		"close": func(t *testing.T, resp *http.Response, _ func(), _ *Transport) {
			if err := resp.Body.Close(); err != nil {
				t.Error(err)
			}
		},
		"write deadline": func(*testing.T, *http.Response, func(), *Transport) {},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ends := make(chan error, 1)
				client, transport := newTransport(t, func(w http.ResponseWriter, req *http.Request) {
					if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
						t.Error(err)
					}
					w.(http.Flusher).Flush()
					_, err := io.ReadAll(req.Body)
					ends <- err
				})
				body, feed := io.Pipe()
				defer feed.Close() // ends the read of a handler that was not unblocked
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, testURL, body)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				leave(t, resp, cancel, transport)
				select {
				case err := <-ends:
					if err == nil {
						t.Error("the handler read the body to its end")
					}
				case <-time.After(2 * time.Minute):
					t.Error("the handler still waits for the body")
				}
				if _, err := feed.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
					t.Errorf("the client's body is open: %v", err)
				}
			})
		})
	}
}

// TestTransport_Stop_BreaksResponsesOff: a handler that returns because the server stops leaves no
// response that looks complete.
func TestTransport_Stop_BreaksResponsesOff(t *testing.T) {
	const requests = 200
	client, transport := newTransport(t, func(w http.ResponseWriter, req *http.Request) {
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	})
	var responses []*http.Response
	for range requests {
		responses = append(responses, get(t, t.Context(), client))
	}
	stop(t, transport)
	for _, resp := range responses {
		if _, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, errStopped) {
			t.Errorf("the read failed with %v, want %v", err, errStopped)
		}
	}
}

// TestTransport_CancelBeforeHeader_ReturnsAtOnce: a request that is cancelled, or exceeds the
// client's timeout, before the handler has answered fails.
func TestTransport_CancelBeforeHeader_ReturnsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, transport := newTransport(t, func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() })
		defer stop(t, transport)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, testURL, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = client.Do(req); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
		if _, err = client.Do(req); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled before: %v", err)
		}
		client.Timeout = time.Second
		_, err = client.Get(testURL)
		var timeout interface{ Timeout() bool }
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("timeout: %v", err)
		}
	})
}

// TestTransport_WriteDeadline_UnblocksHandler: the deadline of a response ends a blocked write, and
// the client gets an error after the bytes before.
func TestTransport_WriteDeadline_UnblocksHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ends := make(chan error, 1)
		client, transport := newTransport(t, func(w http.ResponseWriter, req *http.Request) {
			if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Error(err)
			}
			blocked(ends)(w, req)
		})
		defer stop(t, transport)
		began := time.Now()
		resp := get(t, t.Context(), client)
		if err := <-ends; !errors.Is(err, errAborted) || time.Since(began) != time.Minute {
			t.Errorf("the write failed with %v after %s", err, time.Since(began))
		}
		if n, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, errAborted) || n == 0 {
			t.Errorf("read %d bytes, %v", n, err)
		}
	})
}

// TestTransport_Panic_AbortsResponse: a panic of a handler ends its response with an error, and no
// other request.
func TestTransport_Panic_AbortsResponse(t *testing.T) {
	client, transport := newTransport(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "a")
		w.(http.Flusher).Flush()
		panic("on purpose")
	})
	defer stop(t, transport)
	for range 2 {
		resp := get(t, t.Context(), client)
		if body, err := io.ReadAll(resp.Body); string(body) != "a" || !errors.Is(err, errAborted) {
			t.Errorf("%q, %v", body, err)
		}
	}
}

// TestWriter_AfterHandler_ReturnsError: a ResponseWriter that is used after the handler has
// returned fails, and does not change the response.
func TestWriter_AfterHandler_ReturnsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var late http.ResponseWriter
		client, transport := newTransport(t, func(w http.ResponseWriter, _ *http.Request) {
			late = w
			fmt.Fprint(w, "a")
		})
		defer stop(t, transport)
		resp := get(t, t.Context(), client)
		synctest.Wait()
		controller := http.NewResponseController(late)
		if controller.SetWriteDeadline(time.Unix(1, 0)) == nil || controller.SetReadDeadline(time.Unix(1, 0)) == nil || controller.Flush() == nil {
			t.Error("no error")
		}
		if _, err := late.Write(make([]byte, 2*heldBytes)); err == nil {
			t.Error("a write succeeded")
		}
		if body, err := io.ReadAll(resp.Body); string(body) != "a" || err != nil {
			t.Errorf("%q, %v", body, err)
		}
	})
}

// TestTransport_CloseNotify_SignalsEnd: the channel of CloseNotify receives when the client leaves.
func TestTransport_CloseNotify_SignalsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		notified := make(chan bool, 1)
		client, transport := newTransport(t, func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			notified <- <-w.(closeNotifier).CloseNotify()
		})
		defer stop(t, transport)
		resp := get(t, t.Context(), client)
		resp.Body.Close()
		if !<-notified {
			t.Error("false")
		}
	})
}

// recorder is a transport in place of a connection.
type recorder struct {
	http.RoundTripper
	requests int
}

func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	r.requests++
	return &http.Response{StatusCode: http.StatusTeapot, Body: http.NoBody, Request: req}, nil
}

// TestTransport_Fallback_UsesConnection: requests that a handler cannot answer as over a connection
// use the connection.
func TestTransport_Fallback_UsesConnection(t *testing.T) {
	handler := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	for _, tt := range []struct {
		name, url  string
		change     func(*http.Request)
		prepare    func(*testing.T, *Transport)
		connection bool
	}{
		{name: "served", url: testURL + "/a"},
		{name: "other port", url: "https://127.0.0.1:6444/a", connection: true},
		{name: "other host", url: "https://kubernetes.default.svc:443/a", connection: true},
		{name: "http", url: "http://127.0.0.1:6443/a", connection: true},
		{name: "upgrade", url: testURL, change: func(req *http.Request) { req.Header.Set("Upgrade", "SPDY/3.1") }, connection: true},
		{name: "connect", url: testURL, change: func(req *http.Request) { req.Method = http.MethodConnect }, connection: true},
		{name: "trailers", url: testURL, change: func(req *http.Request) { req.Trailer = http.Header{"X": nil} }, connection: true},
		{name: "stopped", url: testURL, prepare: stop, connection: true},
		{name: "stopped, then served", url: testURL, prepare: func(t *testing.T, transport *Transport) {
			stop(t, transport)
			transport.Serve(handler)
		}, connection: true},
		{name: "not served yet", url: testURL, prepare: func(_ *testing.T, transport *Transport) { transport.Serve(nil) }, connection: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, transport := newTransport(t, handler)
			if tt.prepare != nil {
				tt.prepare(t, transport)
			}
			req, err := http.NewRequest(http.MethodGet, tt.url, nil)
			if err != nil {
				t.Fatal(err)
			}
			if tt.change != nil {
				tt.change(req)
			}
			connection := &recorder{}
			resp, err := (&roundTripper{transport, connection}).RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if got := connection.requests == 1; got != tt.connection {
				t.Errorf("over the connection: %v, want %v", got, tt.connection)
			}
			stop(t, transport)
		})
	}
}
