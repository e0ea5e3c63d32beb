package etcdsource

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/stratakube/strata/mirror/driver"
)

// TestReplay_SlowOrBrokenMember_IsCompleteOrFails: revisions 2 to 101 are read by three watches of
// ten revisions each. A response has eleven events, the last of which ends a segment.
func TestReplay_SlowOrBrokenMember_IsCompleteOrFails(t *testing.T) {
	const (
		through = 101
		never   = time.Hour
	)
	type past struct {
		*pastMember
		*Source
		last     int64                           // revision with an event
		outside  func(rev int64) bool            // revisions of keys without the prefix
		delay    func(start int64) time.Duration // of events
		breaks   func(watch int) bool            // watches that end, numbered from 1
		deliver  func(b driver.Batch) error      // in addition
		canceled time.Duration
	}
	delayed := func(d time.Duration) func(int64) time.Duration { return func(int64) time.Duration { return d } }
	for name, c := range map[string]struct {
		set     func(p *past)
		took    time.Duration // negative: any
		watches int           // 0: any
		fails   string
	}{
		"at once":         {func(*past) {}, 0, 10, ""},
		"later revisions": {func(p *past) { p.newest, p.last = 200, 200 }, 0, 10, ""},
		"slow":            {func(p *past) { p.delay = delayed(time.Second) }, 4 * time.Second, 10, ""},
		"first is slow": {func(p *past) { // meanwhile the queue is full
			p.replay.maxQueuedBytes = 11 * 200
			p.delay = func(start int64) time.Duration {
				return map[bool]time.Duration{true: 5 * time.Second, false: time.Second}[start == 2]
			}
		}, 8 * time.Second, 10, ""},
		"silent": {func(p *past) { p.replay.patience, p.delay = 800*time.Millisecond, delayed(never) }, 2750 * time.Millisecond, 6, "no response from etcd for 1.6s"},
		"silent later": {func(p *past) {
			p.replay.patience = 800 * time.Millisecond
			p.delay = func(start int64) time.Duration { return map[bool]time.Duration{false: never}[start == 2] }
		}, 3750 * time.Millisecond, 10, "no response from etcd for 1.6s"},
		"progress is late": {func(p *past) {
			p.replay.patience, p.last = 800*time.Millisecond, 95
			began := time.Now()
			p.behind = func() int64 { return map[bool]int64{true: 11}[time.Since(began) < 1950*time.Millisecond] }
		}, 2 * time.Second, 10, ""},
		"slow delivery": {func(p *past) {
			p.replay.patience, p.replay.watches, p.delay = 800*time.Millisecond, 1, delayed(100*time.Millisecond)
			p.deliver = func(b driver.Batch) error {
				if b.Through == 12 {
					time.Sleep(2 * time.Second)
				}
				return nil
			}
		}, -1, 10, ""}, // the second watch may begin before the delivery
		"breaks once":   {func(p *past) { p.breaks = func(watch int) bool { return watch == 1 } }, 50 * time.Millisecond, 0, ""},
		"breaks":        {func(p *past) { p.breaks = func(int) bool { return true } }, 50 * time.Millisecond, 0, "broken"},
		"is not wanted": {func(p *past) { p.deliver = func(driver.Batch) error { return errBroken } }, 0, 0, "broken"},
		"canceled":      {func(p *past) { p.delay, p.canceled = delayed(never), time.Second }, time.Second, 3, "broken"},
		"all keys": {func(p *past) {
			p.Source, p.outside = p.OfAllKeys(), func(rev int64) bool { return rev%10 == 0 }
		}, 0, 10, ""},
		"kine":            {func(p *past) { p.cluster = 0 }, 0, 1, ""},
		"another cluster": {func(p *past) { p.cluster = 8 }, 0, 0, "cluster ID 8"},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := &pastMember{cluster: 7, newest: through}
			p := past{
				pastMember: m, Source: New(serveInMemory(t, m), "test", "/probe").WithSegments(10, 3), last: through,
				outside: func(int64) bool { return false }, delay: delayed(0), breaks: func(int) bool { return false },
				deliver: func(driver.Batch) error { return nil }, canceled: 10 * time.Minute,
			}
			p.replay.patience = time.Minute
			c.set(&p)
			var watches atomic.Int64
			m.watch = func(ctx context.Context, start int64, send func(...*mvccpb.Event) error) error {
				if p.breaks(int(watches.Add(1))) {
					return errBroken
				}
				pause(ctx, p.delay(start))
				for ; start <= p.last; start += 11 {
					events := pastEvents(start, min(start+10, p.last), func(int64) int { return 200 })
					for _, e := range events {
						if e.Kv.ModRevision%7 == 0 {
							e.Type = mvccpb.DELETE
						}
						if p.outside(e.Kv.ModRevision) {
							e.Kv.Key = []byte("/other/y")
						}
					}
					if err := send(events...); err != nil {
						return err
					}
				}
				return nil
			}
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			defer time.AfterFunc(p.canceled, func() { cancel(errBroken) }).Stop()
			after := driver.Header{ClusterID: 7, Revision: 1}
			if p.cluster == 0 {
				after.ClusterID = unidentified
			}
			var got, all []int64
			for rev := int64(2); rev <= min(p.last, through); rev++ {
				if !p.outside(rev) {
					all = append(all, rev)
				}
			}
			began := time.Now()
			err := p.Replay(ctx, "/registry/", after, through, func(b driver.Batch) error {
				for _, c := range b.Changes {
					got = append(got, c.ModRevision)
					if c.Deleted != (c.ModRevision%7 == 0) {
						t.Errorf("%s: the key is deleted at %d: %t", name, c.ModRevision, c.Deleted)
					}
				}
				return p.deliver(b)
			})
			if took := time.Since(began); c.took >= 0 && took != c.took || c.watches > 0 && m.watched() != c.watches {
				t.Errorf("%s: %d watches in %s, want %d in %s", name, m.watched(), took, c.watches, c.took)
			}
			failed := err != nil && c.fails != "" && strings.Contains(err.Error(), c.fails)
			if !failed && (err != nil || c.fails != "" || !slices.Equal(got, all)) || !slices.Equal(got, all[:len(got)]) {
				t.Errorf("%s: revisions %v, %v; want the error %q", name, got, err, c.fails)
			}
		})
	}
}

func TestHistory_ConnectionClosed_ReturnsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := serveInMemory(t, &pastMember{})
		s := New(client, "test", "/probe")
		p := &sampler{source: s, conn: client.ActiveConnection()}
		_ = client.Close()
		if _, err := p.oldestRevision(t.Context()); err == nil {
			t.Error("oldestRevision returns no error")
		}
		if _, _, err := p.look(t.Context(), 1); err == nil {
			t.Error("look returns no error")
		}
		if err := (&historyReader{source: s}).read(t.Context(), p.conn, &segment{}, new(atomic.Int64), new(atomic.Int64)); err == nil {
			t.Error("read returns no error")
		}
	})
}
