package up

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/balancer"
	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/pki"
	"github.com/stratakube/strata/server/internal/supervise"
)

const (
	memberCount  = 3
	serverCount  = 3
	replicaCount = 2

	// The first start of a process of each kind may take this long: a large database has to be
	// read.
	haStartTimeout = 10 * time.Minute

	// Grace periods of an orderly stop: etcd flushes its files; a server waits for requests in
	// flight, 60 s by upstream's default.
	memberGrace = 20 * time.Second
	serverGrace = 75 * time.Second
)

// haControlPlane is a control plane of several processes, which this one supervises:
//
//	lock, certificates, ports ─▶ etcd-1..3 ─▶ server-1..3, the balancer ─▶ replica-1..2, a second balancer ─▶ controllers, nodes
//
// They stop in the reverse order. The balancers, the controllers and the simulated nodes run in
// this process. The controllers use the balancer, like any client, and elect no leader: the lock of
// the data directory excludes a second process.
type haControlPlane struct {
	controlPlane
	layout    *haLayout
	haFiles   *pki.ClusterFiles
	listeners []net.Listener // of the balancers that do not run yet
	fronts    []*balancer.Balancer

	mu struct { // leaf
		sync.Mutex
		programs []*supervise.Program // in the order of their starts
	}
}

// runHA is run for a control plane of several processes.
func runHA(ctx context.Context, s settings) (err error) {
	p := &haControlPlane{controlPlane: controlPlane{settings: s, show: newStepPrinter(s.out)}}
	defer func() { err = p.stop(err) }()
	if err := p.prepare(); err != nil {
		return err
	}
	if err := p.start(ctx); err != nil {
		if ctx.Err() != nil {
			p.show.step("stopping")
			return nil
		}
		return err
	}
	return p.serve(ctx)
}

// prepare is controlPlane.prepare, and also chooses the ports of all processes and creates the
// certificates of etcd and the replicas.
func (p *haControlPlane) prepare() (err error) {
	if err := checkHAFlags(p.engine, p.serverFlags); err != nil {
		return err
	}
	if err := p.controlPlane.prepare(); err != nil {
		return err
	}
	if p.haFiles, err = pki.EnsureCluster(p.dir.PKI(), []string{"127.0.0.1"}, time.Now()); err != nil {
		return certificatesFailed(p.dir, err)
	}
	if len(p.haFiles.Made) > 0 {
		p.show.step("certificates: created %s", strings.Join(p.haFiles.Made, ", "))
	}
	if p.layout, err = openLayout(p.dir); err != nil {
		return err
	}
	for _, each := range p.layout.all() {
		if err := supervise.RemoveStale(p.dir.HA(), each.Name); err != nil {
			return fmt.Errorf("%w; make the data directory writable", err)
		}
	}
	for _, a := range []address{p.addr, p.replicasAddress()} {
		l, err := net.Listen("tcp", a.String())
		if err != nil {
			return fmt.Errorf("cannot serve on %s: %w; choose another address with --bind-address and --secure-port: --ha needs the next port too", a, bindCause(err))
		}
		p.listeners = append(p.listeners, l)
	}
	return nil
}

// replicasAddress returns the address of the balancer before the replicas: the port after
// --secure-port, a free one if that is 0.
func (p *haControlPlane) replicasAddress() address {
	if p.securePort == 0 {
		return address{p.bindAddress, 0}
	}
	return address{p.bindAddress, p.securePort + 1}
}

