// Package controllers runs a choice of kube-controller-manager's controllers in this process, as clients of the API like any other.
package controllers

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"
	genericcontrollermanager "k8s.io/controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app/options"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
)

const (
	// DefaultName stands for all of Default in a list of controllers.
	DefaultName = "default"

	// NoneName, alone in a list of controllers, stands for the empty one.
	NoneName = "none"

	// The controllers talk to a server on the same machine, whose priority and fairness protects it from them. Upstream's limit of 20
	// requests/s would only make a namespace take seconds to go: its controller asks for each of about 60 resources.
	clientQPS   = 500
	clientBurst = 1000
)

// Default are the controllers without which an API server feels broken: namespaces and what has a finalizer or an owner would never go, and
// new namespaces would lack what pods need. They are light; those that create pods and the like may be added by name.
var Default = []string{
	names.NamespaceController,                        // ends the deletion of namespaces
	names.GarbageCollectorController,                 // deletes what an owner leaves behind
	names.ServiceAccountController,                   // the account "default" in each namespace
	names.ServiceAccountTokenController,              // fills Secrets of type service-account-token
	names.RootCACertificatePublisherController,       // the ConfigMap kube-root-ca.crt in each namespace
	names.ClusterRoleAggregationController,           // admin, edit and view include aggregated roles
	names.ResourceQuotaController,                    // counts what quotas limit
	names.TTLAfterFinishedController,                 // deletes finished Jobs
	names.PersistentVolumeClaimProtectionController,  // removes the finalizer that admission adds to claims,
	names.PersistentVolumeProtectionController,       // to volumes,
	names.VolumeAttributesClassProtectionController,  // and to volume attribute classes
	names.ValidatingAdmissionPolicyStatusController,  // type-checks admission policies
	names.LegacyServiceAccountTokenCleanerController, // deletes token Secrets that nobody used for a year
	names.CertificateSigningRequestCleanerController, // deletes old certificate requests
	names.ServiceCIDRController,                      // makes additional service address ranges ready
}

// Others returns the names of the controllers that are not in Default, sorted.
func Others() []string {
	others := slices.DeleteFunc(app.KnownControllers(), func(name string) bool { return slices.Contains(Default, name) })
	slices.Sort(others)
	return others
}

// Options says which controllers run and as whom.
type Options struct {
	// Controllers is a list that Resolve returned.
	Controllers []string
	// Kubeconfig is the path of a kubeconfig whose user is system:kube-controller-manager. Each controller gets a service account of
	// its own from it, with the role that RBAC's bootstrap policy gives to that controller.
	Kubeconfig string
	// ServiceAccountKey is the path of the private key that signs the tokens in Secrets of type service-account-token.
	ServiceAccountKey string
	// RootCA is the path of the certificates that pods verify the API server with.
	RootCA string
}

// Resolve turns a list like that of kube-controller-manager's --controllers into one of full names: "default" stands for Default, "*" for
// all that are on by default upstream, "-name" leaves one out, "none" alone for no controller. Short names ("deployment") work too.
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
			return nil, fmt.Errorf("no controller is called %q", name)
		}
		if leaveOut {
			// Upstream takes the first entry that names a controller, and "default" may name this one already.
			resolved = append(slices.DeleteFunc(resolved, func(n string) bool { return n == name }), "-"+name)
		} else {
			resolved = append(resolved, name)
		}
	}
	return resolved, nil
}

// Enabled says whether a list that Resolve returned makes the controller with this full name run.
func Enabled(list []string, name string) bool {
	return genericcontrollermanager.IsControllerEnabled(name, sets.NewString(app.ControllersDisabledByDefault()...), list)
}

// Run runs the controllers until ctx is cancelled and all of them have ended, which takes 10 s at most; then it returns nil. The API server
// must be ready, and must have been started in this process or not at all: feature gates are shared and Run does not set them.
func Run(ctx context.Context, o Options) error {
	s, err := options.NewKubeControllerManagerOptions()
	if err != nil {
		return err
	}
	s.Generic.ClientConnection.Kubeconfig = o.Kubeconfig
	s.Generic.ClientConnection.QPS = clientQPS
	s.Generic.ClientConnection.Burst = clientBurst
	s.Generic.Controllers = o.Controllers
	s.Generic.LeaderElection.LeaderElect = false // nobody else uses this etcd
	s.KubeCloudShared.UseServiceAccountCredentials = true
	s.SecureServing.BindPort = 0 // metrics and health are those of the process
	s.SAController.RootCAFile = o.RootCA
	if Enabled(o.Controllers, names.ServiceAccountTokenController) {
		s.SAController.ServiceAccountKeyFile = o.ServiceAccountKey // without it upstream skips this controller
	}

	config, err := s.Config(ctx, app.KnownControllers(), app.ControllersDisabledByDefault(), app.ControllerAliases())
	if err != nil {
		return err
	}
	if err := app.Run(ctx, config.Complete()); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}
