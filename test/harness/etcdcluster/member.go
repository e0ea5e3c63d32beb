package etcdcluster

import (
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
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

// syncMark returns the file that exists while a sync with a delay waits.
func syncMark(file string, delay, id any) string {
	return fmt.Sprintf("%s-%v-%v", file, delay, id)
}

// Syncing reports whether the member syncs its write-ahead log with the delay of SlowSyncs; after
// Kill, whether it was killed in such a sync.
func (m *Member) Syncing(delay time.Duration) bool {
	marks, _ := filepath.Glob(syncMark(syncDelay(m.Dir), delay, "*")) // the pattern is valid
	return len(marks) > 0
}

// runMember runs a member until the process is signaled to stop. The flags are those of etcd, and
// two more.
func runMember(args []string) error {
	config := embed.NewConfig()
	flags := flag.NewFlagSet(asMember, flag.ExitOnError)
	flags.StringVar(&config.Name, "name", "", "name of the member")
	flags.StringVar(&config.Dir, "data-dir", "", "directory of the data")
	flags.StringVar(&config.InitialCluster, "initial-cluster", "", "all members: name=advertised URL for peers")
	flags.StringVar(&config.ClusterState, "initial-cluster-state", config.ClusterState, "existing: the member joins a cluster that runs")
	for name, to := range map[string]*[]url.URL{
		"listen-client-urls":          &config.ListenClientUrls,
		"advertise-client-urls":       &config.AdvertiseClientUrls,
		"listen-peer-urls":            &config.ListenPeerUrls,
		"initial-advertise-peer-urls": &config.AdvertisePeerUrls,
	} {
		flags.Func(name, "the only URL", func(text string) error {
			u, err := url.Parse(text)
			if err == nil {
				*to = []url.URL{*u}
			}
			return err
		})
	}
	flags.Int64Var(&config.QuotaBackendBytes, "quota-backend-bytes", config.QuotaBackendBytes, "size of the database beyond which it takes no writes")
	flags.BoolVar(&config.UnsafeNoFsync, "unsafe-no-fsync", false, "writes are not synced")
	flags.StringVar(&config.LogLevel, "log-level", config.LogLevel, "least level of the log")
	synced := flags.Bool("synced", false, "writes are synced, with the delay in the file that SlowSyncs writes")
	probe := flags.Bool("probe", false, "only report whether syncs can be delayed")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *probe {
		return delaySyncs("")
	}
	if *synced {
		config.UnsafeNoFsync = false
		if err := delaySyncs(syncDelay(config.Dir)); err != nil {
			return err
		}
	}
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
