package kubestorage

import (
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/stratakube/strata/kube/etcdmoves"
)

// TestMoves_NeverRead_RefusesWrites checks a write while etcd does not answer, and each state of a mark afterwards.
func TestMoves_NeverRead_RefusesWrites(t *testing.T) {
	t.Parallel()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix:" + t.TempDir() + "/none"}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	m := newMoves(client, "/registry/")
	if err := m.check(t.Context(), "leases", "leases.coordination.k8s.io"); !apierrors.IsServiceUnavailable(err) {
		t.Errorf("without marks: %v, want 503", err)
	}
	for state, refused := range map[etcdmoves.State]bool{etcdmoves.Incoming: true, etcdmoves.Moving: true, etcdmoves.Moved: true, "": false} {
		marks := map[string]etcdmoves.Mark{"pods": {State: etcdmoves.Moved}}
		if state != "" {
			marks["leases"] = etcdmoves.Mark{State: state}
		}
		m.marks.Store(&marks)
		if err := m.check(t.Context(), "leases", "leases.coordination.k8s.io"); apierrors.IsServiceUnavailable(err) != refused {
			t.Errorf("mark %q: %v, want a refusal: %t", state, err, refused)
		}
	}
}
