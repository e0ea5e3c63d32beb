package etcdsource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// streamServer answers Range with its keys, and RangeStream by a script.
type streamServer struct {
	pb.KVClient
	cluster   uint64
	revision  int64
	compacted bool
	keys      []*mvccpb.KeyValue
	// script sends the parts of a stream that begins at the key with the number from; its error
	// ends the stream.
	script func(ctx context.Context, from int, send func(*pb.RangeResponse)) error

	streams, pages int
	revisions      []int64 // of the requests of both
}

// newStreamServer returns a server with the given number of keys.
func newStreamServer(keys int) *streamServer {
	s := &streamServer{cluster: 7, revision: 1000}
	for i := range keys {
		s.keys = append(s.keys, &mvccpb.KeyValue{Key: fmt.Appendf(nil, "/x/%05d", i), Value: []byte("v"), CreateRevision: 2, ModRevision: int64(2 + i), Version: 1})
	}
	s.script = func(_ context.Context, from int, send func(*pb.RangeResponse)) error {
		s.parts(from, len(s.keys), send)
		send(s.end())
		return io.EOF
	}
	return s
}

// source returns a source of the server.
func (s *streamServer) source() *Source {
	return New(&clientv3.Client{KV: clientv3.NewKVFromKVClient(s, nil)}, "test", "/x/probe")
}

// parts sends the keys in parts of 100.
func (s *streamServer) parts(from, to int, send func(*pb.RangeResponse)) {
	for part := range slices.Chunk(s.keys[from:to], 100) {
		send(&pb.RangeResponse{Kvs: part})
	}
}

// end is the last part of a stream.
func (s *streamServer) end() *pb.RangeResponse {
	return &pb.RangeResponse{Header: &pb.ResponseHeader{ClusterId: s.cluster, Revision: s.revision}, Count: int64(len(s.keys))}
}

func (s *streamServer) from(key []byte) int {
	return slices.IndexFunc(append(s.keys, &mvccpb.KeyValue{Key: []byte("\xff")}), func(kv *mvccpb.KeyValue) bool { return string(kv.Key) >= string(key) })
}

func (s *streamServer) Range(ctx context.Context, in *pb.RangeRequest, _ ...grpc.CallOption) (*pb.RangeResponse, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	header := &pb.ResponseHeader{ClusterId: 7, Revision: s.revision}
	if in.CountOnly {
		return &pb.RangeResponse{Header: header}, nil
	}
	s.pages++
	s.revisions = append(s.revisions, in.Revision)
	if s.compacted {
		return nil, rpctypes.ErrCompacted
	}
	kvs := s.keys[s.from(in.Key):]
	resp := &pb.RangeResponse{Header: header, Count: int64(len(kvs))}
	resp.Kvs = kvs[:min(len(kvs), int(in.Limit))]
	resp.More = len(resp.Kvs) < len(kvs)
	return resp, nil
}

func (s *streamServer) RangeStream(ctx context.Context, in *pb.RangeRequest, _ ...grpc.CallOption) (pb.KV_RangeStreamClient, error) {
	s.streams++
	s.revisions = append(s.revisions, in.Revision)
	st := &scriptedStream{ctx: ctx, parts: make(chan *pb.RangeResponse)}
	go func() {
		st.err = s.script(ctx, s.from(in.Key), func(part *pb.RangeResponse) {
			select {
			case st.parts <- part:
			case <-ctx.Done():
			}
		})
		close(st.parts)
	}()
	return st, nil
}

type scriptedStream struct {
	grpc.ClientStream
	ctx   context.Context
	parts chan *pb.RangeResponse
	err   error // set before parts is closed
}

func (s *scriptedStream) Recv() (*pb.RangeStreamResponse, error) {
	select {
	case part, ok := <-s.parts:
		if !ok {
			return nil, s.err
		}
		return &pb.RangeStreamResponse{RangeResponse: part}, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

// listed returns the result of a list.
func listed(ctx context.Context, s *Source, at mirror.Revision) (keys []string, header driver.Header, err error) {
	header, err = s.List(ctx, "/x/", at, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			keys = append(keys, string(kv.Key))
		}
		return nil
	})
	return keys, header, err
}

