package up

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/pki"
	"github.com/stratakube/strata/server/internal/simulation"
)

const (
	// serviceRange is kube-apiserver's default range of service addresses, and serviceIP its first
	// address, that of the API server's own service.
	serviceRange = "10.0.0.0/24"
	serviceIP    = "10.0.0.1"

	issuer = "https://kubernetes.default.svc.cluster.local"
)

// address is the address on which the API server listens.
type address struct {
	ip   net.IP
	port int
}

func (a address) String() string { return net.JoinHostPort(a.ip.String(), strconv.Itoa(a.port)) }

// reserve checks that a can be listened on, and returns it with a free port in place of port 0. The
// API server binds the port seconds later: on Linux a free port of 127.0.0.1 is held for it until
// release, which is nil for other addresses. For these, reserve only detects the common mistake
// early, before any component has been started.
func (a address) reserve() (_ address, release func() error, _ error) {
	if a.port == 0 && a.ip.Equal(net.IPv4(127, 0, 0, 1)) {
		port, err := loopback.Reserve()
		if err != nil {
			return a, nil, fmt.Errorf("%w; choose a port with --secure-port", err)
		}
		a.port = port.Number()
		return a, port.Release, nil
	}
	l, err := net.Listen("tcp", a.String())
	if err != nil {
		return a, nil, fmt.Errorf("cannot serve on %s: %w; choose another address with --bind-address and --secure-port", a, bindCause(err))
	}
	defer l.Close()
	a.port = l.Addr().(*net.TCPAddr).Port
	return a, nil, nil
}

// bindCause returns the cause of a net.Listen error without the address, which the caller adds.
func bindCause(err error) error {
	if op, ok := err.(*net.OpError); ok {
		err = op.Err
	}
	if call, ok := err.(*os.SyscallError); ok {
		err = call.Err
	}
	return err
}

// hosts returns the names and addresses under which clients may reach the API server: those of this
// host, of the service that pods use, and extra.
func (a address) hosts(extra []string) []string {
	hosts := []string{
		"localhost", "127.0.0.1", "::1",
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", serviceIP,
	}
	if name, err := os.Hostname(); err == nil && name != "" {
		hosts = append(hosts, name)
	}
	switch {
	case a.ip.IsUnspecified():
		addrs, err := net.InterfaceAddrs()
		if err != nil {
			break // the certificate then contains the names only; --tls-san can add addresses
		}
		for _, addr := range addrs {
			if network, ok := addr.(*net.IPNet); ok && network.IP.IsGlobalUnicast() {
				hosts = append(hosts, network.IP.String())
			}
		}
	default:
		hosts = append(hosts, a.ip.String())
	}
	return append(hosts, extra...)
}

// compactionInterval is how often the API server compacts etcd, which determines how far back the
// past is readable: one to two intervals. The past of a session at a terminal is that of the last
// quarter of an hour or more; kube-apiserver's default is 5m. A server with a write every 10 ms and
// objects of 5 KB needs 1 GB of disk for it, of the 8 GiB that etcd accepts.
const compactionInterval = "15m"

