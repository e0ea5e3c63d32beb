package etcdsource

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/stratakube/strata/mirror"
)

// compactionRecorder records the calls of OnCompaction.
type compactionRecorder struct {
	mu   sync.Mutex
	revs []mirror.Revision // each increase
}

func (f *compactionRecorder) record(rev mirror.Revision) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.revs) == 0 || rev > f.revs[len(f.revs)-1] {
		f.revs = append(f.revs, rev)
	}
}

func (f *compactionRecorder) calls() []mirror.Revision {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.revs)
}

// testLog is a log that tests read.
type testLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *testLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// count returns the number of lines that contain the text.
func (l *testLog) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

func (l *testLog) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

const testInterval = time.Minute

// compacting starts a compactor inside a bubble.
func compacting(t *testing.T, e *oneKey, opts CompactorOptions) (*Compactor, *testLog) {
	log := &testLog{}
	if opts.Logger == nil {
		opts.Logger = log.logger()
	}
	c := NewCompactor(e.client(), opts)
	t.Cleanup(c.Stop)
	synctest.Wait()
	return c, log
}

// turns advances the time until n turns are over, with writes between them.
func turns(e *oneKey, n int) {
	for range n {
		e.write(100)
		time.Sleep(testInterval)
		synctest.Wait()
	}
}

func equal[T comparable](t *testing.T, what string, got, want []T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// TestCompactor_Alone_AnnouncesThenCompacts: like kube-apiserver it announces 0 at its first turn,
// then at each turn the revision of the previous one, and compacts after each announcement.
func TestCompactor_Alone_AnnouncesThenCompacts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := newOneKey(), &compactionRecorder{}
		c, _ := compacting(t, e, CompactorOptions{Interval: testInterval, OnCompaction: f.record})
		turns(e, 4)
		equal(t, "etcd", e.operations(), []string{"put 0", "put 102", "compact 102", "put 203", "compact 203", "put 304", "compact 304"})
		equal(t, "OnCompaction calls", f.calls(), []mirror.Revision{102, 203, 304})
		s := c.Stats()
		if s.Compactions != 3 || s.Failures != 0 || s.Revision != 304 || s.EtcdRevision != 405 || !s.Following || s.RecordedAt != time.Now() {
			t.Errorf("%+v", s)
		}
		if c.CompactRevision() != 304 {
			t.Errorf("CompactRevision %d", c.CompactRevision())
		}
	})
}

// TestCompactor_WithoutInterval_OnlyFollows: the compactor follows, and writes nothing.
func TestCompactor_WithoutInterval_OnlyFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := newOneKey(), &compactionRecorder{}
		e.write(50)
		e.put("20") // before it begins
		compacting(t, e, CompactorOptions{OnCompaction: f.record})
		equal(t, "at the start", f.calls(), []mirror.Revision{20})
		e.put("40")
		synctest.Wait() // no time passes
		equal(t, "at once", f.calls(), []mirror.Revision{20, 40})
		turns(e, 3)
		equal(t, "etcd", e.operations(), []string{"put 20", "put 40"})
	})
}

// TestCompactors_RaceForKey_OneSucceeds: both compactors have read the key before either has
// written it. One succeeds.
func TestCompactors_RaceForKey_OneSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newOneKey()
		e.write(10)
		var both sync.WaitGroup
		e.mu.Lock()
		e.before = func(kind string) error {
			if kind == "txn" {
				both.Done()
				both.Wait()
			}
			return nil
		}
		e.mu.Unlock()
		a, _ := compacting(t, e, CompactorOptions{Interval: testInterval})
		b, _ := compacting(t, e, CompactorOptions{Interval: testInterval})
		both.Add(2)
		turns(e, 1)
		equal(t, "the first turn", e.operations(), []string{"put 0"})
		// One compactor has recorded the turn of the other as its own last one, so either may be
		// next.
		both.Add(2)
		turns(e, 1)
		operations := e.operations()
		if len(operations) != 3 || operations[1] != "put 112" || operations[2] != "compact 112" {
			t.Errorf("the second turn: %v", operations)
		}
		if n := a.Stats().Compactions + b.Stats().Compactions; n != 1 {
			t.Errorf("%d compactions", n)
		}
		if a.Stats().Failures+b.Stats().Failures != 0 {
			t.Errorf("to lose a race is no failure: %+v, %+v", a.Stats(), b.Stats())
		}
	})
}

