package enginetest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
)

// listAndFollow lists the keys below /registry/pods/ and prints their later changes to out until
// ctx is cancelled.
func listAndFollow(ctx context.Context, client *clientv3.Client, out io.Writer) error {
	// "example" names the watch stream of this source: two sources on one client need two names.
	// "/registry/probe" is a key whose linearizable read returns etcd's current revision. It need
	// not exist and is never written, but the client must be allowed to read it; a key below the
	// mirrored prefix is. (CheckVersions detects an etcd before 3.4.31 or 3.5.13, which needs
	// WithoutProgress.)
	source := etcdsource.New(client, "example", "/registry/probe")
	m, err := mirror.New(mirror.Options{Source: source, Prefix: "/registry/"})
	if err != nil {
		return err
	}
	defer m.Close()
	pods, err := m.Claim("/registry/pods/")
	if err != nil {
		return err
	}
	defer pods.Release()
	if err := pods.WaitReady(ctx); err != nil {
		return err
	}

	snapshot, err := pods.Latest()
	if err != nil {
		return err
	}
	for entry := range snapshot.All("/registry/pods/", "") {
		fmt.Fprintf(out, "listed %s %s\n", entry.Key(), entry.Value())
	}
	for cursor := snapshot.Cursor("/registry/pods/", ""); ; {
		changed := cursor.Changed() // before Next, so that no event is missed
		events, err := cursor.Next(nil, 100)
		if err != nil {
			return err // ErrCompacted: the cursor is behind the retained history; list again
		}
		for _, event := range events {
			if event.Entry == nil {
				fmt.Fprintf(out, "deleted %s\n", event.Key())
			} else {
				fmt.Fprintf(out, "put %s %s\n", event.Key(), event.Entry.Value())
			}
		}
		if len(events) == 0 {
			select {
			case <-changed:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// TestExample_RealEtcd_ListsThenFollows runs the example of package etcdsource, whose module has no
// etcd server.
func TestExample_RealEtcd_ListsThenFollows(t *testing.T) {
	server := newEtcd(t)
	server.run(t)
	client := connect(t, server.socket())
	put(t, client, "/registry/pods/a", "created")

	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	lines, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := listAndFollow(ctx, client, out)
		_ = out.Close() // the reader gets EOF
		ended <- err
	}()
	output := bufio.NewScanner(lines)
	requireLine := func(want string) {
		t.Helper()
		if !output.Scan() || output.Text() != want {
			t.Fatalf("printed %q, want %q (%v)", output.Text(), want, ctx.Err())
		}
	}
	requireLine("listed /registry/pods/a created")
	put(t, client, "/registry/pods/a", "changed")
	requireLine("put /registry/pods/a changed")
	if _, err := client.Delete(ctx, "/registry/pods/a"); err != nil {
		t.Fatal(err)
	}
	requireLine("deleted /registry/pods/a")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("listAndFollow returned %v, want %v", err, context.Canceled)
	}
}
