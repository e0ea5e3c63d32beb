package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// fault is a fault that play injects and repairs before it returns.
type fault struct {
	name string
	play func(s *scene, ctx context.Context, rng *rand.Rand) error
}

// Faults of different lanes overlap, one of each lane: faults of etcd, and faults of API servers
// and their links to etcd.
var (
	etcdFaults = []fault{
		{"member killed", (*scene).killMember},
		{"member paused (SIGSTOP)", (*scene).pauseMember},
		{"member restarted", (*scene).restartMember},
		{"leader moved", (*scene).moveLeader},
		{"leader cut from its peers", (*scene).cutLeader},
		{"follower cut from its peers", (*scene).cutFollower},
		{"disk full", (*scene).fillDisk},
		{"compaction and defragmentation", (*scene).compactAndDefragment},
		{"compaction", (*scene).compactRecent},
	}
	replicaFaults = []fault{
		{"API server killed", (*scene).killReplica},
		{"API server stopped (SIGTERM)", (*scene).stopReplica},
		{"connections cut", (*scene).cutConnections},
		{"connections refused", (*scene).refuseConnections},
		{"connections delayed", (*scene).delayConnections},
		{"answers reordered", (*scene).reorderAnswers},
		{"one way half-open", (*scene).silenceOne},
		{"all ways half-open", (*scene).silenceAll},
		{clockSet, (*scene).setClock},
	}
)

// clockSet is the fault that needs a replica with a clock of its own.
const clockSet = "clock set"

// play plays each fault of a lane once, in an order that the seed draws, with a pause between them.
func (r *round) play(ctx context.Context, t *testing.T, lane int, faults []fault) error {
	rng := random(r.seed, 1000+lane)
	for _, i := range rng.Perm(len(faults)) {
		f := faults[i]
		if f.name == clockSet && r.clock == nil {
			continue
		}
		harness.Pause(ctx, between(rng, 200*time.Millisecond, 800*time.Millisecond))
		began := r.now()
		bound, cancel := context.WithTimeoutCause(ctx, heal, fmt.Errorf("not well after %v", heal))
		err := f.play(r.scene, bound, rng)
		cancel()
		if err != nil {
			return fmt.Errorf("%s, at %v: %w", f.name, began, err)
		}
		r.played(f.name)
		t.Logf("%6.2fs to %6.2fs  %s", began.Seconds(), r.now().Seconds(), f.name)
	}
	return nil
}

func between(rng *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(rng.Int64N(int64(most-least)))
}

// duration draws how long a fault lasts.
func duration(rng *rand.Rand) time.Duration {
	return between(rng, 300*time.Millisecond, 2500*time.Millisecond)
}

// awaitMember returns when a member answers a linearizable read.
func (s *scene) awaitMember(ctx context.Context, i int) error {
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := s.members[i].Get(ctx, "ready", clientv3.WithCountOnly())
		return err == nil, err
	})
}

func (s *scene) killMember(ctx context.Context, rng *rand.Rand) error {
	i := rng.IntN(members)
	s.etcd.Members[i].Kill()
	harness.Pause(ctx, duration(rng))
	s.etcd.Members[i].Launch()
	return s.awaitMember(ctx, i)
}

func (s *scene) pauseMember(ctx context.Context, rng *rand.Rand) error {
	i := rng.IntN(members)
	s.etcd.Members[i].Pause()
	harness.Pause(ctx, duration(rng)+time.Second)
	s.etcd.Members[i].Continue()
	return s.awaitMember(ctx, i)
}

func (s *scene) restartMember(ctx context.Context, rng *rand.Rand) error {
	i := rng.IntN(members)
	s.etcd.Members[i].Stop()
	s.etcd.Members[i].Launch()
	return s.awaitMember(ctx, i)
}

// leader returns the index of the etcd leader.
func (s *scene) leader(ctx context.Context) (i int, err error) {
	err = harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		for asked, m := range s.etcd.Members {
			status, err := s.members[asked].Status(ctx, m.URL)
			if err != nil {
				continue
			}
			for i = range s.etcd.Members {
				if s.etcd.Members[i].ID == status.Leader {
					return true, nil
				}
			}
		}
		return false, errors.New("no member knows a leader")
	})
	return i, err
}

