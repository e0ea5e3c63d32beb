package apiserver

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/auth/rbac/validation"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// bootstrapObjects returns the data of all objects that the two hooks create, by kind, namespace
// and name, without the metadata that differs between clusters.
func (s *server) bootstrapObjects(t *testing.T, ctx context.Context) map[string]any {
	t.Helper()
	objects := map[string]any{}
	keep := func(kind string, meta metav1.ObjectMeta, data ...any) {
		objects[kind+" "+meta.Namespace+"/"+meta.Name] = append([]any{meta.Labels, meta.Annotations}, data...)
	}
	all := metav1.ListOptions{}
	clusterRoles, err := s.client.RbacV1().ClusterRoles().List(ctx, all)
	testcheck.NoError(t, err)
	for _, o := range clusterRoles.Items {
		keep("ClusterRole", o.ObjectMeta, o.Rules, o.AggregationRule)
	}
	clusterBindings, err := s.client.RbacV1().ClusterRoleBindings().List(ctx, all)
	testcheck.NoError(t, err)
	for _, o := range clusterBindings.Items {
		keep("ClusterRoleBinding", o.ObjectMeta, o.RoleRef, o.Subjects)
	}
	roles, err := s.client.RbacV1().Roles("").List(ctx, all)
	testcheck.NoError(t, err)
	for _, o := range roles.Items {
		keep("Role", o.ObjectMeta, o.Rules)
	}
	bindings, err := s.client.RbacV1().RoleBindings("").List(ctx, all)
	testcheck.NoError(t, err)
	for _, o := range bindings.Items {
		keep("RoleBinding", o.ObjectMeta, o.RoleRef, o.Subjects)
	}
	classes, err := s.client.SchedulingV1().PriorityClasses().List(ctx, all)
	testcheck.NoError(t, err)
	for _, o := range classes.Items {
		keep("PriorityClass", o.ObjectMeta, o.Value, o.GlobalDefault, o.Description, o.PreemptionPolicy)
	}
	return objects
}

func TestBootstrap_NewCluster_EqualsUpstreams(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	want := startServer(t, startEtcd(t), "--engine=upstream").bootstrapObjects(t, ctx)
	got := startServer(t, startEtcd(t)).bootstrapObjects(t, ctx)
	if len(want) < 100 {
		t.Errorf("upstream has %d objects only", len(want))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the objects differ (-upstream +strata):\n%s", diff)
	}
}

// A server on an etcd whose bootstrap objects were changed repairs them as upstream's does: it
// restores permissions and deleted objects, and preserves additional permissions and protected
// roles.
func TestBootstrap_ChangedObjects_AreReconciled(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	etcd := startEtcd(t)
	first := startServer(t, etcd)
	roles, bindings := first.client.RbacV1().ClusterRoles(), first.client.RbacV1().ClusterRoleBindings()

	if err := roles.Delete(ctx, "system:node-proxier", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := bindings.Delete(ctx, "system:basic-user", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := first.client.SchedulingV1().PriorityClasses().Delete(ctx, "system-node-critical", metav1.DeleteOptions{}); err != nil &&
		!apierrors.IsForbidden(err) { // upstream may protect them
		t.Fatal(err)
	}
	setRules := func(name string, protect bool, more bool) {
		role, err := roles.Get(ctx, name, metav1.GetOptions{})
		testcheck.NoError(t, err)
		if more {
			extra := role.Rules[0].DeepCopy()
			extra.Verbs = []string{"extra"}
			role.Rules = append(role.Rules, *extra)
		} else {
			role.Rules = role.Rules[1:]
		}
		if protect {
			role.Annotations["rbac.authorization.kubernetes.io/autoupdate"] = "false"
		}
		if _, err := roles.Update(ctx, role, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	setRules("system:kube-scheduler", false, false)
	setRules("system:basic-user", false, true)
	setRules("system:kube-controller-manager", true, false)
	changed := first.bootstrapObjects(t, ctx)

	want := startServer(t, startEtcd(t)).bootstrapObjects(t, ctx)
	want["ClusterRole /system:basic-user"] = changed["ClusterRole /system:basic-user"]
	want["ClusterRole /system:kube-controller-manager"] = changed["ClusterRole /system:kube-controller-manager"]
	delete(want, "ClusterRole /system:kube-scheduler") // upstream appends the missing rule

	second := startServer(t, etcd)
	got := second.bootstrapObjects(t, ctx)
	scheduler, err := second.client.RbacV1().ClusterRoles().Get(ctx, "system:kube-scheduler", metav1.GetOptions{})
	testcheck.NoError(t, err)
	for _, role := range newPolicy().clusterRoles {
		if role.Name != scheduler.Name {
			continue
		}
		if covers, missing := validation.Covers(scheduler.Rules, role.Rules); !covers {
			t.Errorf("role %s lacks %v", role.Name, missing)
		}
	}
	delete(got, "ClusterRole /system:kube-scheduler")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the objects differ (-want +got):\n%s", diff)
	}
}