// start starts all processes, and writes the kubeconfigs when a server serves.
func (p *haControlPlane) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, haStartTimeout, fmt.Errorf("not within %v", haStartTimeout))
	defer cancel()
	if err := p.startAll(ctx, p.layout.Members, p.memberSpec); err != nil {
		return err
	}
	p.show.step("etcd: ready, %d members", len(p.layout.Members))
	servers, err := p.startBehind(ctx, p.layout.Servers, p.serverSpec)
	if err != nil {
		return err
	}
	p.show.step("API servers: ready on %s", servers)
	replicas := ""
	if len(p.layout.Replicas) > 0 {
		if replicas, err = p.startBehind(ctx, p.layout.Replicas, p.replicaSpec); err != nil {
			return err
		}
		p.show.step("replicas: ready on %s", replicas)
	}
	for _, path := range slices.DeleteFunc([]string{p.dir.Kubeconfig(), p.kubeconfig}, isEmpty) {
		if err := adminKubeconfig(path, servers, p.files); err != nil {
			return err
		}
		if replicas == "" {
			continue
		}
		if err := replicasContext(path, replicas); err != nil {
			return err
		}
	}
	p.printHA(servers, replicas)
	p.kubelet = p.startNodes(servers)
	p.manager, err = p.startControllers(ctx, p.show, p.dir, servers, p.files, p.enabled)
	return err
}

// startAll starts a program for each of processes and waits until all are ready.
func (p *haControlPlane) startAll(ctx context.Context, processes []haProcess, spec func(haProcess) (supervise.Spec, error)) error {
	var started []*supervise.Program
	for _, each := range processes {
		s, err := spec(each)
		if err != nil {
			return err
		}
		program := supervise.Start(s, p.showEvent)
		p.mu.Lock()
		p.mu.programs = append(p.mu.programs, program)
		p.mu.Unlock()
		started = append(started, program)
	}
	for _, program := range started {
		end := p.show.waiting(func() string {
			return fmt.Sprintf("%s: not ready yet; see %s", program.Name(), supervise.LogPath(p.dir.HA(), program.Name()))
		})
		err := program.AwaitReady(ctx)
		end()
		if err != nil {
			return err
		}
	}
	return nil
}

// startBehind starts API servers or replicas, waits until all are ready, and returns the URL of a
// balancer in front of them.
func (p *haControlPlane) startBehind(ctx context.Context, processes []haProcess, spec func(haProcess) (supervise.Spec, error)) (url string, err error) {
	listener := p.listeners[0]
	p.listeners = p.listeners[1:]
	var backends []balancer.Backend
	for _, each := range processes {
		check, err := p.readyz(each)
		if err != nil {
			listener.Close()
			return "", err
		}
		backends = append(backends, balancer.Backend{Name: each.Name, Address: each.address(), Check: check})
	}
	front := balancer.Start(listener, balancer.Options{Backends: backends, OnChange: p.showHealth, Logger: slog.New(logr.ToSlogHandler(klog.Background()))})
	p.fronts = append(p.fronts, front)
	if err := p.startAll(ctx, processes, spec); err != nil {
		return "", err
	}
	if err := front.AwaitAny(ctx); err != nil {
		return "", err
	}
	port := listener.Addr().(*net.TCPAddr).Port
	ip := p.bindAddress
	if ip.IsUnspecified() {
		ip = net.IPv4(127, 0, 0, 1)
	}
	return "https://" + address{ip, port}.String(), nil
}

// readyz returns a health check of an API server or a replica, over TLS with the certificate of
// health checks. It keeps one connection.
func (p *haControlPlane) readyz(each haProcess) (func(context.Context) error, error) {
	pem, err := os.ReadFile(p.files.CA)
	if err != nil {
		return nil, fmt.Errorf("health check of %s: %w", each.Name, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("health check of %s: %s has no certificates", each.Name, p.files.CA)
	}
	own, err := tls.LoadX509KeyPair(p.haFiles.Balancer, p.haFiles.Balancer)
	if err != nil {
		return nil, fmt.Errorf("health check of %s: %w", each.Name, err)
	}
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}},
		MaxIdleConns:    1,
		IdleConnTimeout: time.Minute,
	}}
	return balancer.Readyz(client, "https://"+each.address()+"/readyz"), nil
}

