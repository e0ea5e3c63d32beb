package etcdsource

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/stratakube/strata/mirror"
)

// FuzzCompactionKey writes arbitrary values to the compaction key: only a decimal revision below
// the write's own is recorded.
func FuzzCompactionKey(f *testing.F) {
	for _, text := range []string{"", "0", "1", "99", "100", "101", "-1", "+7", "007", " 7", "7\n", "7.0", "1_0", "0x7", "9223372036854775807", "9223372036854775808",
		"99999999999999999999999", "\x00", "１"} {
		f.Add([]byte(text), int64(100), []byte("42"))
	}
	f.Fuzz(func(t *testing.T, value []byte, written int64, earlier []byte) {
		var called []mirror.Revision
		c := &Compactor{opts: CompactorOptions{
			Logger:       slog.New(slog.NewTextHandler(io.Discard, nil)),
			OnCompaction: func(rev mirror.Revision) { called = append(called, rev) },
		}}
		var want []mirror.Revision
		highest, invalid := mirror.Revision(0), int64(0)
		for i, value := range [][]byte{earlier, value} {
			written := written + int64(i)
			c.noteRevision(written) // as the read or the watch that has the key does
			c.applyAnnouncement(&mvccpb.KeyValue{Key: []byte(CompactionKey), Value: value, ModRevision: written})
			n, ok := new(big.Int).SetString(string(value), 10)
			switch {
			case !ok || n.Sign() < 0 || n.Cmp(big.NewInt(written)) >= 0:
				invalid++
			case n.Sign() > 0:
				want, highest = append(want, n.Int64()), max(highest, n.Int64())
			}
		}
		if !slices.Equal(called, want) || c.CompactRevision() != highest {
			t.Fatalf("%q, then %q of %d: compact revision %d, OnCompaction calls %d; want %d", earlier, value, written, c.CompactRevision(), called, want)
		}
		if got := c.Stats().InvalidAnnouncements; got != invalid && written != 0 {
			// revision 0 does not exist
			t.Fatalf("%q, then %q of %d: %d invalid announcements, want %d", earlier, value, written, got, invalid)
		}
	})
}

var threeNumbers = regexp.MustCompile(`^v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-rc\.\d{1,3})?$`)

// FuzzCheckVersion checks arbitrary version strings.
func FuzzCheckVersion(f *testing.F) {
	for _, v := range []string{"3.6.8", "3.5.13", "3.5.12", "3.5.13-rc.1", "v3.4.31", "3.4.30", "4.0.0", "2.99.99", "", "3", "3.5", "3.5.x", "3..", "vv3.6.1", "3.6.0+git", "-1.0.0", "99999999999999999999.0.0"} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, version string) {
		err := checkVersion(version)
		m := threeNumbers.FindStringSubmatch(version)
		if m == nil {
			return
		}
		var n [3]int
		for i := range n {
			n[i], _ = strconv.Atoi(m[i+1])
		}
		bad := slices.Compare(n[:], []int{3, 4, 31}) < 0 || n[0] == 3 && n[1] == 5 && n[2] < 13
		if errors.Is(err, ErrProgressBug) != bad || err != nil && !bad {
			t.Fatalf("%q: %v; may send progress ahead of events: %v", version, err, bad)
		}
	})
}

// saying is a watch stream with scripted responses.
type saying struct {
	pb.Watch_WatchClient
	messages [][]byte
	heard    []*pb.WatchResponse
}

func (s *saying) Recv() (*pb.WatchResponse, error) {
	if len(s.messages) == 0 {
		return nil, io.EOF
	}
	r := &pb.WatchResponse{}
	err := proto.Unmarshal(s.messages[0], r)
	s.messages = s.messages[1:]
	if err != nil {
		return nil, err
	}
	again := &pb.WatchResponse{} // the stream may modify its own copy
	if err := proto.Unmarshal(must(proto.Marshal(r)), again); err == nil {
		s.heard = append(s.heard, again)
	}
	return r, nil
}

func must(data []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return data
}

// cut splits the input of a fuzzer into messages: each is preceded by its length in one byte.
func cut(input []byte) (messages [][]byte) {
	for len(input) > 0 {
		n := min(int(input[0]), len(input)-1)
		messages = append(messages, input[1:1+n])
		input = input[1+n:]
	}
	return messages
}

func joined[M proto.Message](messages ...M) (input []byte) {
	for _, m := range messages {
		data := must(proto.Marshal(m))
		input = append(append(input, byte(len(data))), data...)
	}
	return input
}

func put(key, value string, rev int64) *mvccpb.Event {
	return &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte(key), Value: []byte(value), CreateRevision: rev, ModRevision: rev, Version: 1}}
}

