// Package disk tests `strata up` on a file system without room.
package disk

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/test/harness"
)

const mapsPath = "/api/v1/namespaces/default/configmaps"

type object = map[string]any

// TestUp_DiskFull_NamesItAndKeepsWrites: the file system of the data directory and of the audit log
// is full. While etcd takes writes, consistent lists are answered without their audit entries. etcd
// cannot continue, so strata up ends. Its last line names the reason and the next step, as a start
// does. With room again it starts, with all acknowledged writes.
func TestUp_DiskFull_NamesItAndKeepsWrites(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, 6*time.Minute)
	dir := t.TempDir()
	// The two files of a write-ahead log have 64 MB each from their beginning.
	if err := syscall.Mount("strata-test", dir, "tmpfs", 0, "size=200m"); errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		testrequire.Missing(t, "mount", fmt.Sprintf("a small file system cannot be mounted: %v", err))
	} else {
		harness.Check(t, err)
	}
	t.Cleanup(func() { harness.Check(t, syscall.Unmount(dir, 0)) })
	env := harness.New(t)
	data := filepath.Join(dir, "data")
	policy := env.WriteFile("policy.yaml", []byte(`{"apiVersion":"audit.k8s.io/v1","kind":"Policy","rules":[{"level":"Request"}]}`))
	start := func() *harness.Server {
		return env.UpIn(data, "--controllers=none", "--", "--audit-policy-file="+policy, "--audit-log-path="+filepath.Join(dir, "audit.log"))
	}
	ballast := filepath.Join(dir, "ballast")
	var acknowledged []string
	lists := 0
	// A write of the server itself can end etcd before the first write of a round.
	for round := 0; round < 5 && (lists == 0 || len(acknowledged) == 0); round++ {
		server := start()
		api := server.API()
		if err := fill(ballast); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("the file system is not full: %v", err)
		}
		answered, names := untilRefused(ctx, t, api, fmt.Sprintf("map-%d", round))
		lists, acknowledged = lists+answered, append(acknowledged, names...)
		code, err := server.Wait(ctx)
		harness.Check(t, err)
		lines := strings.Split(strings.TrimSpace(server.Output()), "\n")
		if last := lines[len(lines)-1]; code != 1 || !strings.Contains(last, "no space left on device") || !strings.Contains(last, "free space") {
			t.Errorf("exit code %d, last line %q, want 1 and the reason", code, last)
		}
		again, err := env.Run(ctx, "", "up", "--data-dir="+data, "--secure-port=0")
		if err != nil || again.Code != 1 || !strings.Contains(again.Stderr, "free space") {
			t.Errorf("a start on the full file system: %+v, %v, want exit code 1 and the reason", again, err)
		}
		harness.Check(t, os.Remove(ballast))
	}
	list, err := start().API().List(ctx, mapsPath, "")
	harness.Check(t, err)
	for _, name := range acknowledged {
		if !slices.Contains(list.Names(), name) {
			t.Errorf("%s was acknowledged, and is lost", name)
		}
	}
	if lists == 0 || len(acknowledged) == 0 {
		t.Errorf("%d lists were answered and %d writes acknowledged on the full file system, want some", lists, len(acknowledged))
	}
}

// untilRefused lists and writes until a write is refused. It returns the number of answered lists
// and the names of the acknowledged writes.
func untilRefused(ctx context.Context, t *testing.T, api *harness.API, prefix string) (lists int, acknowledged []string) {
	t.Helper()
	value := strings.Repeat("x", 200<<10)
	for n := 0; ; n++ {
		unread := error(nil)
		for i := 0; unread == nil && i < 20; i++ { // each has an audit entry
			if _, unread = api.List(ctx, mapsPath, ""); unread == nil {
				lists++
			}
		}
		if unlogged, err := api.Sum(ctx, "apiserver_audit_error_total"); unread == nil && err == nil && unlogged == 0 {
			t.Error("no audit entry is lost: the file system has room")
		}
		name := fmt.Sprintf("%s-%03d", prefix, n)
		r, err := api.Do(ctx, http.MethodPost, mapsPath, "", object{"metadata": object{"name": name}, "data": object{"value": value}})
		if err != nil || r.Code != http.StatusCreated {
			return lists, acknowledged
		}
		acknowledged = append(acknowledged, name)
		if unread != nil {
			t.Errorf("a list failed, and the server still took writes: %v", unread)
		}
	}
}

// fill writes a file until there is no room, and returns that error.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for block := make([]byte, 64<<10); ; {
		if _, err := f.Write(block); err != nil {
			return err
		}
	}
}
