// Package up implements `strata up`: a control plane in one process, with an embedded etcd, its own
// certificates, the controllers of workloads, and simulated nodes if the user wants some.
//
//	lock the data directory ─▶ certificates ─▶ etcd ─▶ API server ─▶ kubeconfigs ─▶ controllers, nodes ─▶ (a signal)
//	                                                 nodes, controllers stop ─▶ API server ─▶ etcd ─▶ unlock
//
// Every step is printed when it happens. An error before the API server serves leaves the data
// unchanged.
package up

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"

	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/console"
	"github.com/stratakube/strata/server/internal/controllers"
	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/embedetcd"
	"github.com/stratakube/strata/server/internal/pki"
	"github.com/stratakube/strata/server/internal/simulation"
)

const (
	// stopTimeout bounds the wait for a startup in progress after a signal: many times the
	// duration of a start.
	stopTimeout = time.Minute

	// controllersTimeout bounds the wait for the controllers' first effect at startup. They
	// continue to retry after it.
	controllersTimeout = 20 * time.Second
)

// settings are the values of the flags.
type settings struct {
	dataDir          string
	bindAddress      net.IP
	securePort       int
	tlsSANs          []string
	kubeconfig       string // "" for only the one in the data directory
	controllers      []string
	nodes            int    // simulated ones
	engine           string // deprecated; "" for the API server's default
	progressInterval time.Duration
	ha               bool
	serverFlags      []string // after --
	shards           int      // number of etcds; 0 for that of the data directory

	program string    // the name by which the user called this program
	out     io.Writer // output of the steps
}

// run prepares, starts and serves until ctx is cancelled, and stops. The error is one line that
// names a remedy.
func run(ctx context.Context, s settings) (err error) {
	if err := os.Setenv("NO_PROXY", noProxy(os.Getenv, s.serverFlags)); err != nil {
		return err
	}
	if s.ha {
		return runHA(ctx, s)
	}
	p := &controlPlane{settings: s, show: newStepPrinter(s.out)}
	defer func() { err = p.stop(err) }()
	if err := p.prepare(); err != nil {
		return err
	}
	if started, err := p.start(ctx); !started || err != nil {
		return err
	}
	return p.serve(ctx)
}

// controlPlane is a control plane. Components that do not exist yet are nil.
type controlPlane struct {
	settings
	show    *stepPrinter
	addr    address
	release func() error // of the port of addr; nil if it is not reserved
	enabled []string     // the controllers

	dir   *datadir.Dir // locked
	log   *logFile
	files *pki.Files
	etcd  *embedetcd.Server

	etcdShards []*embedetcd.Server // beside etcd
	overrides  []string            // of --etcd-servers-overrides, for etcdShards

	server  *component
	manager *component // of the controllers
	kubelet *component // of the simulated nodes

	// of the console; nil if the server cannot be reached on a loopback address
	sessions *console.Sessions
}

// prepare checks the flags, locks the data directory, and creates missing certificates. Invalid
// flags are reported before any change is made.
func (p *controlPlane) prepare() (err error) {
	if p.enabled, err = controllers.Resolve(p.controllers); err != nil {
		return cli.Misusef("--controllers: %w (see strata up --help)", err)
	}
	if err := checkServerFlags(p.engine, p.serverFlags); err != nil {
		return err
	}
	if p.addr, p.release, err = (address{p.bindAddress, p.securePort}).reserve(); err != nil {
		// If strata up is already running, both the port and the directory are in use; the error of
		// the directory is more specific.
		return cmp.Or(datadir.CheckFree(p.dataDir), err)
	}
	if p.kubeconfig != "" {
		if _, err := ourKubeconfig(p.kubeconfig); err != nil {
			return err
		}
	}
	if err := p.openDir(); err != nil {
		return err
	}
	if err := p.checkShards(); err != nil {
		return err
	}
	if p.files, err = pki.Ensure(p.dir.PKI(), p.addr.hosts(p.tlsSANs), time.Now()); err != nil {
		return certificatesFailed(p.dir, err)
	}
	if len(p.files.Made) > 0 {
		p.show.step("certificates: created %s", strings.Join(p.files.Made, ", "))
	} else {
		p.show.step("certificates: using the existing ones")
	}
	return nil
}

