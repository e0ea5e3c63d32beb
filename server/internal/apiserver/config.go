package apiserver

import (
	"fmt"

	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	genericapiserver "k8s.io/apiserver/pkg/server"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/kubernetes"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/controlplane"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
	generatedopenapi "k8s.io/kubernetes/pkg/generated/openapi"
	rbacrest "k8s.io/kubernetes/pkg/registry/rbac/rest"
)

// config returns the configuration of the server chain, and the factory of its informers; nil with
// upstream's engine.
func (s *settings) config(opts options.CompletedOptions) (*app.Config, *engineInformers, error) {
	if s.engine == engineStrata {
		return newConfig(opts)
	}
	config, err := app.NewConfig(opts)
	return config, nil, err
}

// newConfig returns the configuration that app.NewConfig returns, except that all parts of the
// server share the informers of the returned factory instead of those of upstream's.
//
// Upstream creates its factory, and what uses it first (priority and fairness, authentication,
// authorization), in one function. All three may be missing from its options: they are added here.
func newConfig(opts options.CompletedOptions) (*app.Config, *engineInformers, error) {
	uncached, err := uncachedResources(opts.Etcd)
	if err != nil {
		return nil, nil, err
	}
	generic, storages, err := withoutInformers(opts)
	if err != nil {
		return nil, nil, err
	}
	client, err := kubernetes.NewForConfig(generic.LoopbackClientConfig)
	if err != nil {
		return nil, nil, fmt.Errorf("client of the server: %w", err)
	}
	shared := newEngineInformers(client, opts.InformerName, uncached)
	if err := applyIdentity(opts, generic, client, shared); err != nil {
		return nil, nil, err
	}

	kube, services, initializers, err := app.CreateKubeAPIServerConfig(opts, generic, shared, storages)
	if err != nil {
		return nil, nil, err
	}
	credentials := webhook.NewDefaultAuthenticationInfoResolverWrapper(kube.ControlPlane.ProxyTransport, generic.EgressSelector,
		generic.LoopbackClientConfig, generic.TracerProvider)
	extensions, err := controlplaneapiserver.CreateAPIExtensionsConfig(*generic, shared, initializers, opts.CompletedOptions, opts.MasterCount,
		services, credentials)
	if err != nil {
		return nil, nil, err
	}
	aggregator, err := controlplaneapiserver.CreateAggregatorConfig(*generic, opts.CompletedOptions, shared, services,
		kube.ControlPlane.ProxyTransport, kube.ControlPlane.Extra.PeerProxy, initializers)
	if err != nil {
		return nil, nil, err
	}
	return &app.Config{Options: opts, KubeAPIs: kube, ApiExtensions: extensions, Aggregator: aggregator}, shared, nil
}

// withoutInformers is upstream's BuildGenericConfig without the parts that use informers.
func withoutInformers(opts options.CompletedOptions) (*genericapiserver.Config, *serverstorage.DefaultStorageFactory, error) {
	authentication, authorization, features := opts.Authentication, opts.Authorization, opts.Features
	defer func() {
		opts.Authentication, opts.Authorization, opts.Features = authentication, authorization, features
	}()
	opts.Authentication, opts.Authorization, opts.Features = nil, nil, nil
	generic, _, storages, err := controlplaneapiserver.BuildGenericConfig(opts.CompletedOptions,
		[]*runtime.Scheme{legacyscheme.Scheme, apiextensionsapiserver.Scheme, aggregatorscheme.Scheme},
		controlplane.DefaultAPIResourceConfigSource(), generatedopenapi.GetOpenAPIDefinitions, nil)
	return generic, storages, err
}

// applyIdentity adds the parts that withoutInformers omits, in upstream's order: priority and
// fairness, authentication, authorization.
func applyIdentity(opts options.CompletedOptions, generic *genericapiserver.Config, client kubernetes.Interface, shared *engineInformers) error {
	if err := opts.Features.ApplyTo(generic, client, shared); err != nil {
		return err
	}
	ctx := wait.ContextForChannel(generic.DrainedNotify())
	if err := opts.Authentication.ApplyTo(ctx, &generic.Authentication, generic.SecureServing, generic.EgressSelector,
		generic.OpenAPIConfig, generic.OpenAPIV3Config, client, shared, generic.APIServerID); err != nil {
		return err
	}
	var rbac bool
	var err error
	generic.Authorization.Authorizer, generic.RuleResolver, rbac, err = controlplaneapiserver.BuildAuthorizer(ctx, opts.CompletedOptions,
		generic.EgressSelector, generic.APIServerID, shared)
	if err != nil {
		return fmt.Errorf("invalid authorization config: %w", err)
	}
	if opts.Authorization != nil && !rbac {
		generic.DisabledPostStartHooks.Insert(rbacrest.PostStartHookName)
	}
	return nil
}
