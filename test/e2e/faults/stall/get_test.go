package stall

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// limitsReads requires a limit on concurrent reads of one object from etcd, which memory cannot
// answer: requests above it are refused at once, to be retried.
func (s *scene) limitsReads(t *testing.T, ctx context.Context) {
	want := s.stall(t, ctx)
	defer s.proxy.Stall(false)
	s.proxy.Reset()
	s.proxy.Hold(true)

	const atOnce, limit = 150, 100
	type answer struct {
		*harness.Response
		err error
	}
	answers := make(chan answer, atOnce)
	for i := range atOnce {
		go func() {
			r, err := s.load[i%clients].Do(ctx, http.MethodGet, newestPath, "", nil)
			answers <- answer{r, err}
		}()
	}
	next := func() *harness.Response {
		t.Helper()
		select {
		case a := <-answers:
			harness.Check(t, a.err)
			return a.Response
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
			return nil
		}
	}
	refused := 0
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		for ; len(answers) > 0; refused++ {
			if err := isRefused(next()); err != nil {
				t.Fatal("while etcd does not answer:", err)
			}
		}
		return refused >= atOnce-limit, fmt.Errorf("%d of %d are refused, want all but %d", refused, atOnce, limit)
	}))
	s.proxy.Hold(false)
	for range atOnce - refused {
		r := next()
		if isRefused(r) == nil { // before the end of the hold
			refused++
			continue
		}
		o, err := r.Object()
		harness.Check(t, err)
		if o.GetResourceVersion() != want.Metadata.ResourceVersion {
			t.Errorf("resourceVersion is %s, want %s", o.GetResourceVersion(), want.Metadata.ResourceVersion)
		}
	}
	t.Logf("of %d reads at once %d are refused", atOnce, refused)
	const own = 5 // the server reads by itself too
	if refused > atOnce-limit+own {
		t.Errorf("%d of %d reads are refused, want %d", refused, atOnce, atOnce-limit)
	}
}