// certificatesFailed describes a failure to read or create certificates, with the next step.
func certificatesFailed(dir *datadir.Dir, err error) error {
	next := fmt.Sprintf("restore %s from a backup, or remove it to create others, which clients then need", dir.PKI())
	if errors.Is(err, syscall.ENOSPC) {
		next = "free space on the file system of the data directory"
	}
	return fmt.Errorf("certificates: %w; %s", err, next)
}

// openDir locks the data directory and opens the log in it.
func (p *controlPlane) openDir() (err error) {
	closeFilesToOthers()
	if p.dir, err = datadir.Open(p.dataDir); err != nil {
		return err
	}
	if err := p.dir.CheckKind(p.ha); err != nil {
		return err
	}
	if p.log, err = openLog(p.dir.Log()); err != nil {
		return err
	}
	if p.dir.New {
		p.show.step("data directory: %s (new)", p.dir.Path)
	} else {
		p.show.step("data directory: %s", p.dir.Path)
	}
	if n := len(p.dir.Closed); n > 0 {
		p.show.step("data directory: %s was accessible to other users (%d such files and directories in total); access removed", p.dir.Closed[0], n)
	}
	return nil
}

// start starts etcd, the API server and the controllers, and writes the kubeconfigs. It reports
// false if ctx is cancelled before the API server is ready.
func (p *controlPlane) start(ctx context.Context) (started bool, err error) {
	end := p.show.waiting(func() string { return "etcd: starting; see " + p.dir.Log() })
	p.etcd, err = embedetcd.Start(ctx, embedetcd.Config{
		Dir:                    p.dir.Etcd(),
		ProgressNotifyInterval: p.progressInterval,
		Logger:                 p.log.etcdLogger(),
		Fatal:                  p.log.etcdFailed,
	})
	if err == nil {
		err = p.startShards(ctx)
	}
	end()
	switch {
	case err != nil && ctx.Err() != nil:
		return false, nil
	case err != nil:
		return false, fmt.Errorf("%w; see %s, or restore the data directory from a backup, or choose another one with --data-dir", err, p.dir.Log())
	}
	p.show.step("etcd: ready")

	p.show.step("API server: starting")
	var load loading
	ready := make(chan apiserver.Info, 1)
	if p.addr.ip.IsLoopback() || p.addr.ip.IsUnspecified() {
		p.sessions = console.NewSessions()
	}
	p.server = launch("API server", func(ctx context.Context) error {
		return apiserver.Run(ctx, apiserver.Options{
			Args:     serverFlags(p.etcd.Endpoint(), p.overrides, p.addr, p.files, p.engine, p.serverFlags),
			Out:      p.out,
			OnReady:  func(info apiserver.Info) { ready <- info },
			OnLoad:   load.begin,
			Sessions: p.sessions,
		})
	})
	end = p.show.waiting(func() string { return load.text(ctx, p.dir.Log()) })
	info, err := waitReady(ctx, p.show, p.server, ready, p.etcd)
	end()
	if err != nil {
		return false, p.seeLog(err)
	}
	if ctx.Err() != nil {
		p.show.step("stopping")
		return false, nil
	}
	p.show.step("API server: ready on %s", info.URL)

	for _, path := range slices.DeleteFunc([]string{p.dir.Kubeconfig(), p.kubeconfig}, isEmpty) {
		if err := adminKubeconfig(path, info.URL, p.files); err != nil {
			return false, err
		}
	}
	p.printNext(p.dir, p.consoleLink(info))
	p.kubelet = p.startNodes(info.URL)
	if p.manager, err = p.startControllers(ctx, p.show, p.dir, info.URL, p.files, p.enabled); err != nil {
		return false, err
	}
	return true, nil
}

// serve returns nil when ctx is cancelled, or the error of a component that has ended.
func (p *controlPlane) serve(ctx context.Context) error {
	select {
	case <-ctx.Done():
		p.show.step("stopping")
		return nil
	case <-p.server.done:
		return p.seeLog(p.server.ended())
	case <-p.manager.done:
		return p.seeLog(p.manager.ended())
	case <-p.kubelet.done:
		return p.seeLog(p.kubelet.ended())
	case err := <-p.etcd.Err():
		return p.seeLog(fmt.Errorf("etcd: %w", err))
	case err := <-p.shardFailed():
		return p.seeLog(err)
	}
}