// TestList_CanceledInPage_Fails: a list whose context ends does not look complete, read by a stream
// or by pages.
func TestList_CanceledInPage_Fails(t *testing.T) {
	for _, streams := range []bool{true, false} {
		for range 50 {
			server := newStreamServer(5000)
			if !streams {
				server.script = func(context.Context, int, func(*pb.RangeResponse)) error {
					return status.Error(codes.Unimplemented, "unknown method")
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			keys := 0
			_, err := server.source().List(ctx, "/x/", 0, func(kvs []driver.KV) error {
				cancel()
				keys += len(kvs)
				return nil
			})
			if !errors.Is(err, context.Canceled) || keys == 0 || keys == len(server.keys) {
				t.Fatalf("streams: %t: %d of %d keys, %v", streams, keys, len(server.keys), err)
			}
		}
	}
}

// TestListStream_WithFailures_ReturnsWhatPagesReturn: after any failure of a stream, the list
// continues by pages at the same revision and equals the list by pages alone.
func TestListStream_WithFailures_ReturnsWhatPagesReturn(t *testing.T) {
	fail := func(after int, err error) func(*streamServer) {
		return func(s *streamServer) {
			s.script = func(_ context.Context, from int, send func(*pb.RangeResponse)) error {
				s.parts(from, after, send)
				return err
			}
		}
	}
	for _, c := range []struct {
		name  string
		set   func(*streamServer)
		pages bool // whether pages are requested
	}{
		{"whole", func(*streamServer) {}, false},
		{"empty range", func(s *streamServer) { s.keys = nil }, false},
		{"one part", func(s *streamServer) {
			s.script = func(_ context.Context, from int, send func(*pb.RangeResponse)) error {
				end := s.end()
				end.Kvs = s.keys[from:]
				send(end)
				return io.EOF
			}
		}, false},
		{"unimplemented", fail(0, status.Error(codes.Unimplemented, "unknown method RangeStream")), true},
		{"unavailable at once", fail(0, status.Error(codes.Unavailable, "no leader")), true},
		{"unavailable in between", fail(300, status.Error(codes.Unavailable, "connection reset")), true},
		{"too large a part", fail(300, status.Error(codes.ResourceExhausted, "message larger than max")), true},
		{"cut", fail(300, io.EOF), true},
		{"a part without a range", func(s *streamServer) {
			s.script = func(_ context.Context, _ int, send func(*pb.RangeResponse)) error {
				send(nil)
				return io.EOF
			}
		}, true},
		{"no end after the last key", fail(1000, io.EOF), true},
		{"compacted", func(s *streamServer) {
			s.compacted = true
			fail(300, rpctypes.ErrCompacted)(s)
		}, true},
		{"silent", func(s *streamServer) {
			s.script = func(ctx context.Context, from int, send func(*pb.RangeResponse)) error {
				s.parts(from, 300, send)
				<-ctx.Done()
				return ctx.Err()
			}
		}, true},
	} {
		for _, at := range []mirror.Revision{0, 900} {
			t.Run(fmt.Sprintf("%s/at=%d", c.name, at), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					server := newStreamServer(1000)
					c.set(server)
					keys, header, err := listed(t.Context(), server.source(), at)
					if server.streams != 1 || server.pages > 0 != c.pages {
						t.Errorf("%d stream and %d page requests", server.streams, server.pages)
					}
					for _, rev := range server.revisions {
						if want := cmp.Or(at, server.revision); rev != want {
							t.Errorf("requested revision %d, want %d", rev, want)
						}
					}
					wantKeys, wantHeader, wantErr := listed(t.Context(), server.source().InPages(), at)
					if header != wantHeader || (err == nil) != (wantErr == nil) {
						t.Errorf("header %v, error %v; pages return %v, %v", header, err, wantHeader, wantErr)
					}
					if wantErr != nil {
						if err == nil || err.Error() != wantErr.Error() || !errors.Is(err, mirror.ErrCompacted) {
							t.Errorf("error %v, of pages %v", err, wantErr)
						}
						return
					}
					if !slices.Equal(keys, wantKeys) || len(keys) != len(server.keys) {
						t.Errorf("%d keys, pages return %d of %d", len(keys), len(wantKeys), len(server.keys))
					}
				})
			})
		}
	}
}