func (s *scene) moveLeader(ctx context.Context, rng *rand.Rand) error {
	for range 3 {
		offset := 1 + rng.IntN(members-1)
		if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			leader, err := s.leader(ctx)
			if err != nil {
				return false, err
			}
			_, err = s.members[leader].MoveLeader(ctx, s.etcd.Members[(leader+offset)%members].ID)
			return err == nil, err
		}); err != nil {
			return err
		}
		harness.Pause(ctx, between(rng, 50*time.Millisecond, 300*time.Millisecond))
	}
	return nil
}

func (s *scene) cutLeader(ctx context.Context, rng *rand.Rand) error {
	leader, err := s.leader(ctx)
	if err != nil {
		return err
	}
	// the others elect a new leader after a second
	return s.cutPeers(ctx, leader, duration(rng)+2*time.Second)
}

func (s *scene) cutFollower(ctx context.Context, rng *rand.Rand) error {
	leader, err := s.leader(ctx)
	if err != nil {
		return err
	}
	return s.cutPeers(ctx, (leader+1+rng.IntN(members-1))%members, duration(rng)+time.Second)
}

func (s *scene) cutPeers(ctx context.Context, i int, d time.Duration) error {
	s.etcd.Cut(s.etcd.Members[i], true)
	harness.Pause(ctx, d)
	s.etcd.Cut(s.etcd.Members[i], false)
	return s.awaitMember(ctx, i)
}

// junk is a key that fills the disk. No API server reads it.
const junk = "junk"

// fillDisk writes until etcd rejects writes, waits for a moment, and then acts as an operator: it
// deletes the junk, compacts history, defragments each member and disarms the alarm.
func (s *scene) fillDisk(ctx context.Context, rng *rand.Rand) error {
	value := strings.Repeat("x", 1<<20)
	for {
		if _, err := s.client.Put(ctx, junk, value); errors.Is(err, rpctypes.ErrNoSpace) {
			break
		} else if err != nil && ctx.Err() != nil {
			return err
		}
	}
	harness.Pause(ctx, duration(rng))
	if err := s.again(ctx, func(ctx context.Context) error {
		alarms, err := s.client.AlarmList(ctx)
		if err == nil && (len(alarms.Alarms) == 0 || alarms.Alarms[0].Alarm != pb.AlarmType_NOSPACE) {
			err = fmt.Errorf("etcd takes no writes, and its alarms are %v", alarms.Alarms)
		}
		return err
	}); err != nil {
		return err
	}
	if err := s.again(ctx, func(ctx context.Context) error { _, err := s.client.Delete(ctx, junk); return err }); err != nil {
		return err
	}
	if err := s.compact(ctx, s.history.Through()); err != nil {
		return err
	}
	if err := s.defragment(ctx); err != nil {
		return err
	}
	return s.again(ctx, func(ctx context.Context) error {
		if _, err := s.client.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
			return err
		}
		_, err := s.client.Put(ctx, junk, "")
		return err
	})
}

// again retries f, which may fail while members are unavailable.
func (s *scene) again(ctx context.Context, f func(context.Context) error) error {
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		err := f(ctx)
		return err == nil, err
	})
}

// compact compacts etcd to a revision that the recorded history has reached.
func (s *scene) compact(ctx context.Context, revision int64) error {
	if revision <= s.compacted.Load() {
		return nil
	}
	s.compacted.Store(revision)
	return s.again(ctx, func(ctx context.Context) error {
		_, err := s.client.Compact(ctx, revision, clientv3.WithCompactPhysical())
		if errors.Is(err, rpctypes.ErrCompacted) {
			return nil // an earlier attempt has succeeded
		}
		return err
	})
}

func (s *scene) defragment(ctx context.Context) error {
	for i, m := range s.etcd.Members {
		if err := s.again(ctx, func(ctx context.Context) error { _, err := s.members[i].Defragment(ctx, m.URL); return err }); err != nil {
			return err
		}
	}
	return nil
}

func (s *scene) compactRecent(ctx context.Context, rng *rand.Rand) error {
	for range 3 {
		if err := s.compact(ctx, s.history.Through()-rng.Int64N(100)); err != nil {
			return err
		}
		harness.Pause(ctx, duration(rng)/2)
	}
	return nil
}

