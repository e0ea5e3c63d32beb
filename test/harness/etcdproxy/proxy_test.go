package etcdproxy_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

func proxied(t *testing.T) (p *harness.Proxy, direct, through *clientv3.Client, ctx context.Context) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	e := harness.New(t)
	etcd := e.Etcd()
	p = e.Proxy(etcd)
	return p, etcd.Client(), p.Etcd().Client(), ctx
}

func TestProxy_PassesAndCountsRequests(t *testing.T) {
	p, direct, client, ctx := proxied(t)
	rev := harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "a", "1")).Header.Revision
	if got := harness.Must[*clientv3.GetResponse](t)(direct.Get(ctx, "a")); got.Header.Revision != rev || string(got.Kvs[0].Value) != "1" {
		t.Errorf("etcd has %v, want the value put through the proxy", got)
	}

	p.Reset()
	harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "a", clientv3.WithPrefix(), clientv3.WithCountOnly()))
	if _, err := client.Get(ctx, "a", clientv3.WithRev(rev+100)); !errors.Is(err, rpctypes.ErrFutureRev) {
		t.Errorf("a future revision: %v, want etcd's error", err)
	}
	// As with KEP-2340's progress requests, different metadata makes a separate stream.
	md := metadata.NewOutgoingContext(ctx, metadata.Pairs("stream", "other"))
	for _, ctx := range []context.Context{clientv3.WithRequireLeader(ctx), md} {
		<-client.Watch(ctx, "a", clientv3.WithCreatedNotify())
	}
	if err := client.RequestProgress(md); err != nil {
		t.Fatal(err)
	}
	ranges := p.Ranges()
	if len(ranges) != 2 || string(ranges[0].Key) != "a" || !ranges[0].CountOnly || ranges[1].Revision != rev+100 {
		t.Errorf("ranges: %v", ranges)
	}
	if err := harness.Poll(ctx, func(context.Context) (bool, error) {
		// the client does not wait for a progress request
		got, want := p.Requests(), map[string]int64{etcdproxy.MethodRange: 2, etcdproxy.MethodWatch: 3}
		return fmt.Sprint(got) == fmt.Sprint(want), fmt.Errorf("requests %v, want %v", got, want)
	}); err != nil {
		t.Error(err)
	}
	p.Reset()
	if len(p.Ranges()) != 0 || len(p.Requests()) != 0 {
		t.Error("something is left after Reset")
	}
}

func TestProxy_SetVersion_ChangesStatus(t *testing.T) {
	p, direct, client, ctx := proxied(t)
	status := func(c *clientv3.Client) *clientv3.StatusResponse {
		return harness.Must[*clientv3.StatusResponse](t)(c.Status(ctx, c.Endpoints()[0]))
	}
	want := status(direct)
	p.SetVersion("3.5.12")
	if got := status(client); got.Version != "3.5.12" || got.Header.ClusterId != want.Header.ClusterId || got.DbSize == 0 {
		t.Errorf("got %v, want version 3.5.12 and else %v", got, want)
	}
	p.SetVersion("")
	if got := status(client); got.Version != want.Version {
		t.Errorf("version %q, want etcd's own %q", got.Version, want.Version)
	}
}

func TestProxy_Stall_DelaysWatchResponsesOnly(t *testing.T) {
	p, direct, client, ctx := proxied(t)
	seen, held := direct.Watch(ctx, "k"), client.Watch(ctx, "k", clientv3.WithCreatedNotify())
	if r := <-held; !r.Created {
		t.Fatalf("the watch begins with %v", r)
	}
	put := func(value string) {
		t.Helper()
		harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "k", value))
	}
	values := func(watch clientv3.WatchChan, n int) (values []string) {
		t.Helper()
		for len(values) < n {
			r, ok := <-watch
			if !ok {
				t.Fatalf("the watch ended after %d events of %d", len(values), n)
			}
			for _, e := range r.Events {
				values = append(values, string(e.Kv.Value))
			}
		}
		return values
	}
	put("before")
	values(seen, 1)
	values(held, 1)

	p.Stall(true)
	late := make(chan struct{})
	go func() { // a client waits for etcd to confirm a watch; this one needs a new stream
		client.Watch(clientv3.WithRequireLeader(ctx), "k")
		close(late)
	}()
	const writes = 50
	var want []string
	for i := range writes {
		want = append(want, fmt.Sprint(i))
		put(want[i])
		values(seen, 1)
		if got := harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "k")); string(got.Kvs[0].Value) != want[i] {
			t.Errorf("a read during the stall: %v, want %q", got.Kvs, want[i])
		}
		select {
		case r := <-held:
			t.Fatalf("during the stall: %v", r)
		case <-late:
			t.Fatal("during the stall: a new watch is confirmed")
		default:
		}
	}
	p.Stall(false)
	if got := values(held, writes); !slices.Equal(got, want) {
		t.Errorf("after the stall: %v, want %v", got, want)
	}
	<-late
	if err := ctx.Err(); err != nil {
		t.Error("after the stall: the new watch is not confirmed:", err)
	}
}

func TestProxy_Hold_DelaysReadsOfValuesOnly(t *testing.T) {
	p, _, client, ctx := proxied(t)
	harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "k", "1"))
	p.Reset()
	p.Hold(true)
	read := make(chan error, 1)
	go func() {
		_, err := client.Get(ctx, "k")
		read <- err
	}()
	if err := harness.Poll(ctx, func(context.Context) (bool, error) { return len(p.Ranges()) == 1, nil }); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "k", clientv3.WithCountOnly()))
		harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "k", "2"))
		select {
		case err := <-read:
			t.Fatal("a read of a value is answered:", err)
		default:
		}
	}
	p.Hold(false)
	if err := <-read; err != nil {
		t.Error(err)
	}
}

// Disconnecting clients, and the end of the environment, do not wait for the end of a stall.
func TestProxy_Stalled_ClientsCanDisconnect(t *testing.T) {
	p, _, client, ctx := proxied(t)
	p.Stall(true)
	start := func(ctx context.Context) (done chan struct{}) {
		t.Helper()
		before := p.Requests()[etcdproxy.MethodWatch]
		done = make(chan struct{})
		go func() {
			defer close(done)
			client.Watch(ctx, "k")
		}()
		if err := harness.Poll(ctx, func(context.Context) (bool, error) { return p.Requests()[etcdproxy.MethodWatch] > before, nil }); err != nil {
			t.Fatal(err)
		}
		return done
	}
	leaving, leave := context.WithCancel(ctx)
	left := start(leaving)
	leave()
	<-left
	start(clientv3.WithRequireLeader(context.WithoutCancel(ctx))) // ended by the environment
}
