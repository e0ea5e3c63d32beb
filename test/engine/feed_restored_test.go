package enginetest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestFeedServer_RestoredEtcd_MirrorBelowVerifiesRevision: after etcd was restored to an older
// state, a mirror of the feed drops its state, though its connection to the feed is not
// interrupted.
func TestFeedServer_RestoredEtcd_MirrorBelowVerifiesRevision(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	etcd := connect(t, e.socket())
	const prefix = "/registry/"
	put(t, etcd, prefix+"a/first", "backed up")
	e.stop()
	backup := filepath.Join(e.Directory(), "backup")
	testcheck.NoError(t, os.CopyFS(backup, os.DirFS(e.data())))
	e.run(t)
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	m := newMirror(t, connect(t, f.socket), prefix, nil)
	r := claim(t, m, prefix+"a/")
	for i := range 50 {
		put(t, etcd, fmt.Sprintf("%sa/%d", prefix, i), "lost")
	}
	lost := catchUp(t, m)
	watched := connect(t, f.socket).Watch(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(lost+1))
	e.stop()
	testcheck.NoError(t, os.RemoveAll(e.data()))
	testcheck.NoError(t, os.Rename(backup, e.data()))
	e.run(t)
	// The client must not resume the watch by itself, after a revision of the state before.
	if resp := <-watched; status.Code(resp.Err()) != codes.Aborted {
		t.Errorf("the watch of a client ends with %v, want an error that it does not handle itself", resp.Err())
	}
	// No reader asks for the revision meanwhile.
	until(t, "the mirror below lists the restored state", func() bool { return m.PublishedRevision() < lost })
	testcheck.NoError(t, r.WaitReady(contextFor(t)))
	now := catchUp(t, m)
	if s, err := r.Latest(); err != nil || now >= lost || len(read(s)) != 1 {
		t.Errorf("%d keys at %d (%v), want 1 at a revision below %d", len(read(s)), now, err, lost)
	}
}
