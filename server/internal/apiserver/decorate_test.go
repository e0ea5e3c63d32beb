package apiserver

import (
	"net"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/controlplane"
)

// TestReadDecorators_Service_GetsServerIPFamilies: the address families of a Service without
// families depend on the flags.
func TestReadDecorators_Service_GetsServerIPFamilies(t *testing.T) {
	for cidr, want := range map[string][]api.IPFamily{
		"10.0.0.0/24": {api.IPv4Protocol},
		"fd00::/112":  {api.IPv6Protocol},
	} {
		_, r, err := net.ParseCIDR(cidr)
		if err != nil {
			t.Fatal(err)
		}
		decorators, err := readDecorators(controlplane.Extra{ServiceIPRange: *r})
		if err != nil {
			t.Fatal(err)
		}
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
