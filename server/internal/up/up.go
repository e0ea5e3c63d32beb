// Package up is `strata up`: a control plane in one process, with an embedded etcd, certificates of its own, and a few controllers.
//
//	lock the data directory ─▶ certificates ─▶ etcd ─▶ API server ─▶ kubeconfigs ─▶ controllers ─▶ (a signal)
//	                                                        controllers stop ─▶ API server ─▶ etcd ─▶ unlock
//
// Every step is shown as it happens; what goes wrong before the API server serves leaves the data as it was.
package up

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"

	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/controllers"
	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/embedetcd"
	"github.com/stratakube/strata/server/internal/pki"
)

const (
	// remindInterval is how often a person is told that a step still takes. A start takes 3 s on two cores.
	remindInterval = 10 * time.Second

	// stopTimeout bounds how long a signal waits for a start to come to its end: several times what a start takes.
	stopTimeout = 30 * time.Second

	// controllersTimeout bounds how long the start waits for the controllers to have done something. They go on trying after it.
	controllersTimeout = 20 * time.Second
)

// settings are the values of the flags.
type settings struct {
	dataDir          string
	bindAddress      net.IP
	securePort       int
	tlsSANs          []string
	kubeconfig       string // "" for none besides that in the data directory
	controllers      []string
	engine           string // "" for the API server's default
	progressInterval time.Duration
	serverFlags      []string // after --

	program string    // how the user calls this program
	out     io.Writer // where the steps go
}

