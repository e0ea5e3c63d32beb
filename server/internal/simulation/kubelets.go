package simulation

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	nodefast "sigs.k8s.io/kwok/kustomize/stage/node/fast"
	nodeheartbeat "sigs.k8s.io/kwok/kustomize/stage/node/heartbeat-with-lease"
	podfast "sigs.k8s.io/kwok/kustomize/stage/pod/fast"
	"sigs.k8s.io/kwok/pkg/apis/internalversion"
	kwokapi "sigs.k8s.io/kwok/pkg/apis/v1alpha1"
	"sigs.k8s.io/kwok/pkg/kwok/controllers"
	"sigs.k8s.io/kwok/pkg/log"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/server/internal/component"
)

const (
	// leaseSeconds is the kubelet's default. kwok renews a lease after a quarter of it, as kubelets
	// do.
	leaseSeconds = 40

	// holder is the holder of the nodes' leases. It is the same after a restart, so that kwok's
	// controller does not wait until the leases of the previous process expire. The lock of the
	// data directory excludes a second process.
	holder = "strata-up"

	// defaultPodCIDR has the addresses of pods on nodes without a podCIDR, which users have
	// created. kwok does not respect its end: after 1,022 pods it continues with the addresses of
	// nodes, which follow.
	defaultPodCIDR = "198.19.248.0/22"

	// parallelism is the number of writes that kwok's controller has in flight, of pods, of nodes
	// and of leases each. kwok's default of 4 does not use two processors.
	parallelism = 16
)

// keepAddress is a stage that changes nothing. kwok marks the address of a pod as used only when it
// applies a stage to it; without this one, a pod that was running before a restart could share its
// address with a new one.
//
//go:embed stage-keep-address.yaml
var keepAddress string

// runKubelets runs kwok's controller, for all nodes with kwokAnnotation, until ctx is cancelled.
func runKubelets(ctx context.Context, config *rest.Config) error {
	config = rest.CopyConfig(config)
	config.UserAgent = component.UserAgent("kwok", rest.DefaultKubernetesUserAgent())
	stages, err := parseStages(nodefast.DefaultNodeInit, nodeheartbeat.DefaultNodeHeartbeatWithLease,
		podfast.DefaultPodReady, podfast.DefaultPodComplete, podfast.DefaultPodDelete, keepAddress)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	dynamicClient, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	controller, err := controllers.NewController(controllers.Config{
		Clock:                             clock.RealClock{},
		TypedClient:                       client,
		DynamicClient:                     dynamicClient,
		RESTClient:                        client.Discovery().RESTClient(),
		RESTMapper:                        restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery())),
		ManageNodesWithAnnotationSelector: kwokAnnotation + "=" + kwokFake,
		LocalStages:                       stages,
		CIDR:                              defaultPodCIDR,
		ID:                                holder,
		NodeLeaseDurationSeconds:          leaseSeconds,
		NodeLeaseParallelism:              parallelism,
		NodePlayStageParallelism:          parallelism,
		PodPlayStageParallelism:           parallelism,
		PodsOnNodeSyncParallelism:         parallelism,
	})
	if err != nil {
		return err
	}
	if err := controller.Start(log.NewContext(ctx, log.NewLogger(errorLog{ctx}, log.LevelError))); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// parseStages returns stages by the kind of object that they apply to.
func parseStages(manifests ...string) (map[internalversion.StageResourceRef][]*internalversion.Stage, error) {
	stages := map[internalversion.StageResourceRef][]*internalversion.Stage{}
	for _, manifest := range manifests {
		var stage kwokapi.Stage
		if err := yaml.UnmarshalStrict([]byte(manifest), &stage); err != nil {
			return nil, fmt.Errorf("stage: %w", err)
		}
		kwokapi.SetObjectDefaults_Stage(&stage)
		converted, err := internalversion.ConvertToInternalStage(&stage)
		if err != nil {
			return nil, fmt.Errorf("stage %s: %w", stage.Name, err)
		}
		ref := converted.Spec.ResourceRef
		stages[ref] = append(stages[ref], converted)
	}
	return stages, nil
}

// errorLog writes kwok's records, which are JSON, to the log of the process, until ctx is
// cancelled: the requests that a stop cancels are no errors.
type errorLog struct{ ctx context.Context }

func (l errorLog) Write(record []byte) (int, error) {
	if l.ctx.Err() == nil {
		var fields map[string]any
		if err := json.Unmarshal(record, &fields); err != nil {
			klog.ErrorS(nil, "Failed to simulate a kubelet", "record", string(record))
			return len(record), nil
		}
		if text, _ := fields["err"].(string); strings.HasSuffix(text, "not found") {
			// every pod may be deleted twice: its deletion is an event as well
			return len(record), nil
		}
		var details []any
		for _, key := range slices.Sorted(maps.Keys(fields)) {
			if key != slog.TimeKey && key != slog.LevelKey && key != slog.SourceKey {
				details = append(details, key, fields[key])
			}
		}
		klog.ErrorS(nil, "Failed to simulate a kubelet", details...)
	}
	return len(record), nil
}
