// Package etcdcluster runs an etcd of several members for tests, each in a process of its own.
// Members can be stopped, killed, paused, restarted, and partitioned from the others.
//
// The test binary of a package that imports this one also serves as the program of the members: it
// is started again for each.
package etcdcluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/test/harness"
)

// startTimeout bounds a failing start of a cluster, which takes about 2 s.
const startTimeout = 5 * time.Minute

// Cluster is an etcd of several members. Its methods may be called concurrently.
type Cluster struct {
	Members []*Member

	etcd    *harness.Etcd // all members
	initial []string      // name=URL for peers, of each member
}

// Member is a member of a cluster. harness.Etcd has the methods Stop, Kill, Pause, Continue and
// Start; Start waits for a quorum, Launch does not. URL is its client URL.
type Member struct {
	*harness.Etcd
	Dir string // data directory, the same for every start
	ID  uint64

	peers *door
}

// Start starts an empty cluster of n members that lasts as long as the environment, and returns
// when it answers reads.
func Start(t testing.TB, e *harness.Env, n int) *Cluster { return StartWithQuota(t, e, n, 0) }

// StartWithQuota is Start of a cluster that rejects writes once the database of a member exceeds
// quota bytes; 0 for etcd's default.
func StartWithQuota(t testing.TB, e *harness.Env, n int, quota int64) *Cluster {
	t.Helper()
	return start(t, e, n, itself(t), quotaFlag(quota))
}

// StartStock is StartWithQuota of a cluster of stock etcd servers of a minor version. A stopped
// member goes on as one of another version after Upgrade; see harness.StockEtcd.
func StartStock(t testing.TB, e *harness.Env, n int, quota int64, minor string) *Cluster {
	t.Helper()
	return start(t, e, n, []string{harness.StockEtcd(t, minor)}, quotaFlag(quota))
}

func quotaFlag(quota int64) string { return fmt.Sprintf("-quota-backend-bytes=%d", quota) }

// itself returns this program, and the first argument with which it is a member.
func itself(t testing.TB) []string {
	t.Helper()
	program, err := os.Executable()
	harness.Check(t, err)
	return []string{program, asMember}
}

// StartSynced is Start of a cluster whose members sync their writes to the disk; see SlowSyncs. It
// skips the test where syncs cannot be delayed.
func StartSynced(t testing.TB, e *harness.Env, n int) *Cluster {
	t.Helper()
	program := itself(t)
	if said, err := exec.Command(program[0], program[1], "-probe").CombinedOutput(); err != nil {
		testrequire.Missing(t, "seccomp", fmt.Sprintf("%v: %s", err, said))
	}
	return start(t, e, n, program, "-synced")
}

// start is Start of members that run a program, with a further flag.
func start(t testing.TB, e *harness.Env, n int, program []string, flag string) *Cluster {
	t.Helper()
	c := &Cluster{}
	var listen []string
	for i := range n {
		listen = append(listen, e.FreeURL())
		m := &Member{Dir: e.Dir("etcd"), peers: openDoor(t, e, listen[i])}
		c.initial = append(c.initial, fmt.Sprintf("member-%d=%s", i, m.peers.url))
		c.Members = append(c.Members, m)
	}
	var all []*harness.Etcd
	for i, m := range c.Members {
		m.launch(e, program, fmt.Sprintf("member-%d", i), listen[i], c.initial, flag)
		all = append(all, m.Etcd)
	}
	c.etcd = harness.Endpoints(all...)

	ctx, cancel := context.WithTimeoutCause(t.Context(), startTimeout, fmt.Errorf("not ready after %v", startTimeout))
	defer cancel()
	for _, m := range c.Members {
		harness.Check(t, m.Await(ctx))
	}
	list, err := c.Members[0].Client().MemberList(ctx)
	harness.Check(t, err)
	for _, m := range list.Members {
		for _, own := range c.Members {
			if m.PeerURLs[0] == own.peers.url {
				own.ID = m.ID
			}
		}
	}
	return c
}

// launch starts a member: a program with etcd's flags.
func (m *Member) launch(e *harness.Env, program []string, name, listen string, initial []string, flag string) {
	url := e.FreeURL()
	args := append(slices.Clone(program[1:]), "-name="+name, "-data-dir="+m.Dir, "-listen-client-urls="+url, "-advertise-client-urls="+url,
		"-listen-peer-urls="+listen, "-initial-advertise-peer-urls="+m.peers.url, "-initial-cluster="+strings.Join(initial, ","),
		fmt.Sprintf("-unsafe-no-fsync=%t", !harness.Fsync()), "-log-level=error", flag)
	m.Etcd = e.EtcdProgram(name+"-etcd", url, program[0], args...)
	m.Launch()
}

// StartLearner adds a member that does not vote, and returns when it has learned of the others.
func (c *Cluster) StartLearner(t testing.TB, ctx context.Context, e *harness.Env) *Member {
	t.Helper()
	listen, name := e.FreeURL(), "learner"
	m := &Member{Dir: e.Dir("etcd"), peers: openDoor(t, e, listen)}
	members := c.Client()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		// etcd refuses it for some seconds after its start
		added, err := members.MemberAddAsLearner(ctx, []string{m.peers.url})
		if err == nil {
			m.ID = added.Member.ID
		}
		return err == nil, err
	}))
	m.launch(e, itself(t), name, listen, append(slices.Clone(c.initial), name+"="+m.peers.url), "-initial-cluster-state=existing")
	client := m.Client()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		status, err := client.Status(ctx, m.URL)
		return err == nil && status.IsLearner && status.Leader != 0, err
	}))
	return m
}

// Etcd returns the cluster for flags and clients.
func (c *Cluster) Etcd() *harness.Etcd { return c.etcd }

// Client returns a client of all members that lasts as long as the environment.
func (c *Cluster) Client() *clientv3.Client { return c.etcd.Client() }

// Leader returns the leader, according to a member that answers.
func (c *Cluster) Leader(ctx context.Context) (leader *Member, err error) {
	err = harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		client := c.Client()
		defer client.Close()
		for _, asked := range c.Members {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			status, err := client.Status(ctx, asked.URL)
			cancel()
			if err != nil {
				continue
			}
			for _, m := range c.Members {
				if m.ID == status.Leader {
					leader = m
					return true, nil
				}
			}
		}
		return false, fmt.Errorf("no member knows a leader")
	})
	return leader, err
}

// Cut partitions a member from its peers, or ends the partition. Clients can always reach it.
// Connections stay open without traffic, as if packets were lost.
func (c *Cluster) Cut(m *Member, off bool) {
	for _, each := range c.Members {
		if each == m {
			each.peers.shutAll(off)
		} else {
			each.peers.shutFrom(m.ID, off)
		}
	}
}

// Mute makes a partition in one direction, or ends it: the member receives the messages of its
// peers, and they receive none of its own. Clients can always reach it.
func (c *Cluster) Mute(m *Member, off bool) {
	m.peers.muteAnswers(off)
	for _, each := range c.Members {
		if each != m {
			each.peers.mutePosts(m.ID, off)
		}
	}
}
