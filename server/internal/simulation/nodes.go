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

	// kwokAnnotation, with the value kwokFake, marks nodes that kwok manages, as in kwok's
	// documentation. Nodes that users create with it are simulated too.
	kwokAnnotation = "kwok.x-k8s.io/node"
	kwokFake       = "fake"

	// nodeWriters is the number of nodes that are created or deleted at once.
	nodeWriters = 16

	// podsPerNode is the kubelet's default. The pods of a node have a /25.
	podsPerNode = 110

	// kubeletPort is the port of kubelets, which do not exist: no program may listen on it without
	// privileges. With 0, the API server would connect to its default, that of real kubelets.
	kubeletPort = 1
)

// Network has the addresses of all simulated nodes and their pods. RFC 2544 reserves it for tests,
// so that no host has one of them.
//
//	198.18.0.128 to 198.19.244.127   pods: node i, from 1 to MaxNodes, has the i-th /25 after podNetwork
//	198.19.248.0/22                  pods of nodes of users (defaultPodCIDR)
//	198.19.252.1 to 198.19.255.232   node i has the i-th address after nodeNetwork
var (
	Network     = netip.MustParsePrefix("198.18.0.0/15")
	nodeNetwork = netip.MustParseAddr("198.19.252.0")
	podNetwork  = netip.MustParseAddr("198.18.0.0")
)

// nodeName returns the name of node i. Its width does not depend on the number of nodes, so that a
// restart with more nodes adds some.
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
	podCIDR := netip.PrefixFrom(plus(podNetwork, i<<7), 25).String()
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
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: kubeletPort}},
		},
	}
}

// plus returns the IPv4 address that is n after addr.
func plus(addr netip.Addr, n int) netip.Addr {
	bytes := addr.As4()
	binary.BigEndian.PutUint32(bytes[:], binary.BigEndian.Uint32(bytes[:])+uint32(n))
	return netip.AddrFrom4(bytes)
}

// adjustNodes creates the missing ones of nodes 1 to n, and deletes all other nodes with
// simulatedLabel. Existing ones remain as they are, except for those of an earlier version with
// other addresses, which are created again. After an error, a second call continues, except after
// errForeignNode.
func adjustNodes(ctx context.Context, nodes corev1client.NodeInterface, n int) error {
	list, err := nodes.List(ctx, metav1.ListOptions{LabelSelector: simulatedLabel})
	if err != nil {
		return err
	}
	surplus := map[string]*corev1.Node{}
	for i := range list.Items {
		surplus[list.Items[i].Name] = &list.Items[i]
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(nodeWriters)
	for i := 1; i <= n; i++ {
		node := newNode(i)
		existing := surplus[node.Name]
		delete(surplus, node.Name)
		if existing != nil && hasAddressesOf(existing, node) {
			continue
		}
		group.Go(func() error {
			if existing != nil {
				if err := nodes.Delete(ctx, node.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
					return err
				}
			}
			_, err := nodes.Create(ctx, node, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("%w: %s; delete it, or start without --nodes", errForeignNode, node.Name)
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

// hasAddressesOf reports whether a node has the range of pods and the port of the kubelet of
// another one. Both cannot change later.
func hasAddressesOf(node, other *corev1.Node) bool {
	return node.Spec.PodCIDR == other.Spec.PodCIDR && node.Status.DaemonEndpoints == other.Status.DaemonEndpoints
}
