package etcdproxy_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// next returns a text for the next response to the watch.
func next(t *testing.T, ctx context.Context, watch clientv3.WatchChan) string {
	t.Helper()
	select {
	case r, ok := <-watch:
		if !ok || r.Err() != nil {
			t.Fatalf("the watch ended: %v", r.Err())
		}
		if r.IsProgressNotify() {
			return fmt.Sprintf("progress %d", r.Header.Revision)
		}
		var words []string
		for _, e := range r.Events {
			words = append(words, fmt.Sprintf("%s %s@%d", e.Type, e.Kv.Key, e.Kv.ModRevision))
		}
		return strings.Join(words, ", ")
	case <-ctx.Done():
		t.Fatal("the watch is sent nothing: ", context.Cause(ctx))
	}
	return ""
}

// begin starts a watch of a prefix on a separate stream, which the context identifies.
func begin(t *testing.T, ctx context.Context, client *clientv3.Client, prefix string, opts ...clientv3.OpOption) (clientv3.WatchChan, context.Context) {
	t.Helper()
	ctx = metadata.NewOutgoingContext(ctx, metadata.Pairs("stream", prefix))
	watch := client.Watch(ctx, prefix, append(opts, clientv3.WithPrefix(), clientv3.WithCreatedNotify())...)
	if r := <-watch; !r.Created {
		t.Fatalf("the watch begins with %v", r)
	}
	return watch, ctx
}

func TestDropEvents_DropsMatchingEvents(t *testing.T) {
	p, _, client, ctx := proxied(t)
	watch, _ := begin(t, ctx, client, "k/")
	put := func(keys ...string) int64 {
		t.Helper()
		var ops []clientv3.Op
		for _, key := range keys {
			ops = append(ops, clientv3.OpPut(key, "value"))
		}
		return harness.Must[*clientv3.TxnResponse](t)(client.Txn(ctx).Then(ops...).Commit()).Header.Revision
	}
	expect := func(format string, args ...any) {
		t.Helper()
		if got, want := next(t, ctx, watch), fmt.Sprintf(format, args...); got != want {
			t.Errorf("the watch received %q, want %q", got, want)
		}
	}
	expect("PUT k/a@%d, PUT k/b@%[1]d", put("k/a", "k/b"))

	once := p.DropEvents(etcdproxy.Events(etcdproxy.Key("k/a"), etcdproxy.Updates), 1)
	expect("PUT k/b@%d, PUT k/c@%[1]d", put("k/a", "k/b", "k/c"))
	expect("PUT k/a@%d", put("k/a")) // the second event is not dropped
	always := p.DropEvents(etcdproxy.Events(etcdproxy.Prefix("k/"), etcdproxy.Deletes), 0)
	creates := p.DropEvents(etcdproxy.Creates, 0)
	for _, key := range []string{"k/a", "k/b"} { // no events remain
		harness.Must[*clientv3.DeleteResponse](t)(client.Delete(ctx, key))
		put(key)
	}
	expect("PUT k/c@%d", put("k/c", "k/d"))
	always.Remove()
	always.Remove()
	revision := harness.Must[*clientv3.DeleteResponse](t)(client.Delete(ctx, "k/c")).Header.Revision
	expect("DELETE k/c@%d", revision)
	if got := []int{once.Hits(), always.Hits(), creates.Hits()}; !slices.Equal(got, []int{1, 2, 3}) {
		t.Errorf("the rules were applied %v times, want 1, 2 and 3", got)
	}
}

