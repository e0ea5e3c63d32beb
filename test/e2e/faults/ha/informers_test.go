package ha

import (
	"fmt"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/informer"
)

const (
	informersPerClient = 5 // that share a connection, like those of one controller
	shards             = 20
)

// follows are the objects of the informers, in turns: a resource with many changes, whole and in
// part, and a resource without any.
func follows(i int) informer.Follow {
	maps, others := informer.Core(configMaps), informer.Core(secrets)
	shard := fmt.Sprint("shard=", i%shards)
	return [...]informer.Follow{
		{GroupVersionResource: maps, Metadata: true},
		{GroupVersionResource: maps, Metadata: true, Labels: shard},
		{GroupVersionResource: maps, Metadata: true, Labels: shard},
		{GroupVersionResource: others, Metadata: true},
		{GroupVersionResource: others, Metadata: true, Labels: shard},
	}[i%5]
}

// newFleet returns n informers, half of them at each balancer.
func (s *scene) newFleet(t *testing.T, n int) (fleet informer.Fleet) {
	t.Helper()
	var clients informer.Clients
	for i := range n {
		if i%informersPerClient == 0 {
			balancer := [...]*rest.Config{s.servers, s.replicas}[i/informersPerClient%2]
			clients = informer.NewClients(t, harness.OwnConnections(balancer))
		}
		fleet = append(fleet, informer.New(clients, follows(i)))
	}
	return fleet
}
