package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
)

// The minor versions of etcd between which members change.
const olderEtcd, newerEtcd = "3.6", "3.7"

// TestEtcdUpgradeAndDowngrade_UnderFaults_HistoriesAreValid replaces the members of an etcd 3.6 one
// by one by 3.7, and then, after etcd has enabled the downgrade, by 3.6 again, between the other
// faults of a round. STRATA_TEST_LONG=1.
func TestEtcdUpgradeAndDowngrade_UnderFaults_HistoriesAreValid(t *testing.T) {
	if !harness.Long() {
		t.Skip("takes minutes; STRATA_TEST_LONG=1 runs it")
	}
	ctx := newContext(t)
	harness.StockEtcd(t, newerEtcd) // is built before the faults begin
	e := harness.New(t)
	s := newSceneOn(t, ctx, e, etcdcluster.StartStock(t, e, members, quota, olderEtcd),
		"--strata-feature-gates=SealedContinueTokens=true", "--strata-continue-token-key-rotation=1m")
	step := fault{"member replaced by the other version", func(s *scene, ctx context.Context, _ *rand.Rand) error { return s.rollMember(t, ctx) }}
	s.lanes = [][]fault{slices.Concat(etcdFaults, slices.Repeat([]fault{step}, 2*members)), slices.Repeat(replicaFaults, 2)}
	s.playRounds(t, ctx)
}

// rollMember replaces the program of a member: of each in turn by the newer version, and then of
// each by the older one. A sealed continue token from before, and the revision of its list, go on
// at each replica.
func (s *scene) rollMember(t *testing.T, ctx context.Context) error {
	i, down := s.rolled%members, s.rolled/members%2 == 1
	s.rolled++
	to := newerEtcd
	if down {
		to = olderEtcd
		if err := s.enableDowngrade(ctx, i); err != nil {
			return err
		}
	}
	check, err := s.holdPage(ctx)
	if err != nil {
		return err
	}
	m := s.etcd.Members[i]
	m.Stop()
	m.Upgrade(harness.StockEtcd(t, to))
	m.Launch()
	if err := s.awaitStatus(ctx, i, func(r *clientv3.StatusResponse) bool { return strings.HasPrefix(r.Version, to+".") }); err != nil {
		return err
	}
	if err := errors.Join(s.awaitMember(ctx, i), check(ctx)); err != nil || !down || i < members-1 {
		return err
	}
	return s.awaitStatus(ctx, i, func(r *clientv3.StatusResponse) bool { return !r.DowngradeInfo.GetEnabled() })
}

// enableDowngrade returns when a member is ready to be replaced by the older version: etcd has
// changed the format of its data. Once all members are of the newer version, etcd permits that
// after some seconds.
func (s *scene) enableDowngrade(ctx context.Context, i int) error {
	if i == 0 {
		if err := s.again(ctx, func(ctx context.Context) error {
			_, err := s.client.Downgrade(ctx, clientv3.DowngradeEnable, olderEtcd+".0")
			if errors.Is(err, rpctypes.ErrDowngradeInProcess) {
				return nil // an earlier attempt has succeeded
			}
			return err
		}); err != nil {
			return fmt.Errorf("enable the downgrade: %w", err)
		}
	}
	return s.awaitStatus(ctx, i, func(r *clientv3.StatusResponse) bool { return strings.HasPrefix(r.StorageVersion, olderEtcd+".") })
}

// awaitStatus returns when the status of a member is accepted.
func (s *scene) awaitStatus(ctx context.Context, i int, accepted func(*clientv3.StatusResponse) bool) error {
	return s.again(ctx, func(ctx context.Context) error {
		r, err := s.members[i].Status(ctx, s.etcd.Members[i].URL)
		if err == nil && !accepted(r) {
			err = fmt.Errorf("member %d has version %s, storage version %s, downgrade %v", i, r.Version, r.StorageVersion, r.DowngradeInfo)
		}
		return err
	})
}

// holdPage reads the first page of a list, and gets a sealed token. The function that it returns
// reads that page again, at its revision, and the next one, at each replica, and compares them with
// etcd's state at that revision. Meanwhile etcd is not compacted.
func (s *scene) holdPage(ctx context.Context) (check func(context.Context) error, err error) {
	read := func(ctx context.Context, from *replica, query string) (page *harness.List, err error) {
		err = s.again(ctx, func(ctx context.Context) error {
			r, err := from.api.Do(ctx, http.MethodGet, resources[0].path(""), fmt.Sprintf("limit=%d&%s", allLimit, query), nil)
			if err != nil {
				return err
			}
			if r.Code == http.StatusGone {
				page = nil
				return nil
			}
			page, err = r.List()
			return err
		})
		if err == nil && page == nil {
			err = fmt.Errorf("replica %d: %s got 410, and etcd was not compacted", from.n, query)
		}
		return page, err
	}
	first, err := read(ctx, s.replicas[0], "")
	if err != nil {
		return nil, err
	}
	at, token := first.Metadata.ResourceVersion, first.Metadata.Continue
	if !strings.HasPrefix(token, "s1.") {
		return nil, fmt.Errorf("the continue token %q is not sealed", token)
	}
	revision, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, err
	}
	prefix := "/registry/" + resources[0].name + "/"
	var stored []string
	if err := s.again(ctx, func(ctx context.Context) error {
		r, err := s.client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(revision), clientv3.WithLimit(2*allLimit), clientv3.WithKeysOnly())
		if err != nil {
			return err
		}
		stored = stored[:0]
		for _, kv := range r.Kvs {
			stored = append(stored, fmt.Sprintf("%s@%d", strings.TrimPrefix(string(kv.Key), prefix), kv.ModRevision))
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		for _, from := range s.replicas {
			for query, want := range map[string][]string{
				"resourceVersionMatch=Exact&resourceVersion=" + at: stored[:allLimit],
				"continue=" + url.QueryEscape(token):               stored[allLimit:],
			} {
				page, err := read(ctx, from, query)
				if err != nil {
					return err
				}
				var got []string
				for _, o := range page.Items {
					got = append(got, o.Key()+"@"+o.Metadata.ResourceVersion)
				}
				if page.Metadata.ResourceVersion != at || !slices.Equal(got, want) {
					return fmt.Errorf("replica %d: %s is of %s: %v, and etcd had at %s: %v", from.n, query, page.Metadata.ResourceVersion, got, at, want)
				}
			}
		}
		return nil
	}, nil
}
