package apiserver

import (
	"errors"
	"slices"

	"golang.org/x/sync/errgroup"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/kubernetes"
	schedulingclient "k8s.io/client-go/kubernetes/typed/scheduling/v1"
	"k8s.io/component-helpers/auth/rbac/reconciliation"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	rbacapi "k8s.io/kubernetes/pkg/apis/rbac/v1"
	schedulingapi "k8s.io/kubernetes/pkg/apis/scheduling/v1"
	rbac "k8s.io/kubernetes/pkg/registry/rbac/rest"
	scheduling "k8s.io/kubernetes/pkg/registry/scheduling/rest"
	"k8s.io/kubernetes/plugin/pkg/auth/authorizer/rbac/bootstrappolicy"
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

// policyWriters is the number of objects of the bootstrap policy that are written at once. The
// about 140 writes of a new cluster then share fsyncs of etcd. On two processors the first start
// took 1.6 to 2.1 s with 24, and 2.0 to 2.4 s with 8.
const policyWriters = 24

// errPolicyDiffers means that an object of the bootstrap policy has to be created or updated.
var errPolicyDiffers = errors.New("bootstrap policy differs")

// createBootstrapPolicy creates the roles and bindings of a cluster without any, and does nothing
// if all of the bootstrap policy exists. In every other case, and after an error, it runs
// upstream's hook, which updates and migrates objects, and retries.
func createBootstrapPolicy(hook genericapiserver.PostStartHookContext) error {
	if err := newPolicy().create(hook); err != nil {
		klog.V(2).InfoS("Reconciling the bootstrap policy of RBAC", "reason", err)
		_, reconcile, err := rbac.RESTStorageProvider{}.PostStartHook()
		if err != nil {
			return err
		}
		return reconcile(hook)
	}
	return nil
}

// policy is RBAC's bootstrap policy.
type policy struct {
	clusterRoles        []rbacv1.ClusterRole
	clusterRoleBindings []rbacv1.ClusterRoleBinding
	roles               []rbacv1.Role
	roleBindings        []rbacv1.RoleBinding
}

func newPolicy() policy {
	p := policy{
		clusterRoles:        slices.Concat(bootstrappolicy.ClusterRoles(), bootstrappolicy.ControllerRoles()),
		clusterRoleBindings: slices.Concat(bootstrappolicy.ClusterRoleBindings(), bootstrappolicy.ControllerRoleBindings()),
	}
	for _, roles := range bootstrappolicy.NamespaceRoles() {
		p.roles = append(p.roles, roles...)
	}
	for _, bindings := range bootstrappolicy.NamespaceRoleBindings() {
		p.roleBindings = append(p.roleBindings, bindings...)
	}
	return p
}

// create creates the policy in a cluster without cluster roles and bindings. In any other cluster
// it compares only, and returns errPolicyDiffers if an object is missing or would be updated.
func (p policy) create(hook genericapiserver.PostStartHookContext) error {
	client, err := kubernetes.NewForConfig(hook.LoopbackClientConfig)
	if err != nil {
		return err
	}
	roles, err := client.RbacV1().ClusterRoles().List(hook, metav1.ListOptions{})
	if err != nil {
		return err
	}
	bindings, err := client.RbacV1().ClusterRoleBindings().List(hook, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(roles.Items) == 0 && len(bindings.Items) == 0 {
		return p.reconcile(client, modifiers{
			confirm: true,
			role:    reconciliation.ClusterRoleModifier{Client: client.RbacV1().ClusterRoles()},
			binding: reconciliation.ClusterRoleBindingClientAdapter{Client: client.RbacV1().ClusterRoleBindings()},
		})
	}
	return p.reconcile(client, modifiers{role: listedRoles(roles.Items), binding: listedBindings(bindings.Items)})
}

// modifiers read and write the cluster's roles and bindings.
type modifiers struct {
	confirm bool // false for a comparison, without writes
	role    reconciliation.RuleOwnerModifier
	binding reconciliation.RoleBindingModifier
}

// reconcile creates the objects of the policy with m, or compares them.
func (p policy) reconcile(client kubernetes.Interface, m modifiers) error {
	var group errgroup.Group
	group.SetLimit(policyWriters)
	role := func(owner reconciliation.RuleOwner, modifier reconciliation.RuleOwnerModifier) {
		group.Go(func() error {
			o := reconciliation.ReconcileRoleOptions{Role: owner, Client: modifier, Confirm: m.confirm}
			result, err := o.Run()
			if err == nil && !m.confirm && result.Operation != reconciliation.ReconcileNone {
				return errPolicyDiffers
			}
			return err
		})
	}
	binding := func(binding reconciliation.RoleBinding, modifier reconciliation.RoleBindingModifier) {
		group.Go(func() error {
			o := reconciliation.ReconcileRoleBindingOptions{RoleBinding: binding, Client: modifier, Confirm: m.confirm}
			result, err := o.Run()
			if err == nil && !m.confirm && result.Operation != reconciliation.ReconcileNone {
				return errPolicyDiffers
			}
			return err
		})
	}
	for i := range p.clusterRoles {
		role(reconciliation.ClusterRoleRuleOwner{ClusterRole: &p.clusterRoles[i]}, m.role)
	}
	for i := range p.clusterRoleBindings {
		binding(reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: &p.clusterRoleBindings[i]}, m.binding)
	}
	api := client.RbacV1()
	for i := range p.roles {
		role(reconciliation.RoleRuleOwner{Role: &p.roles[i]},
			reconciliation.RoleModifier{Client: api, NamespaceClient: client.CoreV1().Namespaces()})
	}
	for i := range p.roleBindings {
		binding(reconciliation.RoleBindingAdapter{RoleBinding: &p.roleBindings[i]},
			reconciliation.RoleBindingClientAdapter{Client: api, NamespaceClient: client.CoreV1().Namespaces()})
	}
	return group.Wait()
}

// listedRoles reads cluster roles from a list. It cannot write.
type listedRoles []rbacv1.ClusterRole

func (l listedRoles) Get(_, name string) (reconciliation.RuleOwner, error) {
	i := slices.IndexFunc(l, func(role rbacv1.ClusterRole) bool { return role.Name == name })
	if i < 0 {
		return nil, apierrors.NewNotFound(rbacv1.Resource("clusterroles"), name)
	}
	return reconciliation.ClusterRoleRuleOwner{ClusterRole: &l[i]}, nil
}

func (listedRoles) Create(reconciliation.RuleOwner) (reconciliation.RuleOwner, error) {
	return nil, errPolicyDiffers
}

func (listedRoles) Update(reconciliation.RuleOwner) (reconciliation.RuleOwner, error) {
	return nil, errPolicyDiffers
}

// listedBindings reads cluster role bindings from a list. It cannot write.
type listedBindings []rbacv1.ClusterRoleBinding

func (l listedBindings) Get(_, name string) (reconciliation.RoleBinding, error) {
	i := slices.IndexFunc(l, func(binding rbacv1.ClusterRoleBinding) bool { return binding.Name == name })
	if i < 0 {
		return nil, apierrors.NewNotFound(rbacv1.Resource("clusterrolebindings"), name)
	}
	return reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: &l[i]}, nil
}

func (listedBindings) Delete(string, string, types.UID) error { return errPolicyDiffers }

func (listedBindings) Create(reconciliation.RoleBinding) (reconciliation.RoleBinding, error) {
	return nil, errPolicyDiffers
}

func (listedBindings) Update(reconciliation.RoleBinding) (reconciliation.RoleBinding, error) {
	return nil, errPolicyDiffers
}
