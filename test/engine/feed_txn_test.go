package enginetest

import (
	"fmt"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestFeedServer_Txn_MatchesEtcd: reads of several ranges have the answers of etcd, also if one of
// them is sorted or has bounds of revisions, which memory cannot answer.
func TestFeedServer_Txn_MatchesEtcd(t *testing.T) {
	etcd, prefix := open(t)
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	claim(t, f.mirror, prefix+"a/")
	first := put(t, etcd, prefix+"a/0", "0")
	for i := 1; i < 6; i++ {
		put(t, etcd, fmt.Sprintf("%sa/%d", prefix, i), fmt.Sprint(i))
	}
	newest := put(t, etcd, prefix+"a/2", "again")
	catchUp(t, f.mirror)
	client := connect(t, f.socket)
	plain := clientv3.OpGet(prefix+"a/1", clientv3.WithRev(newest))
	for name, tt := range map[string]struct {
		ops    []clientv3.Op
		memory bool
	}{
		"keys":          {[]clientv3.Op{plain, clientv3.OpGet(prefix+"a/2", clientv3.WithRev(newest))}, true},
		"ranges":        {[]clientv3.Op{clientv3.OpGet(prefix+"a/", clientv3.WithPrefix(), clientv3.WithRev(newest), clientv3.WithLimit(2)), plain}, true},
		"of the past":   {[]clientv3.Op{clientv3.OpGet(prefix+"a/", clientv3.WithPrefix(), clientv3.WithRev(first+1), clientv3.WithCountOnly())}, true},
		"two times":     {[]clientv3.Op{plain, clientv3.OpGet(prefix+"a/", clientv3.WithPrefix(), clientv3.WithRev(first))}, false},
		"modified":      {[]clientv3.Op{plain, clientv3.OpGet(prefix+"a/", clientv3.WithPrefix(), clientv3.WithRev(newest), clientv3.WithMinModRev(newest))}, false},
		"created":       {[]clientv3.Op{plain, clientv3.OpGet(prefix+"a/", clientv3.WithPrefix(), clientv3.WithRev(newest), clientv3.WithMaxCreateRev(first))}, false},
		"descending":    {[]clientv3.Op{plain, clientv3.OpGet(prefix+"a/", clientv3.WithPrefix(), clientv3.WithRev(newest), clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))}, false},
		"by revision":   {[]clientv3.Op{plain, clientv3.OpGet(prefix+"a/", clientv3.WithPrefix(), clientv3.WithRev(newest), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortAscend))}, false},
		"of the key":    {[]clientv3.Op{clientv3.OpGet(etcdsource.CompactionKey, clientv3.WithRev(newest)), plain}, false},
		"of the newest": {[]clientv3.Op{clientv3.OpGet(prefix+"a/", clientv3.WithPrefix())}, false},
	} {
		t.Run(name, func(t *testing.T) {
			before := f.server.Stats()
			got, err := client.Txn(contextFor(t)).Then(tt.ops...).Commit()
			testcheck.NoError(t, err)
			want, err := etcd.Txn(contextFor(t)).Then(tt.ops...).Commit()
			testcheck.NoError(t, err)
			if g, w := describeTxn(got), describeTxn(want); g != w {
				t.Errorf("at the feed:\n%s\nat etcd:\n%s", g, w)
			}
			if after := f.server.Stats(); (after.FromEtcd == before.FromEtcd) != tt.memory {
				t.Errorf("answered by %d requests to etcd, from memory: want %v", after.FromEtcd-before.FromEtcd, tt.memory)
			}
		})
	}
}

// describeTxn returns the answer to a transaction of ranges as text.
func describeTxn(r *clientv3.TxnResponse) string {
	var text strings.Builder
	fmt.Fprintf(&text, "succeeded %v\n", r.Succeeded)
	for _, op := range r.Responses {
		fmt.Fprintln(&text, describe((*clientv3.GetResponse)(op.GetResponseRange())))
	}
	return text.String()
}
