// Package clients uses a control plane of `strata up` as its users do: kubectl, informers of
// client-go and a manager of controller-runtime, the definitions of well-known projects, and
// workloads that run on simulated nodes.
//
// The tests share one control plane, each with namespaces and definitions of its own. Tests that
// read the objects of all namespaces are not parallel: they run before the parallel ones.
package clients

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/stratakube/strata/test/harness"
)

const (
	// testTimeout bounds a hanging test; most take seconds.
	testTimeout = 10 * time.Minute

	// nodes is the number of simulated nodes of the shared cluster.
	nodes = 3
)

// The shared control plane.
var (
	cluster *harness.Server
	api     *harness.API
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	harness.Main(m, func(e *harness.Env) {
		cluster = e.Up(fmt.Sprintf("--nodes=%d", nodes))
		api = cluster.API()
	})
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// user is a user of a control plane, in one namespace.
type user struct {
	t          *testing.T
	ctx        context.Context
	server     *harness.Server
	client     kubernetes.Interface // the administrator's
	namespace  string               // "" for none
	kubeconfig string
}

// newUser returns the administrator of the shared control plane in a new namespace that has its
// service account.
func newUser(t *testing.T) user {
	t.Helper()
	u := newAdmin(t, cluster)
	u.namespace = harness.Namespace(t, u.ctx, api, harness.NewName("ns"))
	u.eventually("the service account exists", func() (bool, error) {
		_, err := u.client.CoreV1().ServiceAccounts(u.namespace).Get(u.ctx, "default", metav1.GetOptions{})
		return err == nil, err
	})
	return u
}

// newAdmin returns the administrator of server in the namespace "default".
func newAdmin(t *testing.T, server *harness.Server) user {
	t.Helper()
	client, err := kubernetes.NewForConfig(server.Config)
	harness.Check(t, err)
	return user{t, harness.Context(t, testTimeout), server, client, "default", server.Kubeconfig}
}

// eventually waits until condition is true. An error of condition explains why it is not.
func (u user) eventually(what string, condition func() (bool, error)) {
	u.t.Helper()
	if err := harness.Poll(u.ctx, func(context.Context) (bool, error) { return condition() }); err != nil {
		u.t.Fatalf("%s: %v", what, err)
	}
}
