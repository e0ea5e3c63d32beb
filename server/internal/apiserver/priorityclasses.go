package apiserver

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	genericapiserver "k8s.io/apiserver/pkg/server"
	schedulingclient "k8s.io/client-go/kubernetes/typed/scheduling/v1"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	schedulingapi "k8s.io/kubernetes/pkg/apis/scheduling/v1"
	scheduling "k8s.io/kubernetes/pkg/registry/scheduling/rest"
)

// skipPriorityClassWait replaces upstream's hook that creates the system's priority classes, by one with the same name. Upstream's waits
// for a second before its first attempt, and is then the last one that /readyz waits for; but the classes exist at every start except
// the first of a cluster.
func skipPriorityClassWait(config *app.Config) {
	kube := &config.KubeAPIs.ControlPlane
	if !kube.APIResourceConfigSource.ResourceEnabled(schedulingapi.SchemeGroupVersion.WithResource("priorityclasses")) {
		return
	}
	// The configurations of the chain share the set; the hook is disabled in the server of this API only.
	kube.Generic.DisabledPostStartHooks = sets.NewString(kube.Generic.DisabledPostStartHooks.List()...).Insert(scheduling.PostStartHookName)
	config.Aggregator.GenericConfig.AddPostStartHookOrDie(scheduling.PostStartHookName, createPriorityClasses)
}

// createPriorityClasses runs upstream's hook unless all classes exist.
func createPriorityClasses(hook genericapiserver.PostStartHookContext) error {
	client, err := schedulingclient.NewForConfig(hook.LoopbackClientConfig)
	if err != nil {
		return err
	}
	for _, class := range schedulingapi.SystemPriorityClasses() {
		if _, err := client.PriorityClasses().Get(hook, class.Name, metav1.GetOptions{}); err != nil {
			return scheduling.AddSystemPriorityClasses()(hook)
		}
	}
	return nil
}
