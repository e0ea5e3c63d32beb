package enginetest

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testetcd"
)

// etcdProcess is a member of an etcd, in a process of its own, whose memory can be measured and
// which can be stopped.
type etcdProcess struct {
	process *testetcd.Process
	pid     int
	client  *clientv3.Client // of this member
}

// startEtcds starts a cluster of n members and returns when all serve.
func startEtcds(t testing.TB, n int) []*etcdProcess {
	t.Helper()
	var members []string
	for i := range n {
		port, err := loopback.Reserve()
		testcheck.NoError(t, err)
		t.Cleanup(func() { _ = port.Release() })
		members = append(members, fmt.Sprintf("m%d=http://%s", i, port.Address()))
	}
	out, errs := make([]*etcdProcess, n), make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		p := testetcd.NewProcess(t)
		e := p.New(t, testetcd.Config{
			Name: fmt.Sprintf("m%d", i), Cluster: strings.Join(members, ","),
			QuotaBytes: 8 << 30, MaxTxnOps: 10_000, // for fill
		})
		out[i] = &etcdProcess{process: p, pid: p.PID(), client: connect(t, e.Socket())}
		all.Go(func() { errs[i] = e.Run() })
	}
	all.Wait()
	for _, err := range errs {
		testcheck.NoError(t, err)
	}
	return out
}
