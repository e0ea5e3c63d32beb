package overload

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// TestMemory_OutOfMemory_WatchesResume: the kernel ends a server whose control group has no more
// memory. After its restart a client resumes its watch where it was, without a relist, and gets the
// changes in between. A client that renews a lease renews it again.
func TestMemory_OutOfMemory_WatchesResume(t *testing.T) {
	harness.OnlyStrata(t)
	const enough = 3 << 30
	group := newMemoryGroup(t, enough)
	ctx := harness.Context(t, 4*time.Minute)
	env := harness.New(t)
	etcd := env.Etcd()
	server := env.StartAPIServerPrepared(func(pid int) error {
		return os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644)
	}, etcd, "--disable-admission-plugins=ServiceAccount")
	harness.Check(t, server.Await(ctx, "/readyz"))
	api := server.API()
	resident, err := server.Resident()
	harness.Check(t, err)
	harness.Check(t, limitMemory(filepath.Dir(group), resident+(32<<20)))
	code := make(chan int, 1)
	go func() {
		c, err := server.Wait(ctx)
		if err != nil {
			t.Error(err)
		}
		code <- c
	}()
	const path = "/api/v1/namespaces/default/secrets"
	client := etcd.Client()
	put := func(resource, kind, name, value string) string {
		t.Helper()
		r, err := client.Put(ctx, "/registry/"+resource+"/default/"+name,
			fmt.Sprintf(`{"apiVersion":"v1","kind":%q,"metadata":{"name":%q,"namespace":"default","uid":%[2]q,"annotations":{"value":%q}}}`, kind, name, value))
		harness.Check(t, err)
		return fmt.Sprint(r.Header.Revision)
	}
	const leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
	lease, err := api.Create(ctx, leases, map[string]any{"metadata": map[string]any{"name": "leader"}})
	harness.Check(t, err)
	renewed, doubtful := 0, false
	renew := func(api *harness.API) error {
		renewed++
		next, err := api.Update(ctx, leases+"/leader", map[string]any{
			"metadata": map[string]any{"name": "leader", "resourceVersion": lease.Metadata.ResourceVersion},
			"spec":     map[string]any{"holderIdentity": "one", "leaseTransitions": renewed}})
		if err == nil {
			lease = next
		}
		return err
	}
	watch := harness.StartWatch(t, ctx, api, path, "resourceVersion="+put("secrets", "Secret", "first", ""))
	last := ""
	for n := 0; ; n++ { // the server holds all values, which cannot be compressed
		seen := put("secrets", "Secret", fmt.Sprint("small-", n), "")
		if _, err := watch.Next(ctx); err != nil {
			break
		}
		last = seen
		doubtful = renew(api) != nil
		noise := make([]byte, 512<<10)
		_, _ = rand.Read(noise) // never fails
		put("configmaps", "ConfigMap", fmt.Sprint("large-", n), hex.EncodeToString(noise))
		if n == 500 {
			t.Fatal("the server holds 500 MB more than before, with 32 MB of room")
		}
	}
	if c := <-code; c != -1 || last == "" {
		t.Fatalf("the server has ended with code %d after the event of %q, want a signal after an event", c, last)
	}
	harness.Check(t, limitMemory(filepath.Dir(group), enough))
	_, err = client.Delete(ctx, "/registry/configmaps/default/large-", clientv3.WithPrefix())
	harness.Check(t, err)
	server.Restart()
	var held harness.Object
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
		held, err = server.API().Get(ctx, leases+"/leader", "")
		return err == nil, err
	}))
	if held.Metadata.ResourceVersion != lease.Metadata.ResourceVersion && !doubtful {
		t.Errorf("the lease is at %s, and was renewed at %s", held.Metadata.ResourceVersion, lease.Metadata.ResourceVersion)
	}
	lease = held // the server may have ended before it answered the last renewal
	harness.Check(t, renew(server.API()))
	third := put("secrets", "Secret", "third", "")
	resumed := harness.StartWatch(t, ctx, server.API(), path, "resourceVersion="+last)
	for { // those that the server had not sent, and this one
		e, err := resumed.Next(ctx)
		harness.Check(t, err)
		if e.Type != "ADDED" {
			t.Fatalf("the resumed watch has %s %+v", e.Type, e.Status)
		}
		if e.Object.Metadata.ResourceVersion == third {
			return
		}
	}
}
