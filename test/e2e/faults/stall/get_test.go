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
	held := func() (n int) {
		for _, r := range s.proxy.Ranges() {
			if !r.CountOnly && string(r.Key) == "/registry/configmaps/default/"+newest {
				n++
			}
		}
		return n
	}
	refused := 0
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		for ; len(answers) > 0; refused++ {
			if err := isRefused(next()); err != nil {
				t.Fatal("while etcd does not answer:", err)
			}
		}
		return refused+held() == atOnce, fmt.Errorf("%d refused, %d with etcd, of %d", refused, held(), atOnce)
	}))
	// The server reads by itself too.
	const own = 5
	if n := held(); n > limit || n < limit-own {
		t.Errorf("%d reads are with etcd at once, want %d", n, limit)
	}

	t.Logf("of %d reads at once %d are with etcd, %d are refused", atOnce, held(), refused)

	s.proxy.Hold(false)
	for range atOnce - refused {
		r := next()
		o, err := r.Object()
		harness.Check(t, err)
		if o.GetResourceVersion() != want.Metadata.ResourceVersion {
			t.Errorf("resourceVersion is %s, want %s", o.GetResourceVersion(), want.Metadata.ResourceVersion)
		}
	}
}
