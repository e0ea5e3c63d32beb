package apiserver

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/server/internal/cli"
)

// minProgressInterval is the minimum interval of progress requests while reads wait.
const minProgressInterval = 100 * time.Millisecond

// engineLimits are the engine's bounds: of the memory used in addition to the current state
// (history and unclaimed values per etcd cluster, representations and lists per process), of the
// history restored at the start, and of two intervals.
type engineLimits struct {
	historyAge   time.Duration
	historyBytes resource.QuantityValue
	keptBytes    resource.QuantityValue
	listBytes    resource.QuantityValue // 0: a share of the memory

	// The values below have deprecated flags only.

	unclaimedBytes   resource.QuantityValue
	replayRevisions  int64                  // 0: no replay
	replayBytes      resource.QuantityValue // fit sets it to historyBytes if its flag is not set
	progressInterval time.Duration          // 0: never
	progressTimeout  time.Duration          // at shutdown; 0: no wait
}

func defaultEngineLimits() engineLimits {
	bytes := func(n int64) resource.QuantityValue {
		return resource.QuantityValue{Quantity: *resource.NewQuantity(n, resource.BinarySI)}
	}
	return engineLimits{
		historyAge:   mirror.DefaultWindow.MaxAge,
		historyBytes: bytes(mirror.DefaultWindow.MaxBytes),
		keptBytes:    bytes(kubestorage.DefaultRepresentationBytes),
		listBytes:    bytes(0),

		unclaimedBytes:   bytes(mirror.DefaultUnclaimedBytes),
		replayRevisions:  mirror.DefaultReplay.Revisions,
		replayBytes:      bytes(mirror.DefaultReplay.Bytes),
		progressInterval: mirror.DefaultIdleProgress,
		progressTimeout:  readpath.DefaultProgressTimeout,
	}
}

func (l *engineLimits) addFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&l.historyAge, flagHistoryAge, l.historyAge, "How long changes stay in memory, for watches that resume and lists at old revisions; at most until --strata-history-bytes is reached. Must be positive.")
	fs.Var(&l.historyBytes, flagHistoryBytes, "Maximum size of the history in memory, in bytes, for each etcd cluster; a start reads at most as much from etcd. Must be positive.")
	fs.Var(&l.keptBytes, flagRepresentationBytes, "Maximum size of cached encodings of objects, in bytes; other objects are encoded at each use. Must be positive.")
	fs.Var(&l.listBytes, flagListBytes, "Maximum size of all lists in flight, in bytes; further lists wait, at most 30s, then get 429. 0 means the default.")
	cli.SetDefault(fs, flagHistoryBytes, l.historyBytes.String()+", or an eighth of the available memory if that is less")
	cli.SetDefault(fs, flagRepresentationBytes, "an eighth of the available memory, "+l.keptBytes.String()+" if that is unknown")
	cli.SetDefault(fs, flagListBytes, "an eighth of the available memory")

	fs.Var(&l.unclaimedBytes, flagUnclaimedBytes, "Maximum size of the cached values of resources without a storage, in bytes, for each etcd cluster.")
	fs.Int64Var(&l.replayRevisions, flagReplayRevisions, l.replayRevisions, "Number of etcd's last revisions that are restored at the start; 0 disables the restore.")
	fs.Var(&l.replayBytes, flagReplayBytes, "Maximum size of the keys and values that are read from etcd when history is restored, in bytes, estimated from samples.")
	fs.DurationVar(&l.progressInterval, flagProgressInterval, l.progressInterval, "Interval of progress requests to etcd while no events arrive and "+
		"watches request bookmarks; at least 100ms, 0 disables the requests.")
	fs.DurationVar(&l.progressTimeout, flagShutdownProgressTimeout, l.progressTimeout, "Maximum wait for etcd's progress at shutdown, before watches end; 0 disables the wait.")
	for name, replacement := range deprecatedLimits {
		utilruntime.Must(fs.MarkDeprecated(name, replacement+"; the flag will be removed in v0.2"))
	}
}

const (
	flagHistoryAge          = "strata-history-age"
	flagHistoryBytes        = "strata-history-bytes"
	flagRepresentationBytes = "strata-representation-bytes"
	flagListBytes           = "strata-list-bytes-in-flight"

	flagUnclaimedBytes          = "strata-unclaimed-bytes"
	flagReplayRevisions         = "strata-replay-revisions"
	flagReplayBytes             = "strata-replay-bytes"
	flagProgressInterval        = "strata-progress-interval"
	flagShutdownProgressTimeout = "strata-shutdown-progress-timeout"
)

// deprecatedLimits has, for each deprecated flag, the setting that replaces it. The flags are
// accepted for one release and hidden from --help.
var deprecatedLimits = map[string]string{
	flagUnclaimedBytes: "it has no replacement: the bound is 64Mi",
	flagReplayRevisions: "in place of 0 use --strata-feature-gates=" + string(kubestorage.WatchHistoryRestore) +
		"=false; the number is otherwise 200000",
	flagReplayBytes:             "use --" + flagHistoryBytes,
	flagProgressInterval:        "it has no replacement: the interval is 5s",
	flagShutdownProgressTimeout: "it has no replacement: the timeout is 2s",
}

// validate returns an error that names the flag.
func (l *engineLimits) validate() error {
	for _, flag := range []struct {
		name  string
		valid bool
		must  string
		value fmt.Stringer
	}{
		{flagHistoryAge, l.historyAge > 0, "be positive", l.historyAge},
		{flagHistoryBytes, l.historyBytes.Value() > 0, "be positive", &l.historyBytes},
		{flagUnclaimedBytes, l.unclaimedBytes.Value() > 0, "be positive", &l.unclaimedBytes},
		{flagRepresentationBytes, l.keptBytes.Value() > 0, "be positive", &l.keptBytes},
		{flagListBytes, l.listBytes.Value() >= 0, "not be negative", &l.listBytes},
		{flagReplayRevisions, l.replayRevisions >= 0, "not be negative", resource.NewQuantity(l.replayRevisions, resource.DecimalSI)},
		{flagReplayBytes, l.replayBytes.Value() > 0, "be positive", &l.replayBytes},
		{flagShutdownProgressTimeout, l.progressTimeout >= 0, "not be negative", l.progressTimeout},
		{flagProgressInterval, l.progressInterval == 0 || l.progressInterval >= minProgressInterval,
			"be 0 or at least " + minProgressInterval.String(), l.progressInterval},
	} {
		if !flag.valid {
			return fmt.Errorf("--%s must %s, is %s", flag.name, flag.must, flag.value)
		}
	}
	return nil
}