// memberSpec describes a member of etcd.
func (p *haControlPlane) memberSpec(m haProcess) (supervise.Spec, error) {
	path, err := os.Executable()
	if err != nil {
		return supervise.Spec{}, err
	}
	return supervise.Spec{
		Name: m.Name, Path: path, Dir: p.dir.HA(), Grace: memberGrace, ReadyLine: "ready ",
		Args: []string{
			"etcd",
			"--data-dir=" + p.dir.HAMember(m.Name),
			"--listen-client-url=" + m.url(),
			"--cert-file=" + p.haFiles.EtcdMember, "--key-file=" + p.haFiles.EtcdMember, "--trusted-ca-file=" + p.haFiles.EtcdCA,
			"--name=" + m.Name,
			"--initial-cluster=" + p.layout.cluster(),
			"--peer-cert-file=" + p.haFiles.EtcdMember, "--peer-key-file=" + p.haFiles.EtcdMember, "--peer-trusted-ca-file=" + p.haFiles.EtcdCA,
			"--progress-notify-interval=" + p.progressInterval.String(),
		},
	}, nil
}

// serverSpec describes an API server.
func (p *haControlPlane) serverSpec(server haProcess) (supervise.Spec, error) {
	return p.readSpec(server, "apiserver", p.engine)
}

// replicaSpec describes a read replica, which forwards writes to the API servers themselves: each
// replica checks their health.
func (p *haControlPlane) replicaSpec(replica haProcess) (supervise.Spec, error) {
	var primaries []string
	for _, server := range p.layout.Servers {
		primaries = append(primaries, server.url())
	}
	more := append(sameAuthorization(p.serverFlags), "--primary="+strings.Join(primaries, ","), "--primary-ca-file="+p.files.CA,
		"--proxy-client-cert-file="+p.haFiles.Replica, "--proxy-client-key-file="+p.haFiles.Replica)
	return p.readSpec(replica, "replica", "", more...)
}

// sameAuthorization returns the flag with which a replica accepts every authorizer, if the user
// names the authorizers. They are then the same on the API servers, so that a replica permits no
// read that an API server refuses.
func sameAuthorization(extra []string) []string {
	if setsFlag(extra, "authorization-mode") {
		return []string{"--insecure-always-allow"}
	}
	return nil
}

// readSpec describes an API server or a replica: a command with the flags of `strata apiserver`,
// and more.
func (p *haControlPlane) readSpec(each haProcess, command, engine string, more ...string) (supervise.Spec, error) {
	ready, err := p.readyz(each)
	if err != nil {
		return supervise.Spec{}, err
	}
	path, err := os.Executable()
	if err != nil {
		return supervise.Spec{}, err
	}
	extra := slices.Concat(p.haServerFlags(), more, p.serverFlags)
	flags := serverFlags(p.layout.endpoints(), nil, address{net.IPv4(127, 0, 0, 1), each.Port}, p.files, engine, extra)
	return supervise.Spec{
		Name: each.Name, Path: path, Dir: p.dir.HA(), Grace: serverGrace, Ready: ready, Args: append([]string{command}, flags...),
	}, nil
}

// haServerFlags returns the flags that differ from those of a control plane of one process, unless
// the user sets them.
func (p *haControlPlane) haServerFlags() []string {
	var args []string
	for _, f := range []flag{
		{"etcd-cafile", p.haFiles.EtcdCA},
		{"etcd-certfile", p.haFiles.EtcdClient},
		{"etcd-keyfile", p.haFiles.EtcdClient},
		{"requestheader-allowed-names", pki.FrontProxyUser + "," + pki.ReplicaUser},
		// While a server that ends still serves, /readyz fails and the balancer sends new
		// connections to the others.
		{"shutdown-delay-duration", drainFor.String()},
	} {
		if !setsFlag(p.serverFlags, f.name) {
			args = append(args, "--"+f.name+"="+f.value)
		}
	}
	return args
}

// drainFor is how long a server that ends serves: the balancer's checks twice, and time for clients
// to follow the server's request to reconnect.
const drainFor = 2 * time.Second

