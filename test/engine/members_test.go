//go:build unix

package enginetest

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// TestFeed_MemberStopped_ContinuesOnAnother: each of three members is stopped in turn, with its
// connections left open. The feed continues with another member, and the other members serve
// history.
func TestFeed_MemberStopped_ContinuesOnAnother(t *testing.T) {
	t.Parallel()
	members := startEtcds(t, 3)
	for _, e := range members { // also if the test fails early
		t.Cleanup(func() { _ = e.process.Signal(syscall.SIGCONT) })
	}
	var endpoints []string
	for _, e := range members {
		endpoints = append(endpoints, e.client.Endpoints()...)
	}
	// As in API servers, the client closes a connection that has not answered for 40 s. Without it,
	// all attempts of a list may be sent to the stopped member.
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: patience, Logger: zap.NewNop(),
		DialKeepAliveTime: 30 * time.Second, DialKeepAliveTimeout: 10 * time.Second})
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	const prefix = "/registry/"
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	m := newMirror(t, client, prefix, nil)
	claim(t, m, prefix+"a/")
	catchUp(t, m)
	for i, e := range members {
		testcheck.NoError(t, e.process.Signal(syscall.SIGSTOP))
		// The others may have to elect a leader first.
		other := members[(i+1)%len(members)].client
		var rev mirror.Revision
		for rev == 0 {
			ctx, cancel := context.WithTimeout(contextFor(t), time.Second)
			if resp, err := other.Put(ctx, prefix+"a/x", fmt.Sprint(i)); err == nil {
				rev = resp.Header.Revision
			}
			cancel()
		}
		began := time.Now()
		testcheck.NoError(t, m.Wait(contextFor(t), rev))
		caught := time.Since(began)

		began = time.Now()
		// A page is requested at most five times, with a doubled timeout each time (etcdsource);
		// other requests may make the client choose the stopped member again.
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
		_, err := s.List(ctx, prefix, 0, func([]driver.KV) error { return nil })
		cancel()
		testcheck.NoError(t, err)
		listed := time.Since(began)
		began = time.Now()
		now := header(t, etcdsource.New(other, t.Name(), prefix+"probe"))
		oldest, err := s.Oldest(contextFor(t), prefix, now, ample)
		testcheck.NoError(t, err)
		n := len(replayed(t, s, prefix, driver.Header{ClusterID: now.ClusterID, Revision: oldest}, now.Revision))
		if n <= i {
			t.Errorf("%d events replayed", n)
		}
		t.Logf("member %d is stopped: the feed is in step after %v, a list takes %v, history %v", i,
			caught.Round(time.Millisecond), listed.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
		testcheck.NoError(t, e.process.Signal(syscall.SIGCONT))
		catchUp(t, m)
	}
	// The feed was on one of the stopped members. It left it by its silence, or when the client
	// lost the connection first.
	st := m.Stats()
	t.Logf("%d of %d feeds were silent", st.SilentFeeds, st.Reconnects)
	if st.Reconnects == 0 || st.Relists != 0 || st.Divergences != 0 {
		t.Errorf("%d reconnects, %d relists, %d divergences", st.Reconnects, st.Relists, st.Divergences)
	}
}