// TestCompactor_OtherStops_TakesOver: a compactor takes over from a stopped one within two
// intervals.
func TestCompactor_OtherStops_TakesOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newOneKey()
		a, _ := compacting(t, e, CompactorOptions{Interval: testInterval})
		time.Sleep(time.Second)
		b, _ := compacting(t, e, CompactorOptions{Interval: testInterval})
		turns(e, 4)
		if a.Stats().Compactions != 3 || b.Stats().Compactions != 0 {
			t.Fatalf("%d and %d compactions, want 3 and 0: the first is always first", a.Stats().Compactions, b.Stats().Compactions)
		}
		a.Stop()
		turns(e, 2)
		if b.Stats().Compactions == 0 {
			t.Errorf("no compaction: %v", e.operations())
		}
	})
}

// TestCompactor_KeyDeleted_Continues deletes the key between any two steps.
func TestCompactor_KeyDeleted_Continues(t *testing.T) {
	for _, moment := range []string{"between turns", "get", "txn", "compact"} {
		t.Run(moment, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e, f := newOneKey(), &compactionRecorder{}
				c, log := compacting(t, e, CompactorOptions{Interval: testInterval, OnCompaction: f.record, CheckInterval: -1})
				turns(e, 3)
				known := c.CompactRevision()
				if moment == "between turns" {
					e.remove()
				} else {
					once := sync.OnceFunc(e.remove)
					e.intercept(&e.before, func(kind string) error {
						if kind == moment {
							once()
						}
						return nil
					})
				}
				synctest.Wait()
				if c.CompactRevision() != known {
					t.Errorf("compact revision is %[2]d, want %[1]d", known, c.CompactRevision())
				}
				turns(e, 4)
				if got := c.CompactRevision(); got <= known+200 {
					t.Errorf("compacted to %d, was %d: %v", got, known, e.operations())
				}
				if c.Stats().Failures != 0 || log.count("level=") != 0 {
					t.Errorf("%+v\n%s", c.Stats(), &log.b)
				}
				if !slices.IsSorted(f.calls()) {
					t.Errorf("OnCompaction calls are not sorted: %v", f.calls())
				}
			})
		})
	}
}

// TestCompactor_InvalidKey_IsIgnoredAndOverwritten: an invalid value is ignored, logged once, and
// overwritten.
func TestCompactor_InvalidKey_IsIgnoredAndOverwritten(t *testing.T) {
	for _, value := range []string{"", "-5", "0x10", "12a", "99999999999999999999999", "100000", "102", strings.Repeat("9", 5000)} {
		t.Run(fmt.Sprintf("%.20q", value), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e, f := newOneKey(), &compactionRecorder{}
				e.write(100)
				e.put(value) // at revision 102
				c, log := compacting(t, e, CompactorOptions{Interval: testInterval, OnCompaction: f.record})
				time.Sleep(testInterval / 2) // checks read it again
				e.cut()                      // and a new watch
				time.Sleep(testInterval / 4)
				if n := log.count("Ignoring invalid compaction key"); n != 1 || c.Stats().InvalidAnnouncements != 1 {
					t.Errorf("%d log lines, %d invalid announcements; want 1 and 1", n, c.Stats().InvalidAnnouncements)
				}
				if len(f.calls()) != 0 || c.CompactRevision() != 0 {
					t.Errorf("OnCompaction called with %v", f.calls())
				}
				e.write(200_000) // the announced number was too high and stays invalid
				time.Sleep(20 * time.Second)
				if len(f.calls()) != 0 {
					t.Errorf("OnCompaction called later with %v", f.calls())
				}
				turns(e, 3)
				if c.CompactRevision() < 200_000 || log.count("level=ERROR") != 0 {
					t.Errorf("compacted to %d: %v\n%s", c.CompactRevision(), e.operations(), &log.b)
				}
			})
		})
	}
}

// TestCompactor_CompactionFails_IsRetriedSoon: the compaction is retried soon, because followers
// have already dropped the versions below.
func TestCompactor_CompactionFails_IsRetriedSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newOneKey()
		c, _ := compacting(t, e, CompactorOptions{Interval: testInterval})
		turns(e, 1)
		failures := 3
		e.intercept(&e.before, func(kind string) error {
			if kind == "compact" && failures > 0 {
				failures--
				return rpctypes.ErrNoLeader
			}
			return nil
		})
		e.write(100)
		time.Sleep(testInterval + 2*time.Second)
		equal(t, "etcd", e.operations(), []string{"put 0", "put 102", "compact 102"})
		if s := c.Stats(); s.Failures != 0 || s.Compactions != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// TestCompactor_CompactionKeepsFailing_NextTurnCompacts: the next turn compacts to a higher
