package compaction

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// ignoreInvalid deletes the key, and sets it to invalid values. Servers keep running, ignore these
// values, keep their history, and continue to compact.
func ignoreInvalid(t *testing.T, ctx context.Context, client *clientv3.Client,
	announced <-chan announcement, servers []*harness.Server) {
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
			for n := 0; ; n++ {
				newest := create(t, ctx, s.API(), fmt.Sprintf("map-%d-%s-%d", i, s.URL[len(s.URL)-5:], n))
				r := listAt(t, ctx, s.API(), newest)
				if n < 10 && gone(r) && overtaken(t, ctx, client, newest) {
					continue // on a busy machine
				}
				if r.Code != http.StatusOK {
					t.Errorf("after write %d by hand: a list at %d, the newest: %v", i, newest, r.Err())
				}
				break
			}
			harness.Check(t, s.Await(ctx, "/readyz"))
		}
	}
}
