package replica

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/server/internal/apiserver"
)

// statusTimeout bounds the request for the status of a member; members answer within milliseconds.
const statusTimeout = 5 * time.Second

// checkMember returns an error if the only server of the list is a learner, which refuses watches
// and linearizable reads. With several servers etcd's client avoids learners, and nothing is
// checked. A member that does not tell its status is accepted, and so is one behind an egress
// selector.
func checkMember(t storagebackend.TransportConfig) error {
	if len(t.ServerList) != 1 || t.EgressLookup != nil {
		return nil
	}
	endpoint := t.ServerList[0]
	tlsConfig, err := apiserver.EtcdTLS(t)
	if err != nil {
		return err
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: t.ServerList, TLS: tlsConfig, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), statusTimeout)
	defer cancel()
	status, err := client.Status(ctx, endpoint)
	if err == nil && status.IsLearner || err != nil && strings.Contains(err.Error(), rpctypes.ErrorDesc(rpctypes.ErrGRPCNotSupportedForLearner)) {
		return fmt.Errorf("etcd at %s is a learner, which refuses watches and linearizable reads: promote it (etcdctl member promote ID), "+
			"or name a member that votes with --read-from or --etcd-servers", endpoint)
	}
	return nil
}