// seeLog adds the path of the log to the error of a component, unless it is one of the command
// line.
func (p *controlPlane) seeLog(err error) error {
	if cli.IsMisuse(err) {
		return err
	}
	return fmt.Errorf("%w; see %s", err, p.dir.Log())
}

// stop ends all components in the reverse order of their start, and unlocks the data directory. It
// returns err, or else the first error of a component.
func (p *controlPlane) stop(err error) error {
	end := p.show.waiting(func() string { return "stopping; see " + p.dir.Log() })
	defer end()
	if p.kubelet != nil {
		err = cmp.Or(err, p.kubelet.stop())
	}
	if p.manager != nil {
		err = cmp.Or(err, p.manager.stop())
	}
	if p.server != nil {
		err = cmp.Or(err, p.server.stop())
	}
	p.closeShards()
	if p.etcd != nil {
		p.etcd.Close()
		if end(); err == nil {
			p.show.step("stopped; the data remains in %s", p.dir.Path)
		}
	}
	if p.release != nil {
		err = cmp.Or(err, p.release())
	}
	if p.log != nil {
		p.log.Close()
	}
	if p.dir != nil {
		_ = p.dir.Close()
	}
	return err
}

// waitReady returns the Info of the API server when it is ready, or the error with which it ended.
// A signal does not end the wait immediately, because upstream's server exits the process if it is
// stopped while its start hooks run. After a signal, waitReady waits at most stopTimeout.
func waitReady(ctx context.Context, show *stepPrinter, server *component, ready <-chan apiserver.Info, etcd *embedetcd.Server) (apiserver.Info, error) {
	signalled := ctx.Done()
	var giveUp <-chan time.Time
	for {
		select {
		case info := <-ready:
			return info, nil
		case <-server.done:
			return apiserver.Info{}, cli.WithHelp(server.ended(), "strata apiserver")
		case err := <-etcd.Err():
			return apiserver.Info{}, fmt.Errorf("etcd: %w", err)
		case <-signalled:
			show.step("stopping as soon as the API server has started; send another signal to exit now")
			signalled = nil
			giveUp = time.After(stopTimeout)
		case <-giveUp:
			return apiserver.Info{}, nil
		}
	}
}

// startControllers starts the controllers named in enabled, and returns when the first effect of
// them is visible, or after controllersTimeout.
func (s settings) startControllers(ctx context.Context, show *stepPrinter, dir *datadir.Dir, url string, files *pki.Files, enabled []string) (*component, error) {
	if len(enabled) == 0 {
		show.step("controllers: none")
		return launch("controllers", func(ctx context.Context) error { <-ctx.Done(); return nil }), nil
	}
	if err := controllersKubeconfig(dir.ControllersKubeconfig(), url, files); err != nil {
		return nil, err
	}
	manager := launch("controllers", func(ctx context.Context) error {
		return controllers.Run(ctx, controllers.Options{
			Controllers:       enabled,
			Kubeconfig:        dir.ControllersKubeconfig(),
			ServiceAccountKey: files.ServiceAccountKey,
			RootCA:            files.CA,
		})
	})
	if !controllers.Enabled(enabled, names.ServiceAccountController) {
		show.step("controllers: started")
		return manager, nil
	}
	// Pods can be created in a namespace only when its service account exists.
	end := show.waiting(func() string { return "controllers: not ready yet; see " + dir.Log() })
	err := waitForServiceAccount(ctx, manager, url, files)
	if end(); ctx.Err() != nil {
		return manager, nil
	} else if err != nil {
		show.step("controllers: not ready yet (%v); see %s", err, dir.Log())
	} else {
		show.step("controllers: ready")
	}
	return manager, nil
}

// waitForServiceAccount returns nil when the namespace "default" has its service account. It gives
// up after controllersTimeout, when manager ends, and when ctx is cancelled.
func waitForServiceAccount(ctx context.Context, manager *component, url string, files *pki.Files) error {
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host:            url,
		TLSClientConfig: rest.TLSClientConfig{CAFile: files.CA, CertFile: files.Admin, KeyFile: files.Admin},
		QPS:             -1,
	})
	if err != nil {
		return err
	}
	const interval = 50 * time.Millisecond // a guess: small compared to a startup of seconds
	return wait.PollUntilContextTimeout(ctx, interval, controllersTimeout, true, func(ctx context.Context) (bool, error) {
		select {
		case <-manager.done:
			return false, manager.ended()
		default:
		}
		_, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, nil // after any error, retry until the timeout
	})
}