// haFlags are the flags of the API server that --ha decides for each process, with the reason.
var haFlags = map[string]string{
	"etcd-cafile":                  "the members of etcd have certificates of their own",
	"etcd-certfile":                "the members of etcd have certificates of their own",
	"etcd-keyfile":                 "the members of etcd have certificates of their own",
	"etcd-servers-overrides":       "all resources are in the etcd of three members",
	"tls-cert-file":                "the balancer verifies the certificates of the data directory",
	"tls-private-key-file":         "the balancer verifies the certificates of the data directory",
	"client-ca-file":               "replicas and the balancer have certificates of the data directory",
	"requestheader-client-ca-file": "replicas have a certificate of the data directory",
	"requestheader-allowed-names":  "replicas have a certificate of the data directory",
	"proxy-client-cert-file":       "replicas have a certificate of the data directory",
	"proxy-client-key-file":        "replicas have a certificate of the data directory",
	"advertise-address":            "the servers listen on loopback",
	"external-hostname":            "the servers listen on loopback",
	"permit-port-sharing":          "each server has a port of its own",
	"permit-address-sharing":       "each server has a port of its own",
}

// checkHAFlags detects flags that --ha excludes before any change is made.
func checkHAFlags(engine string, extra []string) error {
	for name, reason := range haFlags {
		if setsFlag(extra, name) {
			return cli.Misusef("--ha excludes the flag --%s of the API server: %s", name, reason)
		}
	}
	if engine == "upstream" || flagValue(extra, "engine") == "upstream" {
		return cli.Misusef("--ha excludes --engine=upstream: read replicas need the engine strata")
	}
	if path := flagValue(extra, "audit-log-path"); path != "" && path != "-" {
		return cli.Misusef("--ha excludes --audit-log-path=%s: several servers would write to that file; --audit-log-path=- writes to the log of each", path)
	}
	return nil
}

// flagValue returns the value of the last flag called name with "=" or the next argument, "" if
// there is none.
func flagValue(args []string, name string) (value string) {
	for i, arg := range args {
		if !setsFlag([]string{arg}, name) {
			continue
		}
		if _, after, found := strings.Cut(arg, "="); found {
			value = after
		} else if i+1 < len(args) {
			value = args[i+1]
		}
	}
	return value
}

// serve returns nil when ctx is cancelled, or the error of a component of this process. Processes
// that end are started again.
func (p *haControlPlane) serve(ctx context.Context) error {
	select {
	case <-ctx.Done():
		p.show.step("stopping")
		return nil
	case <-p.manager.done:
		return p.seeLog(p.manager.ended())
	case <-p.kubelet.done:
		return p.seeLog(p.kubelet.ended())
	}
}

// stopTogether stops the programs of processes concurrently.
func stopTogether(programs []*supervise.Program, processes []haProcess) error {
	var stopping sync.WaitGroup
	errs := make([]error, len(programs))
	for i, program := range programs {
		if slices.ContainsFunc(processes, func(each haProcess) bool { return each.Name == program.Name() }) {
			stopping.Go(func() { errs[i] = program.Stop() })
		}
	}
	stopping.Wait()
	return errors.Join(errs...)
}

// stop ends everything in the reverse order of the starts, servers and replicas concurrently, and
// unlocks the data directory. It returns err, or else the first error of a component.
func (p *haControlPlane) stop(err error) error {
	end := func() {}
	if p.dir != nil {
		end = p.show.waiting(func() string { return "stopping; see the logs in " + p.dir.HA() })
	}
	if p.kubelet != nil {
		err = cmp.Or(err, p.kubelet.stop())
	}
	if p.manager != nil {
		err = cmp.Or(err, p.manager.stop())
	}
	p.kubelet, p.manager = nil, nil
	for _, l := range p.listeners {
		l.Close()
	}
	for _, front := range slices.Backward(p.fronts) {
		front.Close()
	}
	p.mu.Lock()
	programs := p.mu.programs
	p.mu.Unlock()
	layout := cmp.Or(p.layout, &haLayout{})
	err = cmp.Or(err, stopTogether(programs, layout.Replicas))
	err = cmp.Or(err, stopTogether(programs, layout.Servers))
	for _, member := range layout.Members {
		// One after the other: a leader that ends waits for another member to take over, which must
		// not end at the same time.
		err = cmp.Or(err, stopTogether(programs, []haProcess{member}))
	}
	layout.release()
	end()
	if len(programs) > 0 && err == nil {
		p.show.step("stopped; the data remains in %s", p.dir.Path)
	}
	return p.controlPlane.stop(err)
}

