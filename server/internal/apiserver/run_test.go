package apiserver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestRunBounded_ServerHangs_ReturnsAtLimit: a server may run for as long as it is not stopped, its
// error is returned, and one that goes on after its stop is left behind at the limit.
func TestRunBounded_ServerHangs_ReturnsAtLimit(t *testing.T) {
	const limit = 80 * time.Second
	failure := errors.New("failure")
	for _, c := range []struct {
		name  string
		after time.Duration // that run takes to end; negative before its stop
		hangs bool
		want  time.Duration
	}{{"fails", -time.Hour, false, -time.Hour}, {"ends late", limit - 1, false, limit - 1}, {"hangs", 2 * limit, true, limit}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stop := time.Now().Add(24 * time.Hour)
				ctx, cancel := context.WithDeadline(t.Context(), stop)
				defer cancel()
				hangs, err := runBounded(ctx, func(context.Context) error {
					time.Sleep(time.Until(stop.Add(c.after)))
					return failure
				}, limit)
				if took := time.Since(stop); hangs != c.hangs || (err == failure) == c.hangs || err == nil || took != c.want {
					t.Errorf("hangs %v, %v, %v after the stop", hangs, err, took)
				}
				time.Sleep(2 * limit)
			})
		})
	}
}