// startNodes makes the cluster have p.nodes simulated nodes, and returns at once.
func (p *controlPlane) startNodes(url string) *component {
	client := func(file string) *rest.Config {
		return &rest.Config{Host: url, TLSClientConfig: rest.TLSClientConfig{CAFile: p.files.CA, CertFile: file, KeyFile: file}}
	}
	if p.nodes > 0 {
		p.show.step("nodes: creating %d simulated ones", p.nodes)
		if !controllers.Enabled(p.enabled, names.NodeLifecycleController) {
			p.show.step("nodes: they accept pods only when a %s runs, which --controllers excludes", names.NodeLifecycleController)
		}
	}
	return launch("nodes", func(ctx context.Context) error {
		return simulation.Run(ctx, simulation.Options{
			Nodes:     p.nodes,
			Kubelets:  client(p.files.Kubelets),
			Scheduler: client(p.files.Scheduler),
			OnReady:   func() { p.show.step("nodes: ready") },
		})
	})
}

// consoleLink returns a link to the console, "" if there is none.
func (p *controlPlane) consoleLink(info apiserver.Info) string {
	if p.sessions == nil || !info.Console {
		return ""
	}
	link, _ := p.sessions.NewLink()
	return info.URL + link
}

// printNext prints the next three commands for the user, and the link to the console, if there is
// one.
func (s settings) printNext(dir *datadir.Dir, link string) {
	kubectl := s.kubectl(dir)
	first, second := "get namespaces", "create configmap greeting --from-literal=hello=world"
	if s.nodes > 0 {
		first, second = "create deployment hello --image=hello --replicas=3", "get pods --output=wide --watch"
	}
	fmt.Fprintf(s.out, `
Strata is up; press Ctrl-C to stop it. The log is %s. In another terminal, run:

  %s %s
  %s %s
  export KUBECONFIG=%s    # for other Kubernetes clients

`, dir.Log(), kubectl, first, kubectl, second, quote(dir.Kubeconfig()))
	if link != "" {
		fmt.Fprintf(s.out, "The console in a browser on this machine, once within ten minutes (strata console prints another link):\n\n  %s\n\n", link)
	}
}

// kubectl returns the command that runs kubectl on the control plane.
func (s settings) kubectl(dir *datadir.Dir) string {
	kubectl := s.program + " kubectl"
	if !isDefault(dir) {
		kubectl += " --kubeconfig=" + quote(dir.Kubeconfig())
	}
	return kubectl
}

// isDefault reports whether dir is the data directory of commands without a flag, in the working
// directory.
func isDefault(dir *datadir.Dir) bool {
	found, err := filepath.Abs(datadir.Default(func(string) string { return "" }))
	return err == nil && found == dir.Path
}

// quote quotes path as one word of a POSIX shell, if necessary.
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

// component is a part of the control plane that runs until stop is called.
type component struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{} // closed when run has returned
	err    error         // the result of run; valid when done is closed
}

// launch calls run on a new goroutine, with a context that only stop cancels.
func launch(name string, run func(context.Context) error) *component {
	ctx, cancel := context.WithCancel(context.Background())
	c := &component{name: name, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		defer cancel()
		c.err = run(ctx)
	}()
	return c
}

// stop ends the component, waits until it has ended, and returns its error. A second call returns
// the same error.
func (c *component) stop() error {
	c.cancel()
	<-c.done
	if c.err != nil {
		return fmt.Errorf("%s: %w", c.name, c.err)
	}
	return nil
}

// ended returns the error of a component that ended without a call of stop. It may be called only
// when done is closed.
func (c *component) ended() error {
	if c.err != nil {
		return fmt.Errorf("%s: %w", c.name, c.err)
	}
	return fmt.Errorf("%s: %w", c.name, errEnded)
}

var errEnded = errors.New("exited unexpectedly")