// revision.
func TestCompactor_CompactionKeepsFailing_NextTurnCompacts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newOneKey()
		c, log := compacting(t, e, CompactorOptions{Interval: testInterval})
		turns(e, 1)
		stopFailing := e.failing("compact", rpctypes.ErrTooManyRequests)
		turns(e, 2)
		stopFailing()
		if c.Stats().Failures != 1 || log.count("level=ERROR") != 1 || len(e.operations()) != 2 {
			t.Errorf("%+v, %v\n%s", c.Stats(), e.operations(), &log.b)
		}
		turns(e, 2)
		if s := c.Stats(); s.Compactions == 0 || s.Failures != 1 {
			t.Errorf("%+v: %v", s, e.operations())
		}
	})
}

// TestCompactor_ResponseLost_CompactsAnnouncedRevision: etcd has executed a request whose answer is
// lost. The announced compaction is made.
func TestCompactor_ResponseLost_CompactsAnnouncedRevision(t *testing.T) {
	for _, kind := range []string{"txn", "compact"} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newOneKey()
				c, _ := compacting(t, e, CompactorOptions{Interval: testInterval})
				turns(e, 1)
				lose := true
				e.intercept(&e.after, func(k string) error {
					if k == kind && lose {
						lose = false
						return context.DeadlineExceeded
					}
					return nil
				})
				turns(e, 2)
				operations := e.operations()
				for i, h := range operations {
					rev, ok := strings.CutPrefix(h, "put ")
					if ok && rev != "0" && !slices.Contains(operations[i:], "compact "+rev) {
						t.Errorf("%s was announced and is not compacted: %v", rev, operations)
					}
				}
				turns(e, 2)
				if last := c.CompactRevision(); last < 200 {
					t.Errorf("compacted to %d: %v", last, e.operations())
				}
			})
		})
	}
}

// TestCompactor_EtcdWithoutSpace_LogsAndContinues: the compactor logs instructions for the
// operator, and continues afterwards where it stopped.
func TestCompactor_EtcdWithoutSpace_LogsAndContinues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newOneKey()
		c, log := compacting(t, e, CompactorOptions{Interval: testInterval})
		turns(e, 2)
		makeRoom := e.failing("txn", rpctypes.ErrNoSpace)
		turns(e, 2)
		if log.count("skipping compaction") != 2 || c.Stats().Failures != 2 {
			t.Errorf("%+v\n%s", c.Stats(), &log.b)
		}
		makeRoom()
		turns(e, 1)
		if c.Stats().Compactions != 2 {
			t.Errorf("%+v: %v", c.Stats(), e.operations())
		}
	})
}

// TestCompactor_RestoredEtcd_DropsRecordedState: the compactor never writes or compacts a revision
// above etcd's, and drops its recorded state.
func TestCompactor_RestoredEtcd_DropsRecordedState(t *testing.T) {
	for _, moment := range []string{"between turns", "txn", "compact"} {
		for _, sameVersion := range []bool{true, false} {
			for _, sameCluster := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/version=%v/cluster=%v", moment, sameVersion, sameCluster), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						e, f := newOneKey(), &compactionRecorder{}
						e.write(10_000)
						c, log := compacting(t, e, CompactorOptions{Interval: testInterval, OnCompaction: f.record})
						turns(e, 3)
						restore := sync.OnceFunc(func() {
							e.mu.Lock()
							e.rev, e.compacted, e.history = 50, 20, nil
							e.key.Value, e.key.ModRevision = []byte("20"), 30
							if !sameVersion {
								e.key.Version--
							}
							if !sameCluster {
								e.cluster++
							}
							e.mu.Unlock()
							e.cut()
						})
						e.intercept(&e.before, func(kind string) error {
							if kind == moment {
								restore()
							}
							return nil
						})
						if moment == "between turns" {
							restore()
						}
						turns(e, 1)
						e.intercept(&e.before, func(string) error { return nil })
						if moment == "compact" && sameVersion {
							// it was announced before the restore
							if log.count("restored") == 0 {
								t.Errorf("no word:\n%s", &log.b)
							}
						}
						turns(e, 5)
						high := e.rev
						for _, h := range e.operations() {
							// Only an announcement in flight can reach the restored etcd.
							if rev, ok := strings.CutPrefix(h, "put "); ok && len(rev) > 4 && moment != "txn" {
								t.Errorf("%s was announced to an etcd at %d: %v", rev, high, e.operations())
							}
							if rev, ok := strings.CutPrefix(h, "compact "); ok {
								var n int64
								_, _ = fmt.Sscan(rev, &n)
								if n > high || n >= 10_000 {
									t.Errorf("compacted to %d of %d: %v", n, high, e.operations())
								}
							}
						}
						if got := c.CompactRevision(); got < 50 || got >= high {
							t.Errorf("CompactRevision is %d, etcd is at %d: %v\n%s", got, high, e.operations(), &log.b)
						}
					})
				})
			}
		}
	}
}

