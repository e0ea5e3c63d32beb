package chaos

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/faulty"
)

// TestHistory_ServerClockAhead_IsRestored: a server whose clock is ahead by more than the history
// retention restores history like any other: watches at revisions from before its start continue.
func TestHistory_ServerClockAhead_IsRestored(t *testing.T) {
	if harness.Engine() != harness.Strata {
		t.Skip("upstream restores no history")
	}
	if err := faulty.ClockError(); err != nil {
		testrequire.Missing(t, "ptrace", err.Error())
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 8*time.Minute, errors.New("the test took too long"))
	defer cancel()
	env := harness.New(t)
	etcd := env.Etcd()
	const path, writes = "/api/v1/namespaces/default/configmaps", 20
	client := etcd.Client()
	var first int64
	for i := range writes {
		key := fmt.Sprintf("map-%d", i)
		r, err := client.Put(ctx, "/registry/configmaps/default/"+key,
			fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"namespace":"default","uid":%[1]q}}`, key))
		harness.Check(t, err)
		if i == 0 {
			first = r.Header.Revision
		}
	}

	clock := &faulty.Clock{}
	env.AtEnd(clock.Close)
	clock.Shift(30 * time.Minute)
	after := env.StartAPIServerPrepared(clock.Prepare, etcd, "--strata-history-age=10m")
	harness.Check(t, after.Await(ctx, "/readyz"))
	watch := harness.StartWatch(t, ctx, after.API(), path, fmt.Sprintf("resourceVersion=%d", first))
	for i := 1; i < writes; i++ {
		e, err := watch.Next(ctx)
		harness.Check(t, err)
		if want := fmt.Sprint("map-", i); e.Type != "ADDED" || e.Object.Metadata.Name != want {
			t.Fatalf("event %d is %s %s %v, want %s", i, e.Type, e.Object.Metadata.Name, e.Status, want)
		}
	}
}
