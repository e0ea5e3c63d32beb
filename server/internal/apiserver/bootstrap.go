package apiserver

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	genericapiserver "k8s.io/apiserver/pkg/server"
	schedulingclient "k8s.io/client-go/kubernetes/typed/scheduling/v1"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	rbacapi "k8s.io/kubernetes/pkg/apis/rbac/v1"
	schedulingapi "k8s.io/kubernetes/pkg/apis/scheduling/v1"
	rbac "k8s.io/kubernetes/pkg/registry/rbac/rest"
	scheduling "k8s.io/kubernetes/pkg/registry/scheduling/rest"
)

// skipBootstrapWaits replaces upstream's hooks that create the system's priority classes and RBAC's
// bootstrap policy, by hooks with the same names. Upstream's wait for a second before their first
// attempt, and are then the last ones that /readyz waits for; but the objects exist at every start
// except the first of a cluster. Ours look at once, create the objects of a new cluster, and leave
// every other state, and every error, to upstream's.
func skipBootstrapWaits(config *app.Config) {
	kube := &config.KubeAPIs.ControlPlane
	replace := func(name string, hook genericapiserver.PostStartHookFunc) {
		if kube.Generic.DisabledPostStartHooks.Has(name) {
			return
		}
		// The configurations of the chain share the set; the hook is disabled in the server of this
		// API only.
		kube.Generic.DisabledPostStartHooks = sets.NewString(kube.Generic.DisabledPostStartHooks.List()...).Insert(name)
		config.Aggregator.GenericConfig.AddPostStartHookOrDie(name, hook)
	}
	if kube.APIResourceConfigSource.ResourceEnabled(schedulingapi.SchemeGroupVersion.WithResource("priorityclasses")) {
		replace(scheduling.PostStartHookName, createPriorityClasses)
	}
	if kube.APIResourceConfigSource.ResourceEnabled(rbacapi.SchemeGroupVersion.WithResource("clusterroles")) {
		replace(rbac.PostStartHookName, createBootstrapPolicy)
	}
}

// createPriorityClasses creates the missing classes, or runs upstream's hook after an error.
func createPriorityClasses(hook genericapiserver.PostStartHookContext) error {
	client, err := schedulingclient.NewForConfig(hook.LoopbackClientConfig)
	if err != nil {
		return err
	}
	for _, class := range schedulingapi.SystemPriorityClasses() {
		_, err := client.PriorityClasses().Get(hook, class.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			_, err = client.PriorityClasses().Create(hook, class, metav1.CreateOptions{})
		}
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return scheduling.AddSystemPriorityClasses()(hook)
		}
	}
	return nil
}