// run starts everything, and stops it when ctx is cancelled. The error is one line that says what to do.
func run(ctx context.Context, s settings) (err error) {
	show := &progress{out: s.out, start: time.Now()}

	// What is wrong with the flags is found before anything is touched.
	enabled, err := controllers.Resolve(s.controllers)
	if err != nil {
		return fmt.Errorf("--controllers: %w (see strata up --help)", err)
	}
	if err := checkServerFlags(s.engine, s.serverFlags); err != nil {
		return err
	}
	addr, err := address{s.bindAddress, s.securePort}.reserve()
	if err != nil {
		// Who started twice has both the port and the directory in use, and the directory says more.
		return firstError(datadir.CheckFree(s.dataDir), err)
	}
	if s.kubeconfig != "" {
		if _, err := ourKubeconfig(s.kubeconfig); err != nil {
			return err
		}
	}

	closeFilesToOthers()
	dir, err := datadir.Open(s.dataDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	log, err := openLog(dir.Log())
	if err != nil {
		return err
	}
	defer log.Close()
	if dir.New {
		show.step("data directory: %s (new)", dir.Path)
	} else {
		show.step("data directory: %s", dir.Path)
	}
	if n := len(dir.Closed); n > 0 {
		show.step("data directory: other users might have reached %s (%d such files and directories in all); closed to them", dir.Closed[0], n)
	}

	files, err := pki.Ensure(dir.PKI(), addr.hosts(s.tlsSANs), time.Now())
	if err != nil {
		return fmt.Errorf("certificates: %w", err)
	}
	if len(files.Made) > 0 {
		show.step("certificates: made %s", strings.Join(files.Made, ", "))
	} else {
		show.step("certificates: found")
	}

	etcd, err := embedetcd.Start(ctx, embedetcd.Config{
		Dir:                    dir.Etcd(),
		ProgressNotifyInterval: s.progressInterval,
		Logger:                 log.etcdLogger(),
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	defer func() {
		etcd.Close()
		if err == nil {
			show.step("stopped; the data stays in %s", dir.Path)
		}
	}()
	show.step("etcd: ready")

	show.step("API server: starting")
	ready := make(chan apiserver.Info, 1)
	server := launch("API server", func(ctx context.Context) error {
		return apiserver.Run(ctx, apiserver.Options{
			Args:    serverFlags(etcd.Endpoint(), addr, files, s.engine, s.serverFlags),
			Out:     s.out,
			OnReady: func(info apiserver.Info) { ready <- info },
		})
	})
	defer func() { err = firstError(err, server.stop()) }()
	info, err := waitReady(ctx, show, dir, server, ready, etcd)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		show.step("stopping")
		return nil
	}
	show.step("API server: ready on %s", info.URL)

	for _, path := range slices.DeleteFunc([]string{dir.Kubeconfig(), s.kubeconfig}, isEmpty) {
		if err := adminKubeconfig(path, info.URL, files); err != nil {
			return err
		}
	}
	manager, err := s.startControllers(ctx, show, dir, info.URL, files, enabled)
	if err != nil {
		return err
	}
	defer func() { err = firstError(err, manager.stop()) }()
	if ctx.Err() == nil {
		s.printNext(dir)
	}

	select {
	case <-ctx.Done():
		show.step("stopping")
		return nil
	case <-server.done:
		return server.ended()
	case <-manager.done:
		return manager.ended()
	case err := <-etcd.Err():
		return fmt.Errorf("etcd: %w", err)
	}
}

// waitReady returns what the API server says when it is ready, or why it ended. A signal does not end the wait at once, because upstream's
// server ends the whole process when it is stopped while its start hooks run; it then waits for stopTimeout at most.
func waitReady(ctx context.Context, show *progress, dir *datadir.Dir, server *component, ready <-chan apiserver.Info, etcd *embedetcd.Server) (apiserver.Info, error) {
	remind := time.NewTicker(remindInterval)
	defer remind.Stop()
	signalled := ctx.Done()
	var giveUp <-chan time.Time
	for {
		select {
		case info := <-ready:
			return info, nil
		case <-server.done:
			return apiserver.Info{}, server.ended()
		case err := <-etcd.Err():
			return apiserver.Info{}, fmt.Errorf("etcd: %w", err)
		case <-signalled:
			show.step("stopping as soon as the API server has started; another signal ends it now")
			signalled = nil
			giveUp = time.After(stopTimeout)
		case <-giveUp:
			return apiserver.Info{}, nil
		case <-remind.C:
			show.step("API server: not ready yet; see %s", dir.Log())
		}
	}
}

// startControllers starts the controllers named in enabled, and returns when they have been seen to work, or after controllersTimeout.
func (s settings) startControllers(ctx context.Context, show *progress, dir *datadir.Dir, url string, files *pki.Files, enabled []string) (*component, error) {
	if len(enabled) == 0 {
		show.step("controllers: none")
		return launch("controllers", func(ctx context.Context) error { <-ctx.Done(); return nil }), nil
	}
	if err := controllersKubeconfig(dir.ControllersKubeconfig(), url, files); err != nil {
		return nil, err
	}
	show.step("controllers: starting")
	manager := launch("controllers", func(ctx context.Context) error {
		return controllers.Run(ctx, controllers.Options{
			Controllers:       enabled,
			Kubeconfig:        dir.ControllersKubeconfig(),
			ServiceAccountKey: files.ServiceAccountKey,
			RootCA:            files.CA,
		})
	})
	if !controllers.Enabled(enabled, names.ServiceAccountController) {
		return manager, nil
	}
	// Pods can be created in a namespace only when its service account is there.
	if err := waitForServiceAccount(ctx, manager, url, files); ctx.Err() != nil {
		return manager, nil
	} else if err != nil {
		show.step("controllers: nothing done yet (%v); see %s", err, dir.Log())
	} else {
		show.step("controllers: ready")
	}
	return manager, nil
}

// waitForServiceAccount returns nil when the namespace "default" has its service account. It gives up after controllersTimeout, when manager
// ends, and when ctx is cancelled.
func waitForServiceAccount(ctx context.Context, manager *component, url string, files *pki.Files) error {
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host:            url,
		TLSClientConfig: rest.TLSClientConfig{CAFile: files.CA, CertFile: files.Admin, KeyFile: files.Admin},
		QPS:             -1,
	})
	if err != nil {
		return err
	}
	const interval = 50 * time.Millisecond // a guess: small beside a start of seconds
	return wait.PollUntilContextTimeout(ctx, interval, controllersTimeout, true, func(ctx context.Context) (bool, error) {
		select {
		case <-manager.done:
			return false, manager.ended()
		default:
		}
		_, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, nil // whatever the reason, another attempt may find it
	})
}

// printNext prints three lines to type.
func (s settings) printNext(dir *datadir.Dir) {
	kubectl := s.program + " kubectl"
	if found, err := filepath.Abs(datadir.Default(func(string) string { return "" })); err != nil || found != dir.Path {
		kubectl += " --kubeconfig=" + quote(dir.Kubeconfig())
	}
	fmt.Fprintf(s.out, `
Strata is up; Ctrl-C stops it. Its log is %s. In another terminal, type next:

  %s get namespaces
  %s create configmap greeting --from-literal=hello=world
  export KUBECONFIG=%s    # for other clients of Kubernetes

`, dir.Log(), kubectl, kubectl, quote(dir.Kubeconfig()))
}

// quote makes one word of path for a POSIX shell.
func quote(path string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-+=:@", r)
	}
	if !slices.ContainsFunc([]rune(path), func(r rune) bool { return !plain(r) }) {
		return path
	}
	return "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
}

func isEmpty(s string) bool { return s == "" }

// firstError returns the error that came first; the later one is usually its consequence.
func firstError(first, later error) error {
	if first != nil {
		return first
	}
	return later
}
