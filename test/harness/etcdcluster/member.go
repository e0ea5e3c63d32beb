package etcdcluster

import (
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"github.com/stratakube/strata/test/harness"
)

// asMember is the first argument of a member's process.
const asMember = "run-as-etcd-member"

// stopGrace bounds a stop: watches never end by themselves, and etcd would wait for them.
const stopGrace = 500 * time.Millisecond

// init turns a process that was started as a member into one: the program is the test binary,
// because the command under test runs etcd with a single member only.
func init() {
	if len(os.Args) > 1 && os.Args[1] == asMember {
		if err := runMember(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "etcd member:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// syncDelay returns the file with the delay of the syncs of the member with a data directory.
func syncDelay(dir string) string { return dir + ".sync-delay" }

// SlowSyncs makes each sync of a member of StartSynced take a time longer, as on a slow disk; 0
// ends it.
func (m *Member) SlowSyncs(delay time.Duration) error {
	return os.WriteFile(syncDelay(m.Dir), []byte(delay.String()), 0o600)
}

// runMember runs a member until the process is signaled to stop.
func runMember(args []string) error {
	config := embed.NewConfig()
	var client, listen, advertise string
	flags := flag.NewFlagSet(asMember, flag.ExitOnError)
	flags.StringVar(&config.Name, "name", "", "name of the member")
	flags.StringVar(&config.Dir, "data-dir", "", "directory of the data")
	flags.StringVar(&config.InitialCluster, "initial-cluster", "", "all members: name=advertised URL for peers")
	flags.StringVar(&client, "client", "", "URL to serve clients on")
	flags.StringVar(&listen, "listen-peer", "", "URL to serve peers on")
	flags.Int64Var(&config.QuotaBackendBytes, "quota", config.QuotaBackendBytes, "size of the database beyond which it takes no writes")
	synced := flags.Bool("synced", false, "writes are synced, with the delay in the file that SlowSyncs writes")
	probe := flags.Bool("probe", false, "only report whether syncs can be delayed")
	existing := flags.Bool("existing", false, "the member joins a cluster that runs")
	flags.StringVar(&advertise, "advertise-peer", "", "URL on which peers find it")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *probe {
		return delaySyncs("")
	}
	for text, to := range map[string]*[]url.URL{
		client:    &config.ListenClientUrls,
		listen:    &config.ListenPeerUrls,
		advertise: &config.AdvertisePeerUrls,
	} {
		u, err := url.Parse(text)
		if err != nil {
			return err
		}
		*to = []url.URL{*u}
	}
	if *existing {
		config.ClusterState = embed.ClusterStateFlagExisting
	}
	config.AdvertiseClientUrls = config.ListenClientUrls
	config.UnsafeNoFsync = !harness.Fsync() && !*synced
	if *synced {
		if err := delaySyncs(syncDelay(config.Dir)); err != nil {
			return err
		}
	}
	config.LogLevel = "error"
	config.EnableGRPCGateway = false

	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	select {
	case <-stop:
	case err := <-etcd.Err():
		return err
	case <-etcd.Server.StopNotify():
		return fmt.Errorf("etcd stopped")
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		etcd.Close()
	}()
	select {
	case <-closed:
	case <-time.After(stopGrace): // acknowledged writes are in files
	}
	return nil
}
