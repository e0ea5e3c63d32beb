package simulation

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
)

const (
	// simulatedLabel marks the nodes that this package creates and removes.
	simulatedLabel = "strata/simulated-node"

	// kwokAnnotation, with the value kwokFake, marks nodes that kwok manages, as in kwok's documentation. Nodes that users create with it
	// are simulated too.
	kwokAnnotation = "kwok.x-k8s.io/node"
	kwokFake       = "fake"

	// nodeWriters is the number of nodes that are created or deleted at once.
	nodeWriters = 16

	// podsPerNode is the kubelet's default. The pods of a node have a /24.
	podsPerNode = 110
)

// The addresses of node i, from 1 to MaxNodes, are i after nodeNetwork; those of its pods are the i-th /24 after podNetwork. Neither
// overlaps with the range of services.
var (
	nodeNetwork = netip.MustParseAddr("172.16.0.0")
	podNetwork  = netip.MustParseAddr("10.128.0.0")
)

// nodeName returns the name of node i. Its width does not depend on the number of nodes, so that a restart with more nodes adds some.
func nodeName(i int) string { return fmt.Sprintf("node-%04d", i) }

// errForeignNode means that a node has the name of a simulated one, and not its label.
var errForeignNode = errors.New("a node exists that is not a simulated one")

// newNode returns node i as a kubelet would register it, without conditions.
func newNode(i int) *corev1.Node {
	name := nodeName(i)
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("8"),
		corev1.ResourceMemory:           resource.MustParse("32Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("100Gi"),
		corev1.ResourcePods:             *resource.NewQuantity(podsPerNode, resource.DecimalSI),
	}
	podCIDR := netip.PrefixFrom(plus(podNetwork, i<<8), 24).String()
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				corev1.LabelHostname:     name,
				corev1.LabelOSStable:     "linux",
				corev1.LabelArchStable:   "amd64",
				corev1.LabelTopologyZone: "zone-" + strconv.Itoa(1+(i-1)%3),
				simulatedLabel:           "true",
			},
			Annotations: map[string]string{kwokAnnotation: kwokFake},
		},
		Spec: corev1.NodeSpec{PodCIDR: podCIDR, PodCIDRs: []string{podCIDR}},
		Status: corev1.NodeStatus{
			Capacity:    capacity,
			Allocatable: capacity,
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: plus(nodeNetwork, i).String()},
				{Type: corev1.NodeHostName, Address: name},
			},
		},
	}
}

// plus returns the IPv4 address that is n after addr.
func plus(addr netip.Addr, n int) netip.Addr {
	bytes := addr.As4()
	binary.BigEndian.PutUint32(bytes[:], binary.BigEndian.Uint32(bytes[:])+uint32(n))
	return netip.AddrFrom4(bytes)
}

// adjustNodes creates the missing ones of nodes 1 to n, and deletes all other nodes with simulatedLabel. Existing ones remain as they
// are. After an error, a second call continues, except after errForeignNode.
func adjustNodes(ctx context.Context, nodes corev1client.NodeInterface, n int) error {
	list, err := nodes.List(ctx, metav1.ListOptions{LabelSelector: simulatedLabel})
	if err != nil {
		return err
	}
	surplus := map[string]bool{}
	for i := range list.Items {
		surplus[list.Items[i].Name] = true
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(nodeWriters)
	for i := 1; i <= n; i++ {
		name := nodeName(i)
		if surplus[name] {
			delete(surplus, name)
			continue
		}
		group.Go(func() error {
			_, err := nodes.Create(ctx, newNode(i), metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("%w: %s; delete it, or start without --nodes", errForeignNode, name)
			}
			return err
		})
	}
	for name := range surplus {
		group.Go(func() error {
			if err := nodes.Delete(ctx, name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
				return err
			}
			return nil
		})
	}
	return group.Wait()
}
