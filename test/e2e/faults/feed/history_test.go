package feed

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// past is a server that reads etcd through a proxy, and its answers to clients before it is killed.
type past struct {
	proxy  *harness.Proxy
	server *harness.Server
	api    *harness.API
	client *clientv3.Client // bypasses the proxy

	kinds []kind
	marks []mark
}

// mark has the answers for one resource at one moment.
type mark struct {
	kind     kind
	revision int64
	list     string // the items
	page     string // items of the first page
	token    string // for the remaining items; "" if there are none
	at       int64  // the revision of the pages
}

// pageSize is the page size of marks.
const pageSize = 7

// newPast starts a server that encrypts Secrets.
func newPast(t *testing.T, ctx context.Context) *past {
	t.Helper()
	e := harness.New(t)
	etcd := e.Etcd()
	p := &past{proxy: e.Proxy(etcd), client: etcd.Client(), kinds: []kind{maps, secrets, leases, things, events}}
	config, err := json.Marshal(object{
		"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration",
		"resources": []any{object{"resources": []any{"secrets"}, "providers": []any{
			object{"secretbox": object{"keys": []any{object{"name": "key", "secret": base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32)))}}}},
			object{"identity": object{}}, // for the test's own writes
		}}},
	})
	harness.Check(t, err)
	p.server = e.APIServer(p.proxy.Etcd(), noServiceAccounts, "--encryption-provider-config="+e.WriteFile("encryption.json", config))
	p.api = p.server.API()
	harness.Check(t, harness.Define(ctx, thingsGroup, "things", "Thing", nil, p.api))
	return p
}

// fill writes revisions of many kinds: creations, updates and deletions through the API, in
// transactions, and by leases.
func (p *past) fill(t *testing.T, ctx context.Context) {
	t.Helper()
	p.take(t, ctx)
	for _, k := range p.kinds {
		for i := range 12 {
			_, err := p.api.Create(ctx, k.path, k.body(fmt.Sprintf("api-%02d", i), "created"))
			harness.Check(t, err)
		}
	}
	p.take(t, ctx)
	for _, k := range p.kinds {
		for i := range 6 {
			_, err := p.api.Patch(ctx, fmt.Sprintf("%s/api-%02d", k.path, i), `{"metadata":{"annotations":{"value":"changed"}}}`)
			harness.Check(t, err)
		}
		for i := range 6 {
			harness.Check(t, p.api.Delete(ctx, fmt.Sprintf("%s/api-%02d", k.path, 3+i)))
		}
	}
	p.take(t, ctx)
	for n := range 4 { // transactions of 125 changes, from the second on with deletions
		var ops []clientv3.Op
		for i := range 25 {
			for _, k := range p.kinds {
				name := fmt.Sprintf("txn-%02d", i)
				if (i+n)%5 == 4 {
					ops = append(ops, clientv3.OpDelete(k.prefix+name))
				} else {
					ops = append(ops, k.put(name, fmt.Sprint(n)))
				}
			}
		}
		commit(t, ctx, p.client, ops...)
	}
	p.take(t, ctx)
	lease, err := p.client.Grant(ctx, 3600)
	harness.Check(t, err)
	for n := range 10 {
		var ops []clientv3.Op
		for i := range 20 {
			for _, k := range p.kinds {
				ops = append(ops, k.put(fmt.Sprintf("leased-%03d", n*20+i), "leased", clientv3.WithLease(lease.ID)))
			}
		}
		commit(t, ctx, p.client, ops...)
	}
	p.take(t, ctx)
	_, err = p.client.Revoke(ctx, lease.ID) // 1,000 deletions in one revision
	harness.Check(t, err)
	p.take(t, ctx)
	p.churn(t, ctx, 20)
	p.take(t, ctx)
}

// churn writes n revisions, each of all resources, and returns the last.
func (p *past) churn(t *testing.T, ctx context.Context, n int) (last int64) {
	t.Helper()
	for i := range n {
		var ops []clientv3.Op
		for _, k := range p.kinds {
			name := fmt.Sprintf("churn-%d", i%3)
			if i%4 == 3 {
				ops = append(ops, clientv3.OpDelete(k.prefix, clientv3.WithPrefix()))
			} else {
				ops = append(ops, k.put(name, fmt.Sprint(i)))
			}
		}
		last = commit(t, ctx, p.client, ops...)
	}
	return last
}

