package statusline

import (
	"bytes"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestEvery_ReportsAfterTwoSecondsAndThenEveryInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports []time.Duration
		stop := Every(func(elapsed time.Duration) bool {
			reports = append(reports, elapsed)
			return true
		})
		time.Sleep(After + 2*Interval + time.Millisecond)
		synctest.Wait()
		stop()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got, want := fmt.Sprint(reports), fmt.Sprint([]time.Duration{After, After + Interval, After + 2*Interval}); got != want {
			t.Errorf("reports at %s, want %s", got, want)
		}
		stop() // has no effect
	})
}

func TestEvery_ShortWork_ReportsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stop := Every(func(elapsed time.Duration) bool {
			t.Errorf("report after %v", elapsed)
			return true
		})
		time.Sleep(After - time.Millisecond)
		stop()
		time.Sleep(time.Minute)
	})
}

func TestEvery_ReportThatReturnsFalse_IsTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reports := 0
		stop := Every(func(time.Duration) bool {
			reports++
			return false
		})
		time.Sleep(time.Minute)
		stop()
		if reports != 1 {
			t.Errorf("%d reports, want 1", reports)
		}
	})
}

func TestSteps_OnAFile_AreLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		s := Start(&out)
		s.Add(1) // before the first step: no effect
		s.Next("reading %s", "pods")
		time.Sleep(After - time.Millisecond)
		synctest.Wait()
		if out.Len() > 0 {
			t.Errorf("shown early: %q", out.String())
		}
		s.Add(7)
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		s.Next("reading %s", "secrets")
		s.Set(3)
		s.Of(9)
		time.Sleep(Interval)
		synctest.Wait()
		s.Stop()
		s.Stop()
		if got := out.String(); got != "reading pods: 7 so far, 2s\nreading secrets: 3 of 9, 7s\n" {
			t.Errorf("%q", got)
		}
	})
}

func TestLine_OnATerminal_IsUpdatedAndRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := &Line{w: &out, terminal: true}
		var text atomic.Value
		text.Store("half")
		stop := l.Watch(func(time.Duration) string { return text.Load().(string) })
		time.Sleep(After)
		synctest.Wait()
		l.Print("a line that stays")
		time.Sleep(update)
		synctest.Wait()
		text.Store("") // not shown, the line before stays
		time.Sleep(update)
		synctest.Wait()
		stop()
		l.Print("the end")
		const clear = "\r\x1b[K"
		if got, want := out.String(), "half"+clear+"a line that stays\nhalf"+clear+"the end\n"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

func TestCount_UnknownTotal_IsLeftOut(t *testing.T) {
	for _, c := range []struct {
		n, total int64
		want     string
	}{{0, 0, "0 so far"}, {5, 0, "5 so far"}, {5, 9, "5 of 9"}, {9, 9, "9 of 9"}, {10, 9, "10 so far"}} {
		if got := Count(c.n, c.total); got != c.want {
			t.Errorf("%d of %d: %q, want %q", c.n, c.total, got, c.want)
		}
	}
}

func TestIsTerminal_FileAndNullDevice_AreNone(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, stream := range []any{null, &bytes.Buffer{}} {
		if IsTerminal(stream) {
			t.Errorf("%T is a terminal", stream)
		}
	}
}