// TestListStream_Unimplemented_IsRetriedLater: lists are read in pages meanwhile.
func TestListStream_Unimplemented_IsRetriedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newStreamServer(10)
		offered := server.script
		server.script = func(context.Context, int, func(*pb.RangeResponse)) error {
			return status.Error(codes.Unimplemented, "unknown method RangeStream")
		}
		s := server.source()
		list := func(streams int) {
			t.Helper()
			if keys, _, err := listed(t.Context(), s, 0); err != nil || len(keys) != 10 {
				t.Fatalf("%d keys, %v", len(keys), err)
			}
			if server.streams != streams {
				t.Fatalf("%d stream requests, want %d", server.streams, streams)
			}
		}
		list(1)
		list(1)
		time.Sleep(streamsRecheck) // the bubble's time
		list(2)
		list(2)
		server.script = offered
		time.Sleep(streamsRecheck)
		list(3)
		list(4)
	})
}

// TestListStream_PermanentError_EndsList: an error that pages would return too ends the list.
func TestListStream_PermanentError_EndsList(t *testing.T) {
	t.Run("of the caller", func(t *testing.T) {
		server, enough := newStreamServer(1000), errors.New("enough")
		if _, err := server.source().List(t.Context(), "/x/", 0, func([]driver.KV) error { return enough }); err != enough || server.pages != 0 {
			t.Errorf("error %v after %d pages", err, server.pages)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		server := newStreamServer(1000)
		ctx, cancel := context.WithCancel(t.Context())
		parts := 0
		_, err := server.source().List(ctx, "/x/", 0, func([]driver.KV) error {
			if parts++; parts == 2 {
				cancel()
			}
			return nil
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("out of order", func(t *testing.T) {
		server := newStreamServer(1000)
		server.keys[150], server.keys[151] = server.keys[151], server.keys[150]
		if _, _, err := listed(t.Context(), server.source(), 0); err == nil || !strings.Contains(err.Error(), "out of order") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("another cluster", func(t *testing.T) {
		server := newStreamServer(1000)
		server.cluster = 8 // of the stream
		if _, _, err := listed(t.Context(), server.source(), 0); !errors.Is(err, mirror.ErrRestored) {
			t.Errorf("error %v", err)
		}
	})
}

// replacedServer is a streamServer that is replaced by another cluster, with the same revisions,
// after some pages. Its streams end after the first 300 keys.
type replacedServer struct {
	*streamServer
	after int
}

func (s *replacedServer) Range(ctx context.Context, in *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	resp, err := s.streamServer.Range(ctx, in, opts...)
	if err == nil && s.pages > s.after {
		resp.Header = &pb.ResponseHeader{ClusterId: 8, Revision: resp.Header.Revision}
	}
	return resp, err
}

// TestLists_EtcdReplacedBetweenPages_AreRestored: pages of two clusters are not one list, although
// both have its revision.
func TestLists_EtcdReplacedBetweenPages_AreRestored(t *testing.T) {
	for name, c := range map[string]struct {
		after int
		list  func(*Source, func([]driver.KV) error) error
	}{
		"pages": {1, func(s *Source, page func([]driver.KV) error) error {
			_, err := s.InPages().List(t.Context(), "/x/", 0, page)
			return err
		}},
		"pages at a revision": {1, func(s *Source, page func([]driver.KV) error) error {
			_, err := s.InPages().List(t.Context(), "/x/", 900, page)
			return err
		}},
		"stream, then pages": {0, func(s *Source, page func([]driver.KV) error) error {
			_, err := s.List(t.Context(), "/x/", 0, page)
			return err
		}},
		"keys": {1, func(s *Source, page func([]driver.KV) error) error {
			_, err := s.Keys(t.Context(), "/x/", 900, func(string) int { return 600 }, page)
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			server := &replacedServer{newStreamServer(1000), c.after}
			server.script = func(_ context.Context, from int, send func(*pb.RangeResponse)) error {
				server.parts(from, 300, send)
				return status.Error(codes.Unavailable, "connection reset")
			}
			s := New(&clientv3.Client{KV: clientv3.NewKVFromKVClient(server, nil)}, "test", "/x/probe")
			n := 0
			err := c.list(s, func(kvs []driver.KV) error { n += len(kvs); return nil })
			if !errors.Is(err, mirror.ErrRestored) || n == 0 || n == 1000 {
				t.Errorf("%d keys, %v; want some of the first cluster, and ErrRestored", n, err)
			}
		})
	}
}