// take records the current answers to clients.
func (p *past) take(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, k := range p.kinds {
		list := harness.AwaitList(t, ctx, p.api, k.path)
		page, err := p.api.List(ctx, k.path, fmt.Sprintf("limit=%d", pageSize))
		harness.Check(t, err)
		p.marks = append(p.marks, mark{k, harness.Revision(t, list.Metadata.ResourceVersion), items(list), items(page), page.Metadata.Continue,
			harness.Revision(t, page.Metadata.ResourceVersion)})
	}
}

// fence writes all resources once more.
func (p *past) fence(t *testing.T, ctx context.Context, name string) int64 {
	t.Helper()
	var ops []clientv3.Op
	for _, k := range p.kinds {
		ops = append(ops, k.put("fence", name))
	}
	return commit(t, ctx, p.client, ops...)
}

// requireContinued fails the test unless watches, exact lists and paged lists continue from the
// marks.
func (p *past) requireContinued(t *testing.T, ctx context.Context, marks []mark) {
	t.Helper()
	watches, cancel := context.WithCancel(ctx)
	defer cancel()
	var recordings []*recording
	for _, m := range marks {
		m.requireList(t, ctx, p.api)
		m.requirePages(t, ctx, p.api)
		recordings = append(recordings, record(t, watches, p.api, m.kind.path, "", m.revision))
	}
	p.requireEvents(t, ctx, marks, recordings, p.fence(t, ctx, "after the start"))
}

// requireEvents fails the test unless the recordings, each of a watch that began at a mark, have
// received every event up to through, a revision that changed all resources.
func (p *past) requireEvents(t *testing.T, ctx context.Context, marks []mark, recordings []*recording, through int64) {
	t.Helper()
	for _, k := range p.kinds {
		var all []change
		for i, m := range marks {
			if m.kind != k {
				continue
			}
			if all == nil { // marks are in revision order
				all = history(t, ctx, p.client, k.prefix, m.revision, through)
			}
			recordings[i].requireEvents(t, ctx, later(all, m.revision))
		}
	}
}

// later returns the changes after a revision.
func later(all []change, revision int64) []change {
	i := slices.IndexFunc(all, func(c change) bool { return c.revision > revision })
	if i < 0 {
		return nil
	}
	return all[i:]
}

// requireList repeats the list of the mark, and returns the number of times that the server asked
// for a retry.
func (m mark) requireList(t *testing.T, ctx context.Context, api *harness.API) (retries int) {
	t.Helper()
	r, retries, err := retried(ctx, func() (*harness.Response, error) { return listAt(ctx, api, m.kind.path, m.revision) })
	if err != nil {
		t.Error(err)
		return 0
	}
	list, err := r.List()
	if err != nil || items(list) != m.list || list.Metadata.ResourceVersion != fmt.Sprint(m.revision) {
		t.Errorf("list of %s at %d: %+v, %v; it was %s", m.kind.path, m.revision, list, err, m.list)
	}
	return retries
}

// requirePages continues the paged list of the mark.
func (m mark) requirePages(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	all := m.page
	for token := m.token; token != ""; {
		page, err := api.List(ctx, m.kind.path, fmt.Sprintf("limit=%d&continue=%s", pageSize, url.QueryEscape(token)))
		if err != nil {
			t.Errorf("page of %s at %d: %v", m.kind.path, m.at, err)
			return
		}
		if got := harness.Revision(t, page.Metadata.ResourceVersion); got != m.at {
			t.Errorf("page of %s is of %d, those before were of %d", m.kind.path, got, m.at)
		}
		all, token = all+items(page), page.Metadata.Continue
	}
	if all != m.list {
		t.Errorf("the pages of %s at %d show %s, want %s", m.kind.path, m.at, all, m.list)
	}
}

// objectReads returns the keys that were read from etcd, for cached resources, since the proxy was
// reset. Reads of keys only are consistency checks. The server gets objects outside of the test's
// namespace, such as its lease, and reads them from etcd if memory is late.
func (p *past) objectReads() (keys []string) {
	for _, r := range p.proxy.Ranges() {
		for _, k := range p.kinds {
			all := strings.TrimSuffix(k.prefix, "default/")
			own := len(r.RangeEnd) == 0 && !strings.HasPrefix(string(r.Key), k.prefix)
			if k != events && !own && !r.CountOnly && !r.KeysOnly && strings.HasPrefix(string(r.Key), all) {
				keys = append(keys, string(r.Key))
			}
		}
	}
	return keys
}

