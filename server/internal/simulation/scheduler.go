package simulation

import (
	"context"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler"

	"github.com/stratakube/strata/server/internal/component"
)

// runScheduler runs kube-scheduler with its default profile until ctx is cancelled. There is no
// other scheduler on this data, so it elects no leader.
func runScheduler(ctx context.Context, config *rest.Config) error {
	config = rest.AddUserAgent(rest.CopyConfig(config), "scheduler")
	config.UserAgent = component.UserAgent("kube-scheduler", config.UserAgent)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, component.ErrorLogger()))
	factory := scheduler.NewInformerFactory(client, 0, nil)
	defer factory.Shutdown() // waits for the informers
	defer cancel()

	broadcaster := events.NewEventBroadcasterAdapterWithContext(ctx, client)
	sched, err := scheduler.New(ctx, client, factory, nil,
		func(name string) events.EventRecorderLogger { return broadcaster.NewRecorder(name) },
		scheduler.WithKubeConfig(config))
	if err != nil {
		return err
	}
	broadcaster.StartRecordingToSink(ctx.Done())
	defer broadcaster.Shutdown()

	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if err := sched.WaitForHandlersSync(ctx); err != nil {
		return err
	}
	sched.Run(ctx)
	return nil
}
