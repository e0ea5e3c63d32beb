package apiserver

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/spf13/pflag"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	cliflag "k8s.io/component-base/cli/flag"
	basecompatibility "k8s.io/component-base/compatibility"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	componentversion "k8s.io/component-base/version"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"github.com/stratakube/strata/server/internal/gcpolicy"
)

// run applies the settings and serves until ctx is cancelled.
func (s *settings) run(ctx context.Context, flags *pflag.FlagSet, onReady func(Info)) error {
	if err := s.limits.validate(); err != nil {
		return err
	}
	if err := s.checks.validate(); err != nil {
		return err
	}
	if err := s.tokens.validate(s.gates); err != nil {
		return err
	}
	registry := s.kube.GenericServerRunOptions.ComponentGlobalsRegistry
	if err := registry.Set(); err != nil {
		return err
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{}) // the server's own clients would log warnings that it sent them

	logs.InitLogs()
	defer logs.FlushLogs()
	gate := registry.FeatureGateFor(basecompatibility.DefaultKubeComponent)
	if err := logsapi.ValidateAndApply(s.kube.Logs, gate); err != nil {
		return err
	}
	cliflag.PrintFlags(flags)

	completed, err := s.kube.Complete(ctx)
	if err != nil {
		return err
	}
	if errs := completed.Validate(); len(errs) != 0 {
		return utilerrors.NewAggregate(errs)
	}
	gate.(featuregate.MutableFeatureGate).AddMetrics()
	registry.AddMetrics()
	if s.engine == engineStrata {
		s.limits.fit(flags, followMemoryLimit())
	}
	return s.serve(ctx, completed, onReady)
}

// serve builds the chain of servers and runs it. When it returns, the port is free and the engine closed.
func (s *settings) serve(ctx context.Context, completed options.CompletedOptions, onReady func(Info)) error {
	klog.InfoS("Starting", "version", componentversion.Get(), "engine", s.engine,
		"GOGC", os.Getenv("GOGC"), "GOMAXPROCS", os.Getenv("GOMAXPROCS"), "GOMEMLIMIT", os.Getenv("GOMEMLIMIT"))

	// An egress selector may lead to an etcd that this process cannot reach by itself.
	if completed.EgressSelector == nil || completed.EgressSelector.ConfigFile == "" {
		reaching, cancel := context.WithTimeout(ctx, etcdPatience)
		err := awaitEtcd(reaching, completed.Etcd)
		cancel()
		if ctx.Err() != nil {
			return nil // asked to stop before there was anything to serve
		}
		if err != nil {
			return err
		}
	}

	attachment := s.attachment()
	attachment.Options(completed.Etcd)
	config, err := app.NewConfig(completed)
	if listener := completed.SecureServing.Listener; listener != nil {
		defer listener.Close() // serving closes it too; this is for errors before that
	}
	if err != nil {
		return err
	}
	defer attachment.Close() // after Run, which destroys the storages
	if s.engine == engineStrata {
		gcpolicy.Start(ctx)
	}
	if err := attachment.Chain(config); err != nil {
		return err
	}

	complete, err := config.Complete()
	if err != nil {
		return err
	}
	chain, err := app.CreateServerChain(complete)
	if err != nil {
		return err
	}
	attachment.Mount(chain)
	prepared, err := chain.PrepareRun()
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if onReady != nil {
		var waiting sync.WaitGroup
		defer waiting.Wait()
		defer cancel() // runs before the wait
		loopback := config.KubeAPIs.ControlPlane.Generic.LoopbackClientConfig
		waiting.Go(func() {
			if waitReady(ctx, loopback) == nil {
				onReady(Info{URL: loopback.Host})
			}
		})
	}
	attachment.AwaitMemory(ctx)
	return prepared.Run(ctx)
}

// waitReady asks /readyz, as the server's own privileged client, until the answer is 200 or ctx is cancelled.
func waitReady(ctx context.Context, loopback *rest.Config) error {
	client, err := rest.HTTPClientFor(loopback)
	if err != nil {
		return fmt.Errorf("client for /readyz: %w", err)
	}
	const interval = 25 * time.Millisecond // a guess: small beside a start of seconds
	return wait.PollUntilContextCancel(ctx, interval, true, func(ctx context.Context) (bool, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, loopback.Host+"/readyz", nil)
		if err != nil {
			return false, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return false, nil // not listening yet
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK, nil
	})
}