// serverFlags returns the command line of `strata apiserver` for this control plane: the flags that
// up sets, except for those set by extra, followed by extra.
func serverFlags(etcdEndpoint string, overrides []string, a address, files *pki.Files, engine string, extra []string) []string {
	decided := []flag{
		{"etcd-servers", etcdEndpoint},
		{"bind-address", a.ip.String()},
		{"secure-port", strconv.Itoa(a.port)},
		{"tls-cert-file", files.Serving},
		{"tls-private-key-file", files.Serving},
		{"client-ca-file", files.CA},
		{"requestheader-client-ca-file", files.FrontProxyCA},
		{"requestheader-allowed-names", pki.FrontProxyUser},
		{"requestheader-username-headers", "X-Remote-User"},
		{"requestheader-uid-headers", "X-Remote-Uid"},
		{"requestheader-group-headers", "X-Remote-Group"},
		{"requestheader-extra-headers-prefix", "X-Remote-Extra-"},
		{"proxy-client-cert-file", files.FrontProxyClient},
		{"proxy-client-key-file", files.FrontProxyClient},
		{"service-account-issuer", issuer},
		{"service-account-signing-key-file", files.ServiceAccountKey},
		{"service-account-key-file", files.ServiceAccountKey},
		{"service-cluster-ip-range", serviceRange},
		{"authorization-mode", "RBAC"},
		{"anonymous-auth", "false"},
		{"allow-privileged", "true"},
		// Names of simulated nodes may be names of hosts. The default looks them up.
		{"kubelet-preferred-address-types", "InternalIP"},
		// Without these two flags, a stop waits a minute for watching clients. There is no other
		// server to which they could reconnect.
		{"shutdown-send-retry-after", "true"},
		{"shutdown-watch-termination-grace-period", "2s"},
		{"etcd-compaction-interval", compactionInterval},
	}
	if a.ip.IsLoopback() {
		// The server is reachable from this host only, so it has no address to advertise to pods.
		// Without these two flags it does not start on a host without a default route.
		decided = append(decided, flag{"advertise-address", "127.0.0.1"}, flag{"endpoint-reconciler-type", "none"})
	}
	if len(overrides) > 0 {
		decided = append(decided, flag{"etcd-servers-overrides", strings.Join(overrides, ",")})
	}
	if engine != "" {
		decided = append(decided, flag{"engine", engine})
	}
	for _, prefix := range noHosts(extra) {
		decided = append(decided, flag{apiserver.NoHostsFlag, prefix})
	}
	var args []string
	for _, f := range decided {
		if !setsFlag(extra, f.name) {
			args = append(args, "--"+f.name+"="+f.value)
		}
	}
	// Gates accumulate, so this one is set in addition to extra's. If extra sets this gate too,
	// extra's value wins.
	args = append(args, "--strata-feature-gates="+string(kubestorage.SealedContinueTokens)+"=true")
	return append(args, extra...)
}

type flag struct{ name, value string }

// ownFlags are flags of the API server for which up has its own flag, or which do not apply to an
// embedded etcd.
var ownFlags = map[string]string{
	"bind-address": "set --bind-address before the --",
	"secure-port":  "set --secure-port before the --",
	"etcd-servers": "for an existing etcd, use strata apiserver",

	"etcd-servers-overrides": "set --etcd-shards before the --, or use strata apiserver",
}

// checkServerFlags detects mistakes in the deprecated --engine and in the flags after the -- before
// any change is made. Invalid combinations of flags are detected by the API server at startup.
func checkServerFlags(engine string, extra []string) error {
	for name, advice := range ownFlags {
		if setsFlag(extra, name) {
			return cli.Misusef("--%s cannot be passed to the API server: %s", name, advice)
		}
	}
	args := extra
	if engine != "" {
		args = append([]string{"--engine=" + engine}, extra...)
	}
	probe := apiserver.NewCommand()
	probe.SetOut(io.Discard) // the API server itself prints the warnings of deprecated flags
	switch err := probe.ParseFlags(args); {
	case err != nil && !errors.Is(err, pflag.ErrHelp):
		return cli.WithHelp(cli.FlagError(err), "strata apiserver")
	case err != nil || probe.Flags().Changed("help") || probe.Flags().Changed("version"):
		return cli.Misusef("use strata apiserver for the help and version of the API server: strata apiserver --help")
	case probe.Flags().NArg() > 0:
		return cli.WithHelp(cli.Misusef("the API server takes flags only, got %q", probe.Flags().Args()), "strata apiserver")
	}
	return nil
}

// noHosts returns the addresses to which the API server does not connect. Nothing forwards those of
// services, because no node has a proxy, but a network may have hosts with them.
func noHosts(extra []string) []string {
	prefixes := []string{simulation.Network.String()}
	if !setsFlag(extra, "service-cluster-ip-range") {
		prefixes = append(prefixes, serviceRange)
	}
	return prefixes
}

// noProxy returns the value of the variable NO_PROXY with which requests to noHosts, and to
// webhooks that are services, are not sent to a proxy of the network, but refused.
func noProxy(getenv func(string) string, extra []string) string {
	names := noHosts(extra)
	if len(names) > 1 { // the addresses of services
		names = append(names, ".svc")
	}
	if given := cmp.Or(getenv("NO_PROXY"), getenv("no_proxy")); given != "" {
		names = append(names, given)
	}
	return strings.Join(names, ",")
}

// setsFlag reports whether a command line sets the flag called name. Underscores count as dashes,
// as in kube-apiserver.
func setsFlag(args []string, name string) bool {
	return slices.ContainsFunc(args, func(arg string) bool {
		given, isFlag := strings.CutPrefix(arg, "--")
		given, _, _ = strings.Cut(given, "=")
		return isFlag && strings.ReplaceAll(given, "_", "-") == name
	})
}