// TestCompactor_AnnouncementOfThePastEtcd_IsIgnored: the watch's goroutine is late with an
// announcement of the etcd before, and a read has found the restored etcd.
func TestCompactor_AnnouncementOfThePastEtcd_IsIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := newOneKey(), &compactionRecorder{}
		e.write(1000)
		c, _ := compacting(t, e, CompactorOptions{CheckInterval: -1, OnCompaction: f.record})
		c.applyAnnouncement(&mvccpb.KeyValue{Value: []byte("5000"), ModRevision: 5001})
		if got := c.CompactRevision(); got != 0 || len(f.calls()) != 0 {
			t.Errorf("CompactRevision is %d, reported %v", got, f.calls())
		}
		c.noteRevision(5001)
		c.applyAnnouncement(&mvccpb.KeyValue{Value: []byte("5000"), ModRevision: 5001})
		if got := c.CompactRevision(); got != 5000 {
			t.Errorf("CompactRevision is %d, want 5000 on an etcd at 5001", got)
		}
		if c.noteCompacted(5001); c.CompactRevision() != 5001 {
			t.Errorf("CompactRevision is %d, want 5001, etcd's newest revision", c.CompactRevision())
		}
	})
}

// TestCompactor_IdleEtcd_TakesTurnOfOther: without writes the revision of a turn is the one of the
// turn before, of the same etcd.
func TestCompactor_IdleEtcd_TakesTurnOfOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newOneKey()
		e.write(50)
		_, log := compacting(t, e, CompactorOptions{Interval: testInterval, CheckInterval: -1})
		e.put("20") // another process has the first turn
		time.Sleep(2 * testInterval)
		synctest.Wait()
		equal(t, "etcd", e.operations(), []string{"put 20", "put 52", "compact 52"})
		if log.count("restored or replaced") != 0 {
			t.Errorf("an idle etcd is another one:\n%s", &log.b)
		}
	})
}

// TestCompactor_WatchLost_IsRestarted: the watch is restarted after each loss, within a second, and
// writes in between are recorded.
func TestCompactor_WatchLost_IsRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := newOneKey(), &compactionRecorder{}
		e.write(1000)
		c, log := compacting(t, e, CompactorOptions{OnCompaction: f.record, CheckInterval: -1})
		e.cut()
		e.put("100")
		time.Sleep(followFirst)
		synctest.Wait()
		equal(t, "after a loss", f.calls(), []mirror.Revision{100})
		if log.count("level=") != 0 {
			t.Errorf("a short loss is logged:\n%s", &log.b)
		}
		// etcd is down.
		up := e.failing("get", rpctypes.ErrNoLeader)
		e.cut()
		time.Sleep(time.Minute)
		e.put("200")
		up()
		time.Sleep(followLast)
		synctest.Wait()
		equal(t, "after an outage", f.calls(), []mirror.Revision{100, 200})
		if log.count("Failed to watch the compaction key") != 1 || log.count("compaction key resumed") != 1 {
			t.Errorf("want one line each:\n%s", &log.b)
		}
		if s := c.Stats(); s.Losses != 2 || !s.Following {
			t.Errorf("%+v", s)
		}
		e.remove()
		e.put("150") // another process writes a lower revision
		synctest.Wait()
		if c.CompactRevision() != 200 {
			t.Errorf("unlearned: %d", c.CompactRevision())
		}
	})
}

