package controllers

import (
	"context"
	"fmt"
	"os"

	"k8s.io/client-go/util/keyutil"
	"k8s.io/controller-manager/pkg/clientbuilder"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app/config"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
	serviceaccountcontroller "k8s.io/kubernetes/pkg/controller/serviceaccount"
	"k8s.io/kubernetes/pkg/serviceaccount"
)

// run runs the enabled controllers until ctx is cancelled. It is upstream's Run with the clients of
// this package; it elects no leader and serves no endpoints.
func run(ctx context.Context, c *config.CompletedConfig) error {
	// its events are those of leader elections; controllers have their own broadcasters
	defer c.EventBroadcaster.Shutdown()
	root, each, err := newClients(ctx, c.Kubeconfig)
	if err != nil {
		return err
	}

	manager, err := app.CreateControllerContext(ctx, c, root, each)
	if err != nil {
		return err
	}
	descriptors := app.NewControllerDescriptors()
	// its constructor needs upstream's builder
	delete(descriptors, names.ServiceAccountTokenController)
	all, err := app.BuildControllers(ctx, manager, descriptors, nil, controllerhealthz.NewMutableHealthzHandler())
	if err != nil {
		return err
	}
	if file := c.ComponentConfig.SAController.ServiceAccountKeyFile; file != "" {
		tokens, err := newTokens(ctx, manager, root, file)
		if err != nil {
			return fmt.Errorf("%s: %w", names.ServiceAccountTokenController, err)
		}
		all = append(all, tokens)
	}
	manager.InformerFactory.Start(ctx.Done())
	defer manager.InformerFactory.Shutdown()
	manager.ObjectOrMetadataInformerFactory.Start(ctx.Done())
	close(manager.InformersStarted)

	app.RunControllers(ctx, manager, all, app.ControllerStartJitter, c.ControllerShutdownTimeout)
	<-ctx.Done() // there may be no controllers
	return nil
}

// tokens is the controller that fills Secrets of type service-account-token.
type tokens struct {
	*serviceaccountcontroller.TokensController
	workers int
}

// newTokens returns the controller of the tokens that the private key in a file signs.
func newTokens(ctx context.Context, manager app.ControllerContext, root clientbuilder.ControllerClientBuilder, keyFile string) (*tokens, error) {
	settings := manager.ComponentConfig.SAController
	key, err := keyutil.PrivateKeyFromFile(keyFile)
	if err != nil {
		return nil, err
	}
	generator, err := serviceaccount.JWTTokenGenerator(serviceaccount.LegacyIssuer, key)
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(settings.RootCAFile)
	if err != nil {
		return nil, err
	}
	client, err := root.Client("tokens-controller")
	if err != nil {
		return nil, err
	}
	core := manager.InformerFactory.Core().V1()
	controller, err := serviceaccountcontroller.NewTokensController(klog.FromContext(ctx), core.ServiceAccounts(), core.Secrets(), client,
		serviceaccountcontroller.TokensControllerOptions{TokenGenerator: generator, RootCA: ca})
	if err != nil {
		return nil, err
	}
	return &tokens{controller, int(settings.ConcurrentSATokenSyncs)}, nil
}

// Name implements app.Controller.
func (t *tokens) Name() string { return names.ServiceAccountTokenController }

// Run implements app.Controller.
func (t *tokens) Run(ctx context.Context) { t.TokensController.Run(ctx, t.workers) }
