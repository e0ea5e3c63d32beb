package apiserver

import (
	"net"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/controlplane"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestReadDecorators_Service_GetsServerIPFamilies: the address families of a Service without
// families depend on the flags.
func TestReadDecorators_Service_GetsServerIPFamilies(t *testing.T) {
	for cidr, want := range map[string][]api.IPFamily{
		"10.0.0.0/24": {api.IPv4Protocol},
		"fd00::/112":  {api.IPv6Protocol},
	} {
		_, r, err := net.ParseCIDR(cidr)
		testcheck.NoError(t, err)
		decorators, err := readDecorators(controlplane.Extra{ServiceIPRange: *r})
		testcheck.NoError(t, err)
		s := &api.Service{Spec: api.ServiceSpec{Type: api.ServiceTypeClusterIP, ClusterIP: api.ClusterIPNone, Selector: map[string]string{"a": "b"}}}
		decorators[schema.GroupResource{Resource: "services"}](s)
		if !slices.Equal(s.Spec.IPFamilies, want) || !slices.Equal(s.Spec.ClusterIPs, []string{"None"}) {
			t.Errorf("%s: families %v, addresses %v", cidr, s.Spec.IPFamilies, s.Spec.ClusterIPs)
		}
		pvc := &api.PersistentVolumeClaim{Spec: api.PersistentVolumeClaimSpec{DataSource: &api.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "other"}}}
		decorators[schema.GroupResource{Resource: "persistentvolumeclaims"}](pvc)
		if pvc.Spec.DataSourceRef == nil || pvc.Spec.DataSourceRef.Name != "other" {
			t.Errorf("the reference is %v", pvc.Spec.DataSourceRef)
		}
	}
}