// FuzzWatchResponses sends arbitrary responses on the streams of a replay. The delivered events are
// those that were sent, with fragments joined, none repeated or out of order, or there is an error;
// the history ends at the requested revision.
func FuzzWatchResponses(f *testing.F) {
	header := &pb.ResponseHeader{ClusterId: 1, Revision: 9}
	gone := &mvccpb.Event{Type: mvccpb.DELETE, Kv: &mvccpb.KeyValue{Key: []byte("/registry/a"), ModRevision: 8}}
	f.Add(joined(&pb.WatchResponse{Header: header, Created: true}, &pb.WatchResponse{Header: header, Events: []*mvccpb.Event{put("/registry/a", "x", 7), gone}}), int64(7), 0)
	for _, maxBytes := range []int{0, 100, 200} {
		f.Add(joined(&pb.WatchResponse{Header: header, Fragment: true, Events: []*mvccpb.Event{put("/registry/a", "x", 7)}},
			&pb.WatchResponse{Header: header, Events: []*mvccpb.Event{put("/registry/b", "x", 7)}}, &pb.WatchResponse{Header: header}), int64(9), maxBytes)
	}
	f.Add(joined(&pb.WatchResponse{Header: header, Events: []*mvccpb.Event{{}}}), int64(9), 0)
	f.Add(joined(&pb.WatchResponse{Header: header, Fragment: true, Events: []*mvccpb.Event{put("/registry/a", "x", 7)}}, &pb.WatchResponse{}), int64(9), 0)
	f.Add(joined(&pb.WatchResponse{Header: header, CompactRevision: 5, Canceled: true}), int64(9), 0)
	f.Add(joined(&pb.WatchResponse{Header: &pb.ResponseHeader{ClusterId: 2}}), int64(9), 0)
	f.Add(joined(&pb.WatchResponse{Header: header, Canceled: true, CancelReason: "why"}), int64(9), 0)
	f.Add([]byte{0, 1, 0xff, 2, 0x5a, 0}, int64(0), 1)
	f.Fuzz(func(t *testing.T, input []byte, through int64, maxBytes int) {
		s := &saying{messages: cut(input)}
		l := &watchStream{stream: s, cluster: 1, lastResponse: new(atomic.Int64), progressRequested: make(chan struct{}, 1)}
		for {
			before := len(s.heard)
			r, err := l.receive(max(0, maxBytes))
			if err != nil {
				if last := len(s.heard) - 1; len(s.messages) > 0 && last >= before {
					h := s.heard[last]
					bad := h.Header == nil || h.Header.ClusterId != 1 || h.CompactRevision != 0 || h.Canceled || slices.ContainsFunc(h.Events, func(e *mvccpb.Event) bool { return e.Kv == nil })
					if !bad && !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "proto") && !strings.Contains(err.Error(), "EOF") {
						t.Fatalf("%v of %+v", err, h)
					}
				}
				return
			}
			var want []*mvccpb.Event
			begun := false // until then a watch is created
			for _, h := range s.heard[before:] {
				if begun = begun || !h.Created; begun {
					want = append(want, h.Events...)
				}
			}
			if !slices.EqualFunc(r.Events, want, func(a, b *mvccpb.Event) bool { return bytes.Equal(must(proto.Marshal(a)), must(proto.Marshal(b))) }) {
				t.Fatalf("handed on %v, want %v", r.Events, want)
			}
			b := (&historyReader{source: &Source{}, through: through}).batch(r)
			for i, c := range b.Changes {
				e := want[i]
				if c.ModRevision > through || string(c.Key) != string(e.Kv.Key) || c.Deleted != (e.Type == mvccpb.DELETE) || c.ModRevision != e.Kv.ModRevision || c.Version != e.Kv.Version {
					t.Fatalf("up to %d: %+v of %v", through, c, e)
				}
			}
			if n := len(b.Changes); n < len(want) && want[n].Kv.ModRevision <= through {
				t.Fatalf("up to %d: ends before %v", through, want[n])
			}
		}
	})
}

// pages is an etcd that answers ranges from a script.
type pages struct {
	clientv3.KV
	messages [][]byte
	asked    []string
}

var errNoMore = errors.New("no more pages")

func (p *pages) Get(_ context.Context, key string, _ ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	p.asked = append(p.asked, key)
	if len(p.messages) == 0 {
		return nil, errNoMore
	}
	r := &pb.RangeResponse{}
	err := proto.Unmarshal(p.messages[0], r)
	p.messages = p.messages[1:]
	if r.Header == nil {
		r.Header = &pb.ResponseHeader{}
	}
	return (*clientv3.GetResponse)(r), err
}

// FuzzPages answers the requests for the pages of a list arbitrarily. The keys are delivered in
// order, each once and none outside of the range, or there is an error, and no page is requested
// twice.
func FuzzPages(f *testing.F) {
	kv := func(key string) *mvccpb.KeyValue {
		return &mvccpb.KeyValue{Key: []byte(key), Value: []byte("v"), ModRevision: 5, CreateRevision: 5, Version: 1}
	}
	header := &pb.ResponseHeader{ClusterId: 1, Revision: 9}
	page := func(more bool, keys ...string) *pb.RangeResponse {
		r := &pb.RangeResponse{Header: header, More: more, Count: 7}
		for _, key := range keys {
			r.Kvs = append(r.Kvs, kv(key))
		}
		return r
	}
	f.Add(joined(page(true, "/a/1", "/a/2"), page(false, "/a/3")))
	f.Add(joined(page(true, "/a/1", "/a/2"), page(true, "/a/1", "/a/2")))
	f.Add(joined(page(true, "/a/2", "/a/1")))
	f.Add(joined(page(true, "/a/1"), page(false, "/a/1")))
	f.Add(joined(page(true, "/b/1"), page(false, "/a/1")))
	f.Add(joined(page(true)))
	f.Add(joined(&pb.RangeResponse{Header: header, Kvs: []*mvccpb.KeyValue{{}}, More: true}))
	f.Fuzz(func(t *testing.T, input []byte) {
		etcd := &pages{messages: cut(input)}
		pager := NewPager(etcd, "/a/", "/a0", 0)
		last := ""
		for !pager.Done() {
			p, err := pager.Next(context.Background(), 0)
			if err != nil {
				return
			}
			for _, kv := range p.KVs {
				if key := string(kv.Key); key <= last || key < "/a/" || key >= "/a0" {
					t.Fatalf("%q after %q", key, last)
				}
				last = string(kv.Key)
			}
		}
		if !slices.IsSorted(etcd.asked) || len(slices.Compact(slices.Clone(etcd.asked))) != len(etcd.asked) {
			t.Fatalf("requested %q, want sorted keys without duplicates", etcd.asked)
		}
	})
}
