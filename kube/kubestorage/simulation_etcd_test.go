package kubestorage_test

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// simMembers is the number of members of the simulated etcd.
const simMembers = 3

// simEtcd is a simulated etcd cluster: the log that its members have agreed on, which is a store,
// and how far each member has applied it. A write is in the log at once.
type simEtcd struct {
	*memory.Store

	kv          pb.KVClient // of the log; it orders transactions
	members     [simMembers]*simMember
	leader      *simMember
	compactions []compaction
	compacted   mirror.Revision
	lineages    []lineage // before the last restore
	base        mirror.Revision
}

// simMember is one member. A member that follows applies the log at once, another one when the
// simulation decides so.
type simMember struct {
	number    int
	applied   mirror.Revision
	compacted mirror.Revision // as far as it has applied
	lags      bool
	cut       bool // it reaches no other member
}

// compaction is a compaction to rev that was requested at the revision at.
type compaction struct{ at, rev mirror.Revision }

// lineage is the history of the cluster between two restores from a backup. Revisions of different
// lineages differ: a restore raises the revision, as etcd's documentation recommends.
type lineage struct {
	base, last  mirror.Revision
	compactions []compaction    // ascending
	changes     []driver.Change // with those that made the state at base
}

func newSimEtcd() *simEtcd {
	store := memory.New()
	e := &simEtcd{Store: store, kv: podtest.NewKVClient(store), base: 1}
	for i := range e.members {
		e.members[i] = &simMember{number: i, applied: 1}
	}
	e.leader = e.members[0]
	return e
}

// lineage returns that of now.
func (e *simEtcd) lineage() lineage {
	return lineage{base: e.base, last: e.Revision(), compactions: e.compactions, changes: e.Changes("", 0)}
}

// compact compacts the cluster at rev. Members do so when they have applied the log up to here.
func (e *simEtcd) compact(rev mirror.Revision) {
	if rev > e.compacted && rev <= e.Revision() {
		e.compacted = rev
		e.compactions = append(e.compactions, compaction{e.Revision(), rev})
	}
}

// restore replaces the state by that at an earlier revision, with a raised revision.
func (e *simEtcd) restore(at mirror.Revision) {
	if at < e.compacted {
		return
	}
	keys := map[string]string{}
	if _, err := e.Store.List(context.Background(), "", at, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			keys[string(kv.Key)] = string(kv.Value)
		}
		return nil
	}); err != nil {
		return
	}
	e.lineages = append(e.lineages, e.lineage())
	e.base = (e.Revision()/1000 + 1) * 1000
	e.compacted, e.compactions = e.base, nil
	e.Store.Restore(e.base, keys)
	for _, m := range e.members {
		m.applied, m.compacted = e.base, e.base
	}
}

// apply makes a member apply the log up to rev, unless it is cut off.
func (e *simEtcd) apply(m *simMember, rev mirror.Revision) {
	if m.cut {
		return
	}
	m.applied = max(m.applied, min(rev, e.Revision()))
	for _, c := range e.compactions {
		if c.at <= m.applied {
			m.compacted = max(m.compacted, c.rev)
		}
	}
}

// follow makes all members that do not lag apply the whole log.
func (e *simEtcd) follow() {
	for _, m := range e.members {
		if !m.lags {
			e.apply(m, e.Revision())
		}
	}
}

// agrees reports whether a member reaches the leader of a majority: it can read linearizably, and
// write.
func (e *simEtcd) agrees(m *simMember) bool { return !m.cut && !e.leader.cut }

// cutOff cuts a member off from the others, or ends that: at most one is, so there is a majority.
func (e *simEtcd) cutOff(m *simMember) {
	for _, other := range e.members {
		if other.cut {
			other.cut = false
			return
		}
	}
	m.cut = true
}

// elect makes a member the leader unless it is cut off.
func (e *simEtcd) elect(m *simMember) {
	if !m.cut {
		e.leader = m
	}
}
