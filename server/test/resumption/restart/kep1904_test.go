package restart

import (
	"context"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// xy are the two resources of KEP-1904's motivation, in an etcd of their own so that revisions are those of the KEP's text: object
// x of type X (limit ranges) at 100, object y of type Y (pod templates) at 101.
type xy struct {
	servers []*harness.Server
	etcd    *harness.Etcd
}

const (
	xPath = "/api/v1/namespaces/default/limitranges"
	yPath = "/api/v1/namespaces/default/podtemplates"
)

func newXY(t *testing.T, ctx context.Context, servers int) *xy {
	t.Helper()
	e := harness.New(t)
	main := e.Etcd()
	s := &xy{etcd: e.Etcd()}
	for range servers {
		s.servers = append(s.servers, e.StartAPIServer(main, append([]string{
			"--etcd-servers-overrides=/limitranges#" + s.etcd.URL + ",/podtemplates#" + s.etcd.URL,
			"--etcd-compaction-interval=0", // a compaction would write to that etcd
		}, serverFlags...)...))
	}
	for _, server := range s.servers {
		harness.Check(t, server.Await(ctx, "/readyz"))
	}
	s.advance(t, ctx, 99)
	api := s.servers[0].API()
	x, err := api.Create(ctx, xPath, object{"metadata": object{"name": "x"}, "spec": object{"limits": []any{}}})
	harness.Check(t, err)
	s.expect(t, x, 100)
	y, err := api.Create(ctx, yPath, object{"metadata": object{"name": "y"}, "template": object{"spec": object{
		"containers": []any{object{"name": "main", "image": "none"}}}}})
	harness.Check(t, err)
	s.expect(t, y, 101)
	return s
}

// advance writes to etcd, outside the prefixes of the servers, until it reaches a revision.
func (s *xy) advance(t *testing.T, ctx context.Context, revision int64) {
	t.Helper()
	client := s.etcd.Client()
	for {
		r, err := client.Put(ctx, "elsewhere", "")
		harness.Check(t, err)
		if r.Header.Revision == revision {
			return
		}
		if r.Header.Revision > revision {
			t.Fatalf("etcd is at %d already, want %d", r.Header.Revision, revision)
		}
	}
}

func (s *xy) expect(t *testing.T, o harness.Object, revision int64) {
	t.Helper()
	if o.Metadata.ResourceVersion != fmt.Sprint(revision) {
		t.Fatalf("%s was written at %s, want %d", o.Metadata.Name, o.Metadata.ResourceVersion, revision)
	}
}

// touch changes an object.
func (s *xy) touch(t *testing.T, ctx context.Context, path string, revision int64) {
	t.Helper()
	o, err := s.servers[0].API().Patch(ctx, path, fmt.Sprintf(`{"metadata":{"annotations":{"touched":"%d"}}}`, revision))
	harness.Check(t, err)
	s.expect(t, o, revision)
}

// restart restarts a server, by SIGTERM or by SIGKILL.
func restart(t *testing.T, s *harness.Server, kill bool) {
	t.Helper()
	if kill {
		s.Kill()
	} else {
		harness.Check(t, s.Stop())
	}
	s.Restart()
}

// resume starts a watch for X after a revision on a server.
func (s *xy) resume(t *testing.T, ctx context.Context, server *harness.Server, after int64) *watcher {
	t.Helper()
	w := &watcher{path: xPath, query: "allowWatchBookmarks=true"}
	if err := w.begin(ctx, server.API(), after); err != nil {
		t.Fatalf("a watch for X after %d is refused: %v", after, err)
	}
	t.Cleanup(w.end)
	return w
}

// expectX requires that the next event is the change of x at a revision.
func expectX(t *testing.T, ctx context.Context, w *watcher, revision int64) {
	t.Helper()
	for {
		e, err := w.next(ctx)
		harness.Check(t, err)
		if e.Type == "BOOKMARK" && w.position < revision {
			continue
		}
		if e.Type != "MODIFIED" || w.position != revision {
			t.Fatalf("%s at %d, want the change of x at %d", e.Type, w.position, revision)
		}
		return
	}
}

// The first example of KEP-1904's motivation: the only server is restarted while W, a watch for X, is synced to 100 and etcd is at
// 101. W resumes at 100.
func TestKEP1904_OneServerRestarted_WatchResumes(t *testing.T) {
	t.Parallel()
	for name, kill := range map[string]bool{"SIGTERM": false, "SIGKILL": true} {
		t.Run(name, func(t *testing.T) {
			ctx := harness.Context(t, 2*time.Minute)
			s := newXY(t, ctx, 1)
			w := s.resume(t, ctx, s.servers[0], 99)
			e, err := w.next(ctx)
			harness.Check(t, err)
			if e.Type != "ADDED" || w.position != 100 {
				t.Fatalf("W begins with %s at %d, want x at 100", e.Type, w.position)
			}
			restart(t, s.servers[0], kill) // T1, T2
			_ = w.drain(ctx)
			if !kill && w.position != 101 {
				t.Errorf("the server left W at %d, and was at 101", w.position)
			}
			at100 := s.resume(t, ctx, s.servers[0], 100) // T3
			left := s.resume(t, ctx, s.servers[0], w.position)
			s.touch(t, ctx, xPath+"/x", 102)
			expectX(t, ctx, at100, 102)
			expectX(t, ctx, left, 102)
		})
	}
}

// The second example: two servers are restarted, one when etcd is at 101 and one when it is at 102, and X is not changed. A watch
// resumes on either server from a resource version of the other.
func TestKEP1904_TwoServersRestarted_WatchResumesOnEither(t *testing.T) {
	t.Parallel()
	for name, kill := range map[string]bool{"SIGTERM": false, "SIGKILL": true} {
		t.Run(name, func(t *testing.T) {
			ctx := harness.Context(t, 2*time.Minute)
			s := newXY(t, ctx, 2)
			restart(t, s.servers[0], kill) // T1, T2
			s.touch(t, ctx, yPath+"/y", 102)
			restart(t, s.servers[1], kill) // T4, T5
			r, err := s.etcd.Client().Get(ctx, "x", clientv3.WithCountOnly())
			harness.Check(t, err)
			if r.Header.Revision != 102 {
				t.Fatalf("etcd is at %d, want 102", r.Header.Revision)
			}
			var all []*watcher
			for _, server := range s.servers {
				list, err := server.API().List(ctx, xPath, "resourceVersion=0")
				harness.Check(t, err)
				for _, after := range []int64{100, 101, 102, harness.Revision(t, list.Metadata.ResourceVersion)} {
					all = append(all, s.resume(t, ctx, server, after))
				}
			}
			s.touch(t, ctx, xPath+"/x", 103)
			for _, w := range all {
				expectX(t, ctx, w, 103)
			}
		})
	}
}