// showEvent prints the events of a process after its first start, which the steps of the start
// show.
func (p *haControlPlane) showEvent(e supervise.Event) {
	switch {
	case e.State == supervise.Ended && e.Pause > 0:
		p.show.step("%s: process %d ended (%v); starts again in %v", e.Name, e.PID, e.Err, e.Pause)
	case e.State == supervise.Started && e.Life > 1:
		p.show.step("%s: started, process %d", e.Name, e.PID)
	case e.State == supervise.Ready && e.Life > 1:
		p.show.step("%s: ready, process %d", e.Name, e.PID)
	}
}

// showHealth prints changes of the health of a backend.
func (p *haControlPlane) showHealth(name string, reason error) {
	if reason != nil {
		p.show.step("balancer: no new connections to %s (%v)", name, reason)
	} else {
		p.show.step("balancer: %s gets connections", name)
	}
}

// printHA prints the table of processes and the next commands.
func (p *haControlPlane) printHA(servers, replicas string) {
	fmt.Fprintf(p.out, "\nStrata is up, in %d processes; press Ctrl-C to stop all of them. Logs and process ids are in %s:\n\n",
		len(p.layout.all())+1, p.dir.HA())
	table := tabwriter.NewWriter(p.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "  NAME\tPROCESS\tADDRESS\tLOG")
	pids := map[string]int{}
	p.mu.Lock()
	for _, program := range p.mu.programs {
		pids[program.Name()] = program.PID()
	}
	p.mu.Unlock()
	for _, each := range p.layout.all() {
		fmt.Fprintf(table, "  %s\t%d\t%s\t%s\n", each.Name, pids[each.Name], each.url(), filepath.Base(supervise.LogPath(p.dir.HA(), each.Name)))
	}
	fmt.Fprintf(table, "  balancer\t%s\t%s\t%s\n", "this one", servers, "../"+filepath.Base(p.dir.Log()))
	if replicas != "" {
		fmt.Fprintf(table, "  \t\t%s\t%s\n", replicas, "reads by the replicas")
	}
	_ = table.Flush() // to the terminal, like every other line

	kubectl := p.kubectl(p.dir)
	fmt.Fprintf(p.out, `
In another terminal, watch an object, end any process, and change the object:

  %s create configmap greeting --from-literal=hello=world
  %s get configmap greeting --watch --output-watch-events &
  kill -9 $(cat %s)
  %s patch configmap greeting --patch='{"data":{"hello":"moon"}}'
`, kubectl, kubectl, quote(supervise.PIDPath(p.relativeHA(), p.layout.Servers[0].Name)), kubectl)
	if replicas != "" {
		fmt.Fprintf(p.out, "  %s --context=%s get configmap greeting    # by a replica\n", kubectl, replicasContextName)
	}
	fmt.Fprintf(p.out, "  export KUBECONFIG=%s    # for other Kubernetes clients\n\n", quote(p.dir.Kubeconfig()))
}

// relativeHA returns the path of the directory of processes, relative if the data directory is the
// default one.
func (p *haControlPlane) relativeHA() string {
	if isDefault(p.dir) {
		return filepath.Join(datadir.Default(func(string) string { return "" }), filepath.Base(p.dir.HA()))
	}
	return p.dir.HA()
}
