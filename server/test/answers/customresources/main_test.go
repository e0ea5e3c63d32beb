// Package customresources installs the definitions of well-known projects and uses them like their clients.
package customresources

import (
	"context"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/server/test/internal/harness"
)

const testTimeout = 3 * time.Minute

var (
	cluster *harness.Server
	api     *harness.API
)

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		cluster = e.Up()
		api = cluster.API()
	})
}

type object = map[string]any

// inParallel calls do for 0 to n-1, with as many concurrent calls as two cores can serve.
func inParallel(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	const workers = 8
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for i := range n {
		group.Go(func() error { return do(ctx, i) })
	}
	return group.Wait()
}

func versions(objects []harness.Object) []string {
	var keys []string
	for _, o := range objects {
		keys = append(keys, o.Key()+"@"+o.Metadata.ResourceVersion)
	}
	return keys
}

func equalObjects(t *testing.T, what string, got, want []harness.Object) {
	t.Helper()
	equal(t, what, versions(got), versions(want))
}

// equal compares keys and reports the first difference.
func equal(t *testing.T, what string, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	i := 0
	for i < len(got) && i < len(want) && got[i] == want[i] {
		i++
	}
	t.Errorf("%s: got %d objects, want %d; from number %d got %v, want %v", what, len(got), len(want), i, got[i:min(i+3, len(got))], want[i:min(i+3, len(want))])
}