// TestCompactor_WithoutWatch_ChecksFollow: compactions are followed by the check alone, also with a
// negative interval, and etcd has no watch for it. A failed check, the first one included, is
// logged once and repeated after a second; after a success it is a loss.
func TestCompactor_WithoutWatch_ChecksFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := newOneKey(), &compactionRecorder{}
		e.write(1000)
		e.put("500")
		watched := e.failing("watch", rpctypes.ErrPermissionDenied)
		defer watched()
		up := e.failing("get", rpctypes.ErrPermissionDenied)
		c, log := compacting(t, e, CompactorOptions{OnCompaction: f.record, WithoutWatch: true, CheckInterval: -1})
		logged := func(when string, warnings, resumptions int, following bool, losses int64) {
			t.Helper()
			if s := c.Stats(); s.Following != following || s.Losses != losses {
				t.Errorf("%s: %+v, want following %t, %d losses", when, s, following, losses)
			}
			if w, r := log.count("level=WARN"), log.count("resumed"); w != warnings || r != resumptions {
				t.Errorf("%s: %d warnings and %d resumptions, want %d and %d:\n%s", when, w, r, warnings, resumptions, &log.b)
			}
		}
		logged("the first check failed", 1, 0, false, 0)
		time.Sleep(2 * defaultCheckInterval)
		synctest.Wait()
		logged("all checks failed", 1, 0, false, 0)
		up()
		time.Sleep(checkRetry)
		synctest.Wait()
		logged("a second after etcd answers", 1, 1, true, 0)
		equal(t, "after the first success", f.calls(), []mirror.Revision{500})
		e.write(1000)
		e.put("1500")
		synctest.Wait()
		equal(t, "before a check", f.calls(), []mirror.Revision{500})
		time.Sleep(defaultCheckInterval)
		synctest.Wait()
		equal(t, "after a check", f.calls(), []mirror.Revision{500, 1500})
		logged("checks succeed", 1, 1, true, 0)
		up = e.failing("get", rpctypes.ErrNoLeader)
		time.Sleep(10 * defaultCheckInterval)
		synctest.Wait()
		logged("etcd does not answer", 2, 1, false, 1)
		up()
		time.Sleep(checkRetry)
		synctest.Wait()
		logged("etcd answers again", 2, 2, true, 1)
	})
}

// TestCompactor_WatchHangs_CheckReadsKey: the periodic check reads the key.
func TestCompactor_WatchHangs_CheckReadsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := newOneKey(), &compactionRecorder{}
		e.write(1000)
		compacting(t, e, CompactorOptions{OnCompaction: f.record})
		e.hang()
		e.put("500")
		synctest.Wait()
		if len(f.calls()) != 0 {
			t.Fatal("the watch does not hang")
		}
		time.Sleep(defaultCheckInterval)
		synctest.Wait()
		equal(t, "OnCompaction calls", f.calls(), []mirror.Revision{500})
	})
}

// TestCompactor_UnannouncedCompaction_IsDetectedByCheck: the next check detects it, if the cache
// can serve a compacted revision.
func TestCompactor_UnannouncedCompaction_IsDetectedByCheck(t *testing.T) {
	for oldest, want := range map[mirror.Revision][]mirror.Revision{0: nil, 1: {500}, 499: {500}, 500: nil, 900: nil, 1001: nil} {
		t.Run(fmt.Sprint(oldest), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e, f := newOneKey(), &compactionRecorder{}
				e.write(1000)
				c, log := compacting(t, e, CompactorOptions{OnCompaction: f.record, Oldest: func() mirror.Revision { return oldest }})
				e.mu.Lock()
				if err := e.compactTo(500); err != nil {
					t.Fatal(err)
				}
				e.mu.Unlock()
				time.Sleep(10 * defaultCheckInterval)
				synctest.Wait()
				equal(t, "OnCompaction calls", f.calls(), want)
				if n := int64(len(want)); c.Stats().Unannounced != n || log.count("not recorded in the compaction key") != len(want) {
					t.Errorf("%+v\n%s", c.Stats(), &log.b)
				}
			})
		})
	}
}

// TestCompactor_AnnouncedDuringCheck_IsNotUnannounced: an announced compaction is not counted as
// unannounced.
func TestCompactor_AnnouncedDuringCheck_IsNotUnannounced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, f := newOneKey(), &compactionRecorder{}
		e.write(1000)
		c, _ := compacting(t, e, CompactorOptions{OnCompaction: f.record, Oldest: func() mirror.Revision { return 10 }})
		e.hang()
		gets := 0
		e.intercept(&e.before, func(kind string) error {
			if gets++; kind == "get" && gets == 2 { // between the two reads of the check
				e.put("500")
				e.mu.Lock()
				defer e.mu.Unlock()
				return e.compactTo(500)
			}
			return nil
		})
		time.Sleep(defaultCheckInterval)
		synctest.Wait()
		equal(t, "OnCompaction calls", f.calls(), []mirror.Revision{500})
		if c.Stats().Unannounced != 0 {
			t.Errorf("%+v", c.Stats())
		}
	})
}

// TestCompactor_EtcdDoesNotAnswer_StopReturns: Stop returns while etcd does not answer.
func TestCompactor_EtcdDoesNotAnswer_StopReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newOneKey()
		e.intercept(&e.before, func(string) error { return errors.New("down") })
		c := NewCompactor(e.client(), CompactorOptions{Interval: time.Second, Logger: (&testLog{}).logger()})
		time.Sleep(10 * time.Second)
		c.Stop()
		c.Stop()
	})
}