// Rules treat a response that etcd sends in fragments as one response.
func TestDropEvents_FragmentedResponse_IsOneResponse(t *testing.T) {
	p, direct, client, ctx := proxied(t)
	const keys = 60
	value := strings.Repeat("v", 100_000)
	for i := range keys {
		harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, fmt.Sprintf("k/%02d", i), value))
	}
	all := func(client *clientv3.Client) (names []string) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		watch, _ := begin(t, ctx, client, "k/", clientv3.WithRev(1), clientv3.WithFragment())
		for len(names) == 0 || names[len(names)-1] != "k/end" {
			r := <-watch
			if r.Err() != nil || len(r.Events) == 0 {
				t.Fatalf("after %d events: %v", len(names), r)
			}
			for _, e := range r.Events {
				names = append(names, string(e.Kv.Key))
			}
		}
		return names
	}
	harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "k/end", ""))
	want := all(direct)
	p.Reset()
	if got := all(client); !slices.Equal(got, want) {
		t.Fatalf("without a rule: %v, want %v", got, want)
	}
	if answers := p.Traffic()[etcdproxy.Watches].Answers; answers < 4 {
		// the first answer confirms the watch
		t.Fatalf("%d messages, want several fragments", answers)
	}
	for what, drop := range map[string]func(i int) bool{
		"the first fragments": func(i int) bool { return i < 45 },
		"the last fragments":  func(i int) bool { return i > 10 },
		"some of each":        func(i int) bool { return i%3 == 0 },
		"nothing":             func(int) bool { return false },
	} {
		lost := map[string]bool{}
		for i := range keys {
			lost[fmt.Sprintf("k/%02d", i)] = drop(i)
		}
		rule := p.DropEvents(func(e *mvccpb.Event) bool { return lost[string(e.Kv.Key)] }, 0)
		left := slices.DeleteFunc(slices.Clone(want), func(key string) bool { return lost[key] })
		if got := all(client); !slices.Equal(got, left) {
			t.Errorf("%s are lost: got %v, want %v", what, got, left)
		}
		rule.Remove()
	}
}

func TestHoldEvents_PassesProgress(t *testing.T) {
	p, _, client, ctx := proxied(t)
	watch, stream := begin(t, ctx, client, "k/")
	other, _ := begin(t, ctx, client, "other/")
	rule := p.HoldEvents(etcdproxy.Key("k/held"))
	put := func(key string) int64 {
		t.Helper()
		return harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, key, "")).Header.Revision
	}
	before, held, after, beside := put("k/before"), put("k/held"), put("k/after"), put("other/beside")
	want := []string{fmt.Sprintf("PUT k/before@%d", before)}
	got := []string{next(t, ctx, watch)}
	if err := rule.Await(ctx, 1); err != nil {
		t.Fatal(err)
	}
	if err := client.RequestProgress(stream); err != nil {
		t.Fatal(err)
	}
	got, want = append(got, next(t, ctx, watch)), append(want, fmt.Sprintf("progress %d", beside))
	got, want = append(got, next(t, ctx, other)), append(want, fmt.Sprintf("PUT other/beside@%d", beside))
	rule.Remove()
	later := put("k/later")
	for range 3 {
		got = append(got, next(t, ctx, watch))
	}
	want = append(want, fmt.Sprintf("PUT k/held@%d", held), fmt.Sprintf("PUT k/after@%d", after), fmt.Sprintf("PUT k/later@%d", later))
	if !slices.Equal(got, want) {
		t.Errorf("the watches received %q, want %q", got, want)
	}
}

func TestSendProgress_ReachesWatchesOfKey(t *testing.T) {
	p, _, client, ctx := proxied(t)
	watch, _ := begin(t, ctx, client, "k/")
	other, _ := begin(t, ctx, client, "other/")
	if streams, err := p.SendProgress("k/some", 12345); streams != 1 || err != nil {
		t.Fatalf("sent on %d streams, %v, want 1", streams, err)
	}
	if streams, err := p.SendProgress("none/", 12345); streams != 0 || err != nil {
		t.Fatalf("sent on %d streams, %v, want 0: the key has no watch", streams, err)
	}
	if got := next(t, ctx, watch); got != "progress 12345" {
		t.Errorf("the watch received %q", got)
	}
	revision := harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "other/a", "")).Header.Revision
	if got, want := next(t, ctx, other), fmt.Sprintf("PUT other/a@%d", revision); got != want {
		t.Errorf("the other watch received %q, want %q", got, want)
	}
}

