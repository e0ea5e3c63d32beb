package mirror_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

func TestTimes_WritesAndIdleness_AreTimedToASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		put := func() mirror.Revision { return store.Txn(memory.Op{Key: root + "a/a", Value: "v"}) }
		put()
		m, err := mirror.New(mirror.Options{Prefix: root, Source: store, Logger: quiet(), Window: mirror.Window{MaxAge: time.Minute}})
		testcheck.NoError(t, err)
		defer m.Close()
		began := time.Now()
		type written struct {
			rev mirror.Revision
			at  time.Duration
		}
		var writes []written
		write := func() {
			rev := put()
			testcheck.NoError(t, m.Wait(context.Background(), rev))
			writes = append(writes, written{rev, time.Since(began)})
		}
		for range 20 { // two seconds of writes
			write()
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(30 * time.Second)
		write() // after an idle time
		write()
		time.Sleep(2 * time.Second)

		times := m.Times()
		for i := 1; i < len(times); i++ {
			if times[i].Revision <= times[i-1].Revision || times[i].Time.Before(times[i-1].Time) {
				t.Errorf("%v after %v", times[i], times[i-1])
			}
			if i > 1 && times[i].Time.Sub(times[i-2].Time) < time.Second {
				t.Errorf("%v, %v and %v within a second", times[i-2], times[i-1], times[i])
			}
		}
		for _, w := range writes {
			at := time.Duration(-1)
			for _, x := range times {
				if x.Revision >= w.rev {
					at = x.Time.Sub(began)
					break
				}
			}
			if at < w.at || at > w.at+time.Second {
				t.Errorf("revision %d was written after %v, and is timed at %v", w.rev, w.at, at)
			}
		}
		if len(times) > 8 {
			t.Errorf("%d times for 3 seconds with writes", len(times))
		}
		last := times[len(times)-1]
		time.Sleep(3 * time.Minute)
		if times := m.Times(); len(times) != 1 || times[0] != last {
			t.Errorf("after the window there is %v, want the newest time, %v", times, last)
		}
	})
}

func TestTimes_RestoredEtcd_BeginAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		for range 50 {
			store.Txn(memory.Op{Key: root + "a/a", Value: "v"})
		}
		m, err := mirror.New(mirror.Options{Prefix: root, Source: store, Logger: quiet()})
		testcheck.NoError(t, err)
		defer m.Close()
		time.Sleep(10 * time.Second)
		before := m.Times()
		if len(before) == 0 {
			t.Fatal("no times")
		}
		restored := time.Now()
		store.Restore(20, map[string]string{root + "a/a": "v"})
		store.Txn(memory.Op{Key: root + "a/a", Value: "w"})
		time.Sleep(time.Minute)
		for _, x := range m.Times() {
			if x.Time.Before(restored) {
				t.Errorf("%v is from before the restore", x)
			}
		}
	})
}
