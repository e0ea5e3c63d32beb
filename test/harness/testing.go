package harness

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
)

// longEnv selects the long forms of tests.
const longEnv = "STRATA_TEST_LONG"

// Check ends the test if err is not nil.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Must returns a function that returns its first argument, and ends the test if the second one is
// an error: Must[*List](t)(api.List(ctx, path, "")).
func Must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		Check(t, err)
		return v
	}
}

// RequireEqual compares lists, such as the names of objects, and reports the first difference.
func RequireEqual(t testing.TB, what string, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	i := 0
	for i < len(got) && i < len(want) && got[i] == want[i] {
		i++
	}
	t.Errorf("%s: got %d items, want %d; from number %d got %.200v, want %.200v",
		what, len(got), len(want), i, got[i:min(i+3, len(got))], want[i:min(i+3, len(want))])
}

// Context returns a context that ends with the test, or after timeout. The timeout bounds a hanging
// test. If the test fails, it logs the ends of the logs of the shared servers to which it has sent
// requests with the context.
func Context(t testing.TB, timeout time.Duration) context.Context {
	ctx, cancel := context.WithTimeoutCause(withUse(t), timeout, fmt.Errorf("not done after %v", timeout))
	t.Cleanup(cancel)
	return ctx
}

// Namespace creates an empty namespace and returns its name.
func Namespace(t testing.TB, ctx context.Context, api *API, name string) string {
	t.Helper()
	_, err := api.Create(ctx, "/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": name}})
	Check(t, err)
	return name
}

var names atomic.Int64

// NewName returns prefix with a number that is unique in this process.
func NewName(prefix string) string { return fmt.Sprintf("%s-%d", prefix, names.Add(1)) }

// Long reports whether the long forms of tests run: STRATA_TEST_LONG=1.
func Long() bool { return os.Getenv(longEnv) == "1" }

// Pick returns full in the long forms of tests, otherwise short.
func Pick[T any](short, full T) T {
	if Long() {
		return full
	}
	return short
}

// OnlyStrata skips a test of properties that upstream's engine does not have.
func OnlyStrata(t testing.TB) {
	t.Helper()
	if Engine() != Strata {
		t.Skip("upstream's engine does not do this")
	}
}

// Revision returns a resource version as an etcd revision.
func Revision(t testing.TB, resourceVersion string) int64 {
	t.Helper()
	return Must[int64](t)(strconv.ParseInt(resourceVersion, 10, 64))
}

// Turns are the turns of parallel tests at shared servers. The zero value is ready.
type Turns struct{ mu sync.RWMutex }

// Share lets a test use the servers until its end, beside other tests that share them.
func (u *Turns) Share(t *testing.T) {
	t.Parallel()
	u.mu.RLock()
	t.Cleanup(u.mu.RUnlock)
}

// Own lets a test use the servers alone until its end, for example to restart them.
func (u *Turns) Own(t *testing.T) {
	t.Parallel()
	u.mu.Lock()
	t.Cleanup(u.mu.Unlock)
}

// InParallel calls do for 0 to n-1, in this order, with as many concurrent calls as two cores can
// serve. It returns the first error.
func InParallel(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for i := range n {
		group.Go(func() error { return do(ctx, i) })
	}
	return group.Wait()
}

// SilenceKlog discards the log of client-go in this process, which has each lost connection.
func SilenceKlog() {
	klog.SetOutput(io.Discard)
	flags := flag.NewFlagSet("", flag.PanicOnError)
	klog.InitFlags(flags)
	// an error panics
	_ = flags.Parse([]string{"-logtostderr=false", "-alsologtostderr=false", "-stderrthreshold=FATAL"})
}
