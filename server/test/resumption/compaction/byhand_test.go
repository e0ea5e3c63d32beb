package compaction

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestCompactRevKey_DeletedOrInvalid_IsIgnored: the key is deleted, and set to invalid values. Servers keep running, ignore these values, keep their
// history, and continue to compact.
func TestCompactRevKey_DeletedOrInvalid_IsIgnored(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	announced := announcements(t, ctx, client)
	servers := []*harness.Server{env.APIServer(etcd, every(time.Second)), env.APIServer(etcd, every(time.Second))}
	rev := create(t, ctx, servers[0].API(), "first")
	next(t, ctx, announced, rev)
	for i, write := range []clientv3.Op{
		clientv3.OpDelete(key),
		clientv3.OpDelete(key),
		clientv3.OpPut(key, "nonsense"),
		clientv3.OpPut(key, "999999999"),
		clientv3.OpPut(key, ""),
		clientv3.OpPut(key, "-7"),
		clientv3.OpDelete(key),
	} {
		old := rev
		_, err := client.Do(ctx, write)
		harness.Check(t, err)
		rev = create(t, ctx, servers[0].API(), fmt.Sprint("map-", i))
		for {
			a := next(t, ctx, announced, rev)
			if a.rev != 999999999 {
				requireCompacted(t, ctx, client, a.rev)
				break
			}
		}
		for _, s := range servers {
			awaitGone(t, ctx, s.API(), old)
			awaitGone(t, ctx, s.API(), rev)
			newest := create(t, ctx, s.API(), fmt.Sprintf("map-%d-%s", i, s.URL[len(s.URL)-5:]))
			if r := listAt(t, ctx, s.API(), newest); r.Code != http.StatusOK {
				t.Errorf("after write %d by hand: a list at %d, the newest: %v", i, newest, r.Err())
			}
			harness.Check(t, s.Await(ctx, "/readyz"))
		}
	}
}