// TestHistory_ServerKilled_IsRestored kills a server and starts it again, several times. The server
// still serves revisions from before the kill, and requests during the restore wait: watches, exact
// lists and paged lists continue, all from memory. Each start restores in another way.
func TestHistory_ServerKilled_IsRestored(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, 2*testTimeout)
	p := newPast(t, ctx)
	p.fill(t, ctx)
	list, replay := hold{"the list", p.proxy.Hold}, hold{"the replay", p.proxy.Stall}
	type restart struct {
		name string
		run  func(t *testing.T)
	}
	restarts := []restart{
		{"requests wait for the list", func(t *testing.T) { p.duringRestore(t, ctx, list) }},
		{"from every revision", func(t *testing.T) { p.everyRevision(t, ctx) }},
		{"as far as the bounds", func(t *testing.T) { p.bounded(t, ctx) }},
		{"etcd is compacted during the replay", func(t *testing.T) { p.compactedDuringRestore(t, ctx, replay, 2) }},
	}
	if harness.Long() {
		// the replay of a compacted etcd begins with a watch, which must not be held
		restarts = slices.Concat(
			[]restart{{"requests wait for the replay", func(t *testing.T) { p.duringRestore(t, ctx, replay) }}}, restarts,
			[]restart{
				{"etcd is compacted during the list", func(t *testing.T) { p.compactedDuringRestore(t, ctx, list, 2) }},
				{"gate off", func(t *testing.T) { p.gateOff(t, ctx) }},
			})
	}
	for _, r := range restarts {
		if !t.Run(r.name, r.run) {
			return
		}
	}
}

// everyRevision requests the events of the churn, including transactions and the end of the lease.
func (p *past) everyRevision(t *testing.T, ctx context.Context) {
	last := p.fence(t, ctx, "every revision")
	all := history(t, ctx, p.client, maps.prefix, p.marks[0].revision, last)
	var revisions []int64
	for _, c := range all {
		revisions = append(revisions, c.revision-1, c.revision)
	}
	slices.Sort(revisions)
	for _, at := range slices.Compact(revisions) {
		watch, cancel := context.WithCancel(ctx)
		record(t, watch, p.api, maps.path, "", at).requireEvents(t, ctx, later(all, at))
		cancel()
		if t.Failed() {
			return
		}
	}
}

// requireFromMemory fails the test unless requests continue from the marks without reads of objects
// from etcd.
func (p *past) requireFromMemory(t *testing.T, ctx context.Context, marks []mark) {
	t.Helper()
	harness.Check(t, p.api.AwaitHistory(ctx)) // a server is ready before
	p.proxy.Reset()
	p.requireContinued(t, ctx, marks)
	if keys := p.objectReads(); len(keys) > 0 {
		t.Errorf("%d requests to etcd for objects or lists that memory should have: %q", len(keys), keys[:min(5, len(keys))])
	}
}

// bounded restarts the server with less history than etcd has.
func (p *past) bounded(t *testing.T, ctx context.Context) {
	last := p.churn(t, ctx, 200)
	p.take(t, ctx)
	recent := p.marks[len(p.marks)-len(p.kinds):]
	p.server.Kill()
	p.server.Restart("--strata-replay-revisions=100")
	p.requireFromMemory(t, ctx, recent)
	record(t, ctx, p.api, maps.path, "", last-190).requireExpired(t, ctx)
	record(t, ctx, p.api, maps.path, "", recent[0].revision-10).requireEvents(t, ctx,
		history(t, ctx, p.client, maps.prefix, recent[0].revision-10, p.fence(t, ctx, "inside")))
	p.marks[0].requireList(t, ctx, p.api) // answered by etcd
}

// gateOff restarts the server without a restore.
func (p *past) gateOff(t *testing.T, ctx context.Context) {
	p.take(t, ctx)
	marks := p.marks[len(p.marks)-len(p.kinds):]
	p.churn(t, ctx, 10)
	p.server.Kill()
	p.server.Restart("--strata-feature-gates=WatchHistoryRestore=false")
	for _, k := range []kind{maps, secrets, things} {
		i := slices.IndexFunc(marks, func(m mark) bool { return m.kind == k })
		record(t, ctx, p.api, k.path, "", marks[i].revision).requireExpired(t, ctx)
		marks[i].requireList(t, ctx, p.api) // answered by etcd
	}
}

// hold delays a part of a server's start.
type hold struct {
	name string
	set  func(bool)
}

