package enginetest

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestExampleProgram_RealEtcd_AnswersOldRevisions runs examples/etcd of the engine's module, which
// has no etcd server.
func TestExampleProgram_RealEtcd_AnswersOldRevisions(t *testing.T) {
	t.Parallel()
	program, err := testbin.Build("test/example-etcd", ".", "./examples/etcd", "GOWORK=off")
	testcheck.NoError(t, err)
	ctx := contextFor(t)
	dir := t.TempDir()
	server := newEtcd(t)
	server.run(t)
	client := connect(t, server.socket())
	first := put(t, client, "/app/a", "1")
	put(t, client, "/other/a", "1")

	in, stdin, err := os.Pipe()
	testcheck.NoError(t, err)
	defer stdin.Close()
	p, err := process.Start(process.Spec{
		Name: "example", Path: program, Args: []string{"-endpoints=unix://" + server.socket(), "-prefix=/app/"},
		Stdin: in, Lines: true, Log: filepath.Join(dir, "log"),
	})
	in.Close()
	testcheck.NoError(t, err)
	t.Cleanup(func() {
		if err := p.Stop(syscall.SIGTERM, patience); err != nil {
			t.Error(err)
		}
	})
	seen := 0
	requireLines := func(want ...string) {
		t.Helper()
		for _, w := range want {
			line, number, err := p.WaitLine(ctx, seen, "")
			if err != nil || line != w {
				t.Fatalf("printed %q, want %q (%v)", line, w, err)
			}
			seen = number
		}
	}
	request := func(text string) {
		t.Helper()
		if _, err := io.WriteString(stdin, text+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	requireLines(fmt.Sprintf("keys below /app/ at revision %d: 1", first+1))

	// Changes are printed as they come, and are in every later answer.
	second := put(t, client, "/app/a", "2")
	requireLines(fmt.Sprintf(`revision %d: put /app/a = "2"`, second))
	third := put(t, client, "/app/b", "3")
	deleted, err := client.Delete(ctx, "/app/a")
	testcheck.NoError(t, err)
	latest := deleted.Header.Revision
	requireLines(fmt.Sprintf(`revision %d: put /app/b = "3"`, third), fmt.Sprintf("revision %d: deleted /app/a", latest))
	request("get /app/a")
	requireLines(fmt.Sprintf("no key /app/a at revision %d", latest))
	for _, want := range []struct {
		revision, written int64
		value             string
	}{{first, first, "1"}, {first + 1, first, "1"}, {second, second, "2"}, {third, second, "2"}} {
		request(fmt.Sprintf("get /app/a %d", want.revision))
		requireLines(fmt.Sprintf("/app/a = %q at revision %d, written at %d", want.value, want.revision, want.written))
	}
	request(fmt.Sprintf("range %d", third))
	requireLines(fmt.Sprintf("keys at revision %d: 2", third), `  /app/a = "2"`, `  /app/b = "3"`)
	for revision, keys := range map[int64]int{first: 1, third: 2, latest: 1} {
		request(fmt.Sprintf("compare %d", revision))
		requireLines(fmt.Sprintf("memory equals etcd at revision %d: %d keys", revision, keys))
	}

	// Its own writes.
	request("put /app/c own")
	request("compare")
	requireLines(fmt.Sprintf(`revision %d: put /app/c = "own"`, latest+1), fmt.Sprintf("memory equals etcd at revision %d: 2 keys", latest+1))

	// Errors do not end it.
	request(fmt.Sprintf("get /app/a %d", latest+100))
	requireLines(fmt.Sprintf("error: revision %d does not exist yet; the latest one is %d", latest+100, latest+1))
	request("delete /other/a")
	requireLines(`error: key "/other/a" is not below /app/`)
	request("nonsense")
	if line, _, err := p.WaitLine(ctx, seen, ""); err != nil || !strings.HasPrefix(line, `error: "nonsense" is not a request`) {
		t.Fatalf("printed %q (%v)", line, err)
	}
	stdin.Close()
	if code, err := p.Wait(ctx); code != 0 || err != nil {
		t.Errorf("exit code %d, %v\n%s", code, err, p.Tail())
	}
}
