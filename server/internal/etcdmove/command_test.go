package etcdmove

import (
	"io"
	"strings"
	"testing"

	"github.com/stratakube/strata/server/internal/cli"
)

// TestCommand_NewMove_IsRefusedWithoutEtcd begins moves between addresses that no etcd has: the refusal does not depend on them.
func TestCommand_NewMove_IsRefusedWithoutEtcd(t *testing.T) {
	for _, flag := range []string{"--dry-run", "--servers-restarted", "--etcd-prefix=/registry"} {
		cmd := NewCommand()
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		cmd.SetOut(io.Discard)
		cmd.SetArgs([]string{"leases", "--from=unix:///nowhere/1", "--to=unix:///nowhere/2", flag})
		err := cmd.ExecuteContext(t.Context())
		if err == nil || cli.IsMisuse(err) || !strings.Contains(err.Error(), "cannot be moved while API servers run") {
			t.Errorf("with %s: error %v, want the refusal", flag, err)
		}
		for _, next := range []string{"with all API servers stopped", "docs/etcd-shards.md", "--abort", "--delete-source"} {
			if err != nil && !strings.Contains(err.Error(), next) {
				t.Errorf("the error does not name the next step %q: %v", next, err)
			}
		}
	}
}
