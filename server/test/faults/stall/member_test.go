package stall

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// One of three members of etcd accepts connections and does not answer. Consistent reads continue through the others; only if the
// feed itself uses that member they are refused until it answers again.
func TestEtcdMember_Hanging_ReadsUseOtherMembers(t *testing.T) {
	if harness.Engine() != harness.Strata {
		t.Skip("upstream reads etcd for each request")
	}
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd := e.Etcd()
	target, err := url.Parse(etcd.URL)
	harness.Check(t, err)
	var members []*member
	var urls []string
	for range 3 {
		m := startMember(t, e, target.Host)
		members, urls = append(members, m), append(urls, "http://"+m.listener.Addr().String())
	}
	all := *etcd
	all.URL = strings.Join(urls, ",")
	api := e.APIServer(&all, "--disable-admission-plugins=ServiceAccount").API()
	_, err = api.Create(ctx, mapsPath, configMap(newest, "created"))
	harness.Check(t, err)

	const reads = 30
	good := 0
	for i, m := range members {
		m.hang(true)
		answered, longest := 0, time.Duration(0)
		for range reads {
			began := time.Now()
			r, err := api.Do(ctx, http.MethodGet, mapsPath, "", nil)
			harness.Check(t, err)
			longest = max(longest, time.Since(began))
			if r.Code == http.StatusOK {
				answered++
			} else {
				harness.Check(t, isRefused(r))
				break // the feed uses this member
			}
		}
		t.Logf("while member %d hangs %d of %d LISTs are answered, the slowest in %v", i, answered, reads, longest.Round(time.Millisecond))
		if answered == reads {
			good++
		}
		m.hang(false)
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, mapsPath, "", nil)
			return err == nil && r.Code == http.StatusOK, err
		}))
	}
	if good < len(members)-1 {
		t.Errorf("reads continue while one of %d members hangs, want %d", good, len(members)-1)
	}
}

// member is a TCP proxy of an etcd that can hang.
type member struct {
	listener net.Listener

	mu   sync.Mutex
	open chan struct{} // closed while bytes pass
}

// startMember starts a member that listens as long as the environment's processes run.
func startMember(t *testing.T, e *harness.Env, target string) *member {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Check(t, err)
	m := &member{listener: listener, open: make(chan struct{})}
	close(m.open)
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				_ = client.Close()
				continue
			}
			end := context.AfterFunc(ctx, func() { _ = client.Close(); _ = server.Close() })
			group.Go(func() { defer end(); m.pass(ctx, server, client) })
			group.Go(func() { m.pass(ctx, client, server) })
		}
	})
	e.AtEnd(func() {
		cancel()
		_ = listener.Close()
		group.Wait()
	})
	return m
}

// pass copies until one of the two ends is closed.
func (m *member) pass(ctx context.Context, to, from net.Conn) {
	defer func() { _ = to.Close(); _ = from.Close() }()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		m.mu.Lock()
		open := m.open
		m.mu.Unlock()
		select {
		case <-open:
		case <-ctx.Done():
			return
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// hang blocks or unblocks the traffic.
func (m *member) hang(on bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if on {
		m.open = make(chan struct{})
	} else {
		close(m.open)
	}
}
