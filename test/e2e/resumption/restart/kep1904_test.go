package restart

import (
	"context"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/stratakube/strata/test/harness"
)

// xy are the two resources of KEP-1904's motivation, in an etcd of their own: object x of type X
// (limit ranges) is written at revision 100 of the KEP's text, object y of type Y (pod templates)
// at 101.
type xy struct {
	offset int64 // etcd's revision minus that of the text
	x, y   string
}

const (
	xPath = "/api/v1/namespaces/default/limitranges"
	yPath = "/api/v1/namespaces/default/podtemplates"
)

func newXY(t *testing.T, ctx context.Context) *xy {
	t.Helper()
	s := &xy{x: harness.NewName("x"), y: harness.NewName("y")}
	now, err := shared.xy.Client().Get(ctx, "now")
	harness.Check(t, err)
	s.offset = now.Header.Revision - 99
	api := shared.servers[0].API()
	x, err := api.Create(ctx, xPath, object{"metadata": object{"name": s.x}, "spec": object{"limits": []any{}}})
	harness.Check(t, err)
	s.expect(t, x, 100)
	y, err := api.Create(ctx, yPath, object{"metadata": object{"name": s.y}, "template": object{"spec": object{
		"containers": []any{object{"name": "main", "image": "none"}}}}})
	harness.Check(t, err)
	s.expect(t, y, 101)
	_, err = api.List(ctx, yPath, "") // waits until memory is at 101
	harness.Check(t, err)
	return s
}

// text returns a revision of etcd as one of the KEP's text.
func (s *xy) text(revision int64) int64 { return revision - s.offset }

func (s *xy) expect(t *testing.T, o harness.Object, revision int64) {
	t.Helper()
	if at := s.text(harness.Revision(t, o.Metadata.ResourceVersion)); at != revision {
		t.Fatalf("%s was written at %d, want %d", o.Metadata.Name, at, revision)
	}
}

// touch changes an object.
func (s *xy) touch(t *testing.T, ctx context.Context, path string, revision int64) {
	t.Helper()
	o, err := shared.servers[0].API().Patch(ctx, path,
		fmt.Sprintf(`{"metadata":{"annotations":{"touched":"%d"}}}`, revision))
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
	err := w.begin(ctx, server.API(), after+s.offset)
	for apierrors.IsTooManyRequests(err) && ctx.Err() == nil { // while history is restored
		harness.Pause(ctx, time.Second)
		err = w.begin(ctx, server.API(), after+s.offset)
	}
	if err != nil {
		t.Fatalf("a watch for X after %d is refused: %v", after, err)
	}
	t.Cleanup(w.end)
	return w
}

// expectX requires that the next event is a change of x at a revision.
func (s *xy) expectX(t *testing.T, ctx context.Context, w *watcher, kind string, revision int64) {
	t.Helper()
	for {
		e, err := w.next(ctx)
		harness.Check(t, err)
		at := s.text(w.position)
		if e.Type == "BOOKMARK" && at < revision {
			continue
		}
		if e.Type != kind || at != revision {
			t.Fatalf("%s at %d, want %s of x at %d", e.Type, at, kind, revision)
		}
		return
	}
}

// The two examples of KEP-1904's motivation. In the first, a server is restarted while W, a watch
// for X, is synced to 100 and etcd is at 101: W resumes at 100. In the second, the other server is
// restarted too, when etcd is at 102, and X is not changed: a watch resumes on either server from a
// resource version of the other.
func TestKEP1904_ServersRestarted_WatchResumesOnEither(t *testing.T) {
	shared.use.Own(t)
	for name, kill := range map[string]bool{"SIGTERM": false, "SIGKILL": true} {
		t.Run(name, func(t *testing.T) {
			ctx := harness.Context(t, 8*time.Minute)
			s := newXY(t, ctx)
			w := s.resume(t, ctx, shared.servers[0], 99)
			s.expectX(t, ctx, w, "ADDED", 100)
			restart(t, shared.servers[0], kill) // T1, T2
			_ = w.drain(ctx)
			left := s.text(w.position)
			if !kill && left != 101 {
				t.Errorf("the server left W at %d, and was at 101", left)
			}
			all := []*watcher{ // T3
				s.resume(t, ctx, shared.servers[0], 100), s.resume(t, ctx, shared.servers[0], left)}

			s.touch(t, ctx, yPath+"/"+s.y, 102)
			restart(t, shared.servers[1], kill) // T4, T5
			for _, server := range shared.servers {
				list, err := server.API().List(ctx, xPath, "resourceVersion=0")
				harness.Check(t, err)
				listed := s.text(harness.Revision(t, list.Metadata.ResourceVersion))
				for _, after := range []int64{100, 101, 102, listed} {
					all = append(all, s.resume(t, ctx, server, after))
				}
			}
			s.touch(t, ctx, xPath+"/"+s.x, 103)
			for _, w := range all {
				s.expectX(t, ctx, w, "MODIFIED", 103)
			}
		})
	}
}