func (s *scene) compactAndDefragment(ctx context.Context, rng *rand.Rand) error {
	if err := s.compact(ctx, s.history.Through()-rng.Int64N(100)); err != nil {
		return err
	}
	return s.defragment(ctx)
}

func (s *scene) drawReplica(rng *rand.Rand) *replica { return s.replicas[rng.IntN(len(s.replicas))] }

func (s *scene) killReplica(ctx context.Context, rng *rand.Rand) error {
	r := s.drawReplica(rng)
	r.boots.Add(1)
	r.server.Kill()
	harness.Pause(ctx, duration(rng)/4)
	return s.startReplica(ctx, r)
}

func (s *scene) stopReplica(ctx context.Context, rng *rand.Rand) error {
	r := s.drawReplica(rng)
	r.boots.Add(1)
	if err := r.server.Stop(); err != nil {
		return err
	}
	harness.Pause(ctx, duration(rng)/4)
	return s.startReplica(ctx, r)
}

// startReplica returns when an API server that has ended is ready again.
func (s *scene) startReplica(ctx context.Context, r *replica) error {
	for {
		r.server.StartAgain()
		err := r.server.Await(ctx, "/readyz")
		if err == nil {
			r.boots.Add(1)
			return nil
		}
		// A server without an answer from etcd at its start exits, and is restarted by its
		// supervisor.
		select {
		case <-r.server.Done():
			if _, err := r.server.Wait(ctx); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

func (s *scene) cutConnections(ctx context.Context, rng *rand.Rand) error {
	for range 2 + rng.IntN(4) {
		r := s.drawReplica(rng)
		for _, l := range r.links {
			l.Reset()
		}
		harness.Pause(ctx, between(rng, 10*time.Millisecond, 400*time.Millisecond))
	}
	return nil
}

func (s *scene) refuseConnections(ctx context.Context, rng *rand.Rand) error {
	r := s.drawReplica(rng)
	for _, l := range r.links {
		l.Refuse(true)
		defer l.Refuse(false)
	}
	harness.Pause(ctx, duration(rng))
	return nil
}

func (s *scene) delayConnections(ctx context.Context, rng *rand.Rand) error {
	for _, r := range s.replicas {
		for _, l := range r.links {
			l.Delay(between(rng, 10*time.Millisecond, 150*time.Millisecond))
			defer l.Delay(0)
		}
	}
	harness.Pause(ctx, duration(rng)+time.Second)
	return nil
}

// reorderAnswers delays each answer of etcd by a different time, so that answers to different
// requests and watch responses arrive out of order.
func (s *scene) reorderAnswers(ctx context.Context, rng *rand.Rand) error {
	r := s.drawReplica(rng)
	for _, p := range r.detour {
		p.Delay(func(method string) time.Duration {
			if rand.IntN(3) > 0 { // concurrent callers: their order does not follow from the seed
				return 0
			}
			return time.Duration(rand.Int64N(int64(60 * time.Millisecond)))
		})
		defer p.Delay(nil)
	}
	if err := s.throughDetour(r, true); err != nil {
		return err
	}
	harness.Pause(ctx, duration(rng)+time.Second)
	return s.throughDetour(r, false)
}

func (s *scene) silenceOne(ctx context.Context, rng *rand.Rand) error {
	r := s.drawReplica(rng)
	l := r.links[rng.IntN(len(r.links))]
	l.Silence(true)
	defer l.Silence(false)
	// a silent feed is detected after two and a half
	harness.Pause(ctx, duration(rng)+2*time.Second)
	return nil
}

func (s *scene) silenceAll(ctx context.Context, rng *rand.Rand) error {
	r := s.drawReplica(rng)
	for _, l := range r.links {
		l.Silence(true)
		defer l.Silence(false)
	}
	harness.Pause(ctx, duration(rng)+time.Second)
	return nil
}

// setClock sets the wall clock of a replica forward and back, within the validity of the
// certificates that it issues for itself.
func (s *scene) setClock(ctx context.Context, rng *rand.Rand) error {
	for range 4 {
		s.clock.Shift(ahead + between(rng, -40*time.Minute, 40*time.Minute))
		harness.Pause(ctx, between(rng, 100*time.Millisecond, 600*time.Millisecond))
	}
	return nil
}
