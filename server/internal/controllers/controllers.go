// Package controllers runs a selection of kube-controller-manager's controllers in this process, as
// ordinary API clients.
package controllers

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"
	genericcontrollermanager "k8s.io/controller-manager/app"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app/options"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"

	"github.com/stratakube/strata/server/internal/component"
)

const (
	// DefaultName stands for all of Default in a list of controllers.
	DefaultName = "default"

	// NoneName, alone in a list of controllers, stands for the empty list.
	NoneName = "none"

	// The controllers call a server on the same machine, which priority and fairness protects.
	// Upstream's limit of 20 requests/s would only delay the deletion of a namespace by seconds:
	// its controller sends a request for each of about 60 resources.
	clientQPS   = 500
	clientBurst = 1000
)

// Default are the controllers that users of workloads depend on: without them, namespaces and
// objects with a finalizer or an owner would never be deleted, new namespaces would lack the
// objects that pods need, and a Deployment would have no pods. The others need a cloud, volumes or
// metrics, or serve nodes that join; they may be added by name.
var Default = []string{
	names.DeploymentController,
	names.ReplicaSetController,
	names.ReplicationControllerController,
	names.StatefulSetController,
	names.DaemonSetController,
	names.JobController,
	names.CronJobController,
	names.EndpointsController,
	names.EndpointSliceController,
	names.EndpointSliceMirroringController, // slices of Endpoints that users write
	names.DisruptionController,             // the status of PodDisruptionBudgets
	names.NodeLifecycleController,          // taints of nodes that are not ready
	names.TaintEvictionController,          // deletes the pods of such nodes
	// deletes the pods of nodes that no longer exist
	names.PodGarbageCollectorController,
	names.NamespaceController,           // ends the deletion of namespaces
	names.GarbageCollectorController,    // deletes the dependents of a deleted owner
	names.ServiceAccountController,      // the account "default" in each namespace
	names.ServiceAccountTokenController, // fills Secrets of type service-account-token
	// the ConfigMap kube-root-ca.crt in each namespace
	names.RootCACertificatePublisherController,
	// admin, edit and view include aggregated roles
	names.ClusterRoleAggregationController,
	names.ResourceQuotaController,    // counts the resources limited by quotas
	names.TTLAfterFinishedController, // deletes finished Jobs
	// removes the finalizer that admission adds to claims,
	names.PersistentVolumeClaimProtectionController,
	names.PersistentVolumeProtectionController,       // to volumes,
	names.VolumeAttributesClassProtectionController,  // and to volume attribute classes
	names.ValidatingAdmissionPolicyStatusController,  // type-checks admission policies
	names.LegacyServiceAccountTokenCleanerController, // deletes token Secrets unused for a year
	names.CertificateSigningRequestCleanerController, // deletes old certificate requests
	// makes additional service address ranges ready
	names.ServiceCIDRController,
}

// Others returns the names of the controllers that are not in Default, sorted.
func Others() []string {
	others := slices.DeleteFunc(app.KnownControllers(), func(name string) bool { return slices.Contains(Default, name) })
	slices.Sort(others)
	return others
}

// Options configures Run: the controllers and their identity.
type Options struct {
	// Controllers is a list that Resolve returned.
	Controllers []string
	// Kubeconfig is the path of a kubeconfig whose user is system:kube-controller-manager. With it,
	// each controller gets its own service account, with the role that RBAC's bootstrap policy
	// assigns to that controller.
	Kubeconfig string
	// ServiceAccountKey is the path of the private key that signs the tokens in Secrets of type
	// service-account-token.
	ServiceAccountKey string
	// RootCA is the path of the certificates that pods verify the API server with.
	RootCA string
}

// Resolve converts a list like that of kube-controller-manager's --controllers into full names:
// "default" stands for Default, "*" for all controllers enabled by default upstream, "-name"
// excludes one, and "none" alone stands for no controller. Short names ("deployment") are accepted
// too.
func Resolve(list []string) ([]string, error) {
	if len(list) == 1 && list[0] == NoneName {
		return nil, nil
	}
	known := app.KnownControllers()
	aliases := app.ControllerAliases()
	var resolved []string
	for _, entry := range list {
		name, leaveOut := strings.CutPrefix(strings.TrimSpace(entry), "-")
		switch {
		case name == "*" && !leaveOut:
			resolved = append(resolved, "*")
			continue
		case name == DefaultName && !leaveOut:
			resolved = append(resolved, Default...)
			continue
		}
		if full, ok := aliases[name]; ok {
			name = full
		}
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("unknown controller %q", name)
		}
		if leaveOut {
			// Upstream takes the first entry that names a controller, and "default" may name this
			// one already.
			resolved = append(slices.DeleteFunc(resolved, func(n string) bool { return n == name }), "-"+name)
		} else {
			resolved = append(resolved, name)
		}
	}
	return resolved, nil
}

// Enabled reports whether a list returned by Resolve enables the controller with this full name.
func Enabled(list []string, name string) bool {
	return genericcontrollermanager.IsControllerEnabled(name, sets.NewString(app.ControllersDisabledByDefault()...), list)
}

// Run runs the controllers until ctx is cancelled and all of them have ended, which takes 10 s at
// most, and while they are built as long as the request in progress; then it returns nil. The API
// server must be ready. If it runs in this process, it must have been started before: feature gates
// are shared, and Run does not set them. The controllers log errors only, unless klog's verbosity
// is 1 or more.
func Run(ctx context.Context, o Options) error {
	ctx = klog.NewContext(ctx, component.ErrorLogger())
	s, err := options.NewKubeControllerManagerOptions()
	if err != nil {
		return err
	}
	s.Generic.ClientConnection.Kubeconfig = o.Kubeconfig
	s.Generic.ClientConnection.QPS = clientQPS
	s.Generic.ClientConnection.Burst = clientBurst
	s.Generic.Controllers = o.Controllers
	s.Generic.LeaderElection.LeaderElect = false // this etcd has no other control plane
	s.KubeCloudShared.UseServiceAccountCredentials = true
	s.SecureServing.BindPort = 0 // metrics and health are served by the process
	s.SAController.RootCAFile = o.RootCA
	if Enabled(o.Controllers, names.ServiceAccountTokenController) {
		// without it upstream skips this controller
		s.SAController.ServiceAccountKeyFile = o.ServiceAccountKey
	}

	config, err := s.Config(ctx, app.KnownControllers(), app.ControllersDisabledByDefault(), app.ControllerAliases())
	if err != nil {
		return err
	}
	if err := run(ctx, config.Complete()); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}