// duringRestore sends watches and exact lists to a server that is still reading its history.
func (p *past) duringRestore(t *testing.T, ctx context.Context, held hold) {
	p.server.Kill()
	p.churn(t, ctx, 10) // while the server is down
	held.set(true)
	defer held.set(false)
	p.server.StartAgain()
	harness.Check(t, p.server.Await(ctx, "/version")) // it serves, and is not ready
	marks := p.marks[len(p.marks)/2:]
	fence := p.fence(t, ctx, held.name)
	var group sync.WaitGroup
	// of cached resources, and of resources that etcd serves or a definition adds
	var retries [2]atomic.Int64
	retried := func(k kind, n int) {
		i := 0
		if k == events || k == things {
			i = 1
		}
		retries[i].Add(int64(n))
	}
	recordings := make([]*recording, len(marks))
	for i, m := range marks {
		group.Go(func() { retried(m.kind, m.requireList(t, ctx, p.api)) })
		group.Go(func() {
			recordings[i] = record(t, ctx, p.api, m.kind.path, "", m.revision)
			retried(m.kind, recordings[i].retries)
		})
	}
	// Meanwhile all requests have been sent.
	if err := p.server.Await(shortly(t), "/readyz"); err == nil {
		t.Error("the server is ready while etcd does not answer")
	}
	held.set(false)
	group.Wait()
	t.Logf("sent %[1]d watches and %[1]d lists; retries after a Retry-After: %[2]d, and %[3]d of custom and uncached resources",
		len(marks), retries[0].Load(), retries[1].Load())
	p.requireEvents(t, ctx, marks, recordings, fence)
	harness.Check(t, p.server.Await(ctx, "/readyz"))
	logHistory(t, p.server)
	p.requireFromMemory(t, ctx, p.marks)
}

// shortly returns a context that ends soon.
func shortly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeoutCause(t.Context(), 500*time.Millisecond, errors.New("not yet"))
	t.Cleanup(cancel)
	return ctx
}

// compactedDuringRestore compacts etcd while a starting server reads its history. The server
// restarts the read at the compacted revision. A round in which the machine holds the read for
// longer than the server waits is repeated.
func (p *past) compactedDuringRestore(t *testing.T, ctx context.Context, held hold, repeats int) {
	before := p.fence(t, ctx, "before "+held.name)
	compacted := p.churn(t, ctx, 50)
	p.take(t, ctx)
	p.marks = p.marks[len(p.marks)-len(p.kinds):]
	p.churn(t, ctx, 10)
	p.server.Kill()
	held.set(true)
	began := time.Now()
	defer held.set(false)
	p.proxy.Reset()
	p.server.StartAgain("--strata-replay-revisions=200000")
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return slices.ContainsFunc(p.proxy.Ranges(), func(r *pb.RangeRequest) bool {
			return string(r.Key) == "/registry/" && !r.CountOnly
		}), errors.New("the server has listed no keys")
	}))
	harness.Check(t, p.server.Await(ctx, "/version"))
	gone := history(t, ctx, p.client, maps.prefix, before, compacted)
	compact(t, ctx, p.client, compacted)
	held.set(false)
	took := time.Since(began)
	harness.Check(t, p.server.Await(ctx, "/readyz"))
	logHistory(t, p.server)
	if repeats > 0 && took > 10*time.Second && strings.Contains(p.server.Output(), "no response from etcd for 10s") {
		t.Logf("%s was held for longer than the server waits for etcd: again", held.name)
		p.compactedDuringRestore(t, ctx, held, repeats-1)
		return
	}
	p.requireContinued(t, ctx, p.marks)
	fence := p.fence(t, ctx, "after "+held.name)
	left := history(t, ctx, p.client, maps.prefix, compacted, fence)
	record(t, ctx, p.api, maps.path, "", compacted).requireEvents(t, ctx, left)
	// History from before the compaction is dropped as soon as the server learns of the compaction.
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := listAt(ctx, p.api, maps.path, before)
		return err == nil && r.Code == http.StatusGone, fmt.Errorf("list at %d, compacted at %d: %+v, %v, want 410", before, compacted, r, err)
	}))
	// Events for resuming watches may be retained for a while.
	record(t, ctx, p.api, maps.path, "", before).requireEventsOrExpired(t, ctx, append(gone, left...))
}

// logHistory logs the server's own log messages about its history.
func logHistory(t *testing.T, s *harness.Server) {
	t.Helper()
	messages := []string{"Listed the prefix", "Restored history", "Compaction overtook the history", "History could not be restored"}
	for line := range strings.Lines(s.Output()) {
		if slices.ContainsFunc(messages, func(m string) bool { return strings.Contains(line, m) }) {
			t.Log(strings.TrimSpace(line))
		}
	}
}