func TestChangeRanges_ChangesMatchingResponses(t *testing.T) {
	p, _, client, ctx := proxied(t)
	get := func(key string, opts ...clientv3.OpOption) *clientv3.GetResponse {
		t.Helper()
		return harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, key, opts...))
	}
	for i := range 5 {
		harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, fmt.Sprintf("k/%d", i), "value"))
	}
	now := get("probe", clientv3.WithCountOnly()).Header.Revision
	rule := p.Backdate(etcdproxy.CountsOf("probe"), 2, func(revision int64) int64 { return revision - 3 })
	var got []int64
	for range 3 {
		got = append(got, get("probe", clientv3.WithCountOnly()).Header.Revision, get("probe").Header.Revision, get("k/", clientv3.WithPrefix(), clientv3.WithCountOnly()).Header.Revision)
	}
	if want := []int64{now - 3, now, now, now - 3, now, now, now, now, now}; !slices.Equal(got, want) || rule.Hits() != 2 {
		t.Errorf("revisions %v, want %v; applied %d times, want 2", got, want, rule.Hits())
	}
	p.ChangeRanges(etcdproxy.KeysOf("k/"), 0, func(_ *pb.RangeRequest, r *pb.RangeResponse) { r.Kvs = r.Kvs[1:] })
	if keys, values := get("k/", clientv3.WithPrefix(), clientv3.WithKeysOnly()), get("k/", clientv3.WithPrefix()); len(keys.Kvs) != 4 || len(values.Kvs) != 5 {
		t.Errorf("%d keys and %d values, want 4 and 5", len(keys.Kvs), len(values.Kvs))
	}
}

func TestHoldAndFailRequests_AffectMatchingRequests(t *testing.T) {
	p, _, client, ctx := proxied(t)
	rule := p.FailRequests(etcdproxy.KeysOf("k/"), 1, rpctypes.ErrGRPCCompacted)
	for i, want := range []error{rpctypes.ErrCompacted, nil} {
		harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "k/", clientv3.WithPrefix()))
		if _, err := client.Get(ctx, "k/", clientv3.WithPrefix(), clientv3.WithKeysOnly()); !errors.Is(err, want) {
			t.Errorf("request %d: %v, want %v", i, err, want)
		}
	}
	if rule.Hits() != 1 {
		t.Errorf("applied %d times, want 1", rule.Hits())
	}

	hold := p.HoldRequests(func(r etcdproxy.Request) bool { return r.Txn != nil && len(r.Txn.Success) == 2 }, 0)
	commit := func(ops ...clientv3.Op) chan error {
		done := make(chan error, 1)
		go func() {
			_, err := client.Txn(ctx).Then(ops...).Commit()
			done <- err
		}()
		return done
	}
	held := commit(clientv3.OpPut("k/a", ""), clientv3.OpPut("k/b", ""))
	if err := hold.Await(ctx, 1); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if err := <-commit(clientv3.OpPut("k/c", "")); err != nil {
			t.Error(err)
		}
		if n := harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "k/a", clientv3.WithCountOnly())).Count; n != 0 {
			t.Fatal("a transaction that is held has happened")
		}
	}
	select {
	case err := <-held:
		t.Fatal("a transaction that is held is answered: ", err)
	default:
	}
	hold.Remove()
	if err := <-held; err != nil {
		t.Error(err)
	}
	if n := harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "k/a", clientv3.WithCountOnly())).Count; n != 1 {
		t.Error("the transaction was lost")
	}
}

func TestTraffic_CountsRequestsAndBytesByKind(t *testing.T) {
	p, _, client, ctx := proxied(t)
	const keys, size = 20, 10_000
	for i := range keys {
		harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, fmt.Sprintf("k/%d", i), strings.Repeat("v", size)))
	}
	p.Reset()
	for _, opts := range [][]clientv3.OpOption{
		{clientv3.WithCountOnly()}, {clientv3.WithKeysOnly()}, {clientv3.WithKeysOnly()}, {}, {}, {},
	} {
		harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "k/", append(opts, clientv3.WithPrefix())...))
	}
	traffic := p.Traffic()
	for kind, want := range map[etcdproxy.Kind]struct{ n, least, most int64 }{
		etcdproxy.Counts: {1, 1, 100},
		etcdproxy.Keys:   {2, 2 * keys * 3, 2 * keys * 100},
		etcdproxy.Values: {3, 3 * keys * size, 3 * keys * (size + 100)},
	} {
		if got := traffic[kind]; got.Requests != want.n || got.Answers != want.n || got.RequestBytes == 0 || got.AnswerBytes < want.least || got.AnswerBytes > want.most {
			t.Errorf("%s: %+v, want %d requests and %d to %d bytes", kind, got, want.n, want.least, want.most)
		}
	}
	p.Reset()
	if got := p.Traffic(); len(got) != 0 {
		t.Errorf("after Reset: %v", got)
	}
}
