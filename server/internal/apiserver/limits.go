package apiserver

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
	"github.com/stratakube/strata/mirror"
)

// minProgressInterval is the minimum interval of progress requests while reads wait.
const minProgressInterval = 100 * time.Millisecond

// engineLimits are the engine's bounds: the memory used in addition to the current state (history and unclaimed values per
// etcd cluster, representations per process), the history replayed at startup, the interval of progress requests to an idle
// etcd, and the wait for etcd's progress at shutdown.
type engineLimits struct {
	historyAge     time.Duration
	historyBytes   resource.QuantityValue
	unclaimedBytes resource.QuantityValue
	keptBytes      resource.QuantityValue
	listBytes      resource.QuantityValue // 0: a share of the memory

	replayRevisions int64 // 0: no replay
	replayBytes     resource.QuantityValue

	progressInterval time.Duration // 0: never
	progressTimeout  time.Duration // at shutdown; 0: no wait
}

func defaultEngineLimits() engineLimits {
	bytes := func(n int64) resource.QuantityValue {
		return resource.QuantityValue{Quantity: *resource.NewQuantity(n, resource.BinarySI)}
	}
	return engineLimits{
		historyAge:     mirror.DefaultWindow.MaxAge,
		historyBytes:   bytes(mirror.DefaultWindow.MaxBytes),
		unclaimedBytes: bytes(mirror.DefaultUnclaimedBytes),
		keptBytes:      bytes(kubestorage.DefaultRepresentationBytes),
		listBytes:      bytes(0),

		replayRevisions: mirror.DefaultReplay.Revisions,
		replayBytes:     bytes(mirror.DefaultReplay.Bytes),

		progressInterval: mirror.DefaultIdleProgress,
		progressTimeout:  readpath.DefaultProgressTimeout,
	}
}

func (l *engineLimits) addFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&l.historyAge, "strata-history-age", l.historyAge, "How long a change stays in memory for watches "+
		"that resume and lists of the past; what is older is read from etcd, or gone (metric strata_mirror_history_floor_revision).")
	fs.Var(&l.historyBytes, "strata-history-bytes", "Bound of what is kept for those beside the present, "+
		"for each etcd cluster: replaced and deleted values, and versions of the past (metrics strata_mirror_history_bytes, strata_mirror_version_bytes). "+
		"Whichever bound is reached first holds.")
	fs.Var(&l.unclaimedBytes, "strata-unclaimed-bytes", "Bound of the values kept for resources that nobody has asked for, "+
		"such as custom resources that are not served yet, for each etcd cluster (metric strata_mirror_unclaimed_bytes); "+
		"what is beyond is read from etcd when it is asked for.")
	fs.Var(&l.keptBytes, "strata-representation-bytes", "Bound of what is kept of objects in the forms that clients ask for "+
		"(JSON, protobuf, metadata only, compressed, decoded), of all resources together (metric strata_representation_bytes); "+
		"what is beyond is encoded at each use. Unless it is set it is no more than an eighth of the memory, as for --strata-list-bytes-in-flight.")
	fs.Var(&l.listBytes, "strata-list-bytes-in-flight", "Bound of the bytes of lists that are under way at the same time (metric strata_lists_in_flight_bytes): "+
		"encoded and sent from memory, or, of tables, YAML and indented JSON, held as decoded objects, by an estimate. Others wait within their priority level, "+
		"for half of the time that they have left and at most 30 s, and are then answered with 429. 0 is an eighth of the memory: of GOMEMLIMIT, of the control group, or of the machine, whichever is least.")
	fs.Int64Var(&l.replayRevisions, "strata-replay-revisions", l.replayRevisions, "How many of etcd's last revisions are read again when the server "+
		"starts, so that watches and lists of revisions from before are answered (metrics strata_mirror_replayed_events_total, "+
		"strata_mirror_replay_floor_revision, strata_mirror_replay_seconds); what etcd has compacted is left out, 0 restores nothing.")
	fs.Var(&l.replayBytes, "strata-replay-bytes", "Bound of the keys and values that are read then, estimated from samples, for each etcd cluster: "+
		"etcd holds as much in memory meanwhile. What is restored counts against --strata-history-bytes.")
	fs.DurationVar(&l.progressInterval, "strata-progress-interval", l.progressInterval, "How often etcd is asked how far it has come "+
		"while no events come and there are watches that want bookmarks (metric strata_mirror_progress_requests_total); at least 100ms, 0 turns it off. "+
		"etcd's own notifications come every 10 minutes, unless it is configured otherwise.")
	fs.DurationVar(&l.progressTimeout, "strata-shutdown-progress-timeout", l.progressTimeout, "How long a server that shuts down waits until it has seen all that etcd has, "+
		"before each watch gets what is due to it, then a bookmark if its client wants those, and ends (metric strata_watches_ended_total); 0 does not wait. "+
		"It begins after --shutdown-delay-duration.")
}

// validate returns an error that names the flag.
func (l *engineLimits) validate() error {
	if l.historyAge <= 0 {
		return fmt.Errorf("--strata-history-age must be positive, is %s", l.historyAge)
	}
	if l.historyBytes.Value() <= 0 {
		return fmt.Errorf("--strata-history-bytes must be positive, is %s", l.historyBytes.String())
	}
	if l.unclaimedBytes.Value() <= 0 {
		return fmt.Errorf("--strata-unclaimed-bytes must be positive, is %s", l.unclaimedBytes.String())
	}
	if l.keptBytes.Value() <= 0 {
		return fmt.Errorf("--strata-representation-bytes must be positive, is %s", l.keptBytes.String())
	}
	if l.listBytes.Value() < 0 {
		return fmt.Errorf("--strata-list-bytes-in-flight must not be negative, is %s", l.listBytes.String())
	}
	if l.replayRevisions < 0 {
		return fmt.Errorf("--strata-replay-revisions must not be negative, is %d", l.replayRevisions)
	}
	if l.replayBytes.Value() <= 0 {
		return fmt.Errorf("--strata-replay-bytes must be positive, is %s", l.replayBytes.String())
	}
	if l.progressTimeout < 0 {
		return fmt.Errorf("--strata-shutdown-progress-timeout must not be negative, is %s", l.progressTimeout)
	}
	if l.progressInterval != 0 && l.progressInterval < minProgressInterval {
		return fmt.Errorf("--strata-progress-interval must be 0 or at least %s, is %s", minProgressInterval, l.progressInterval)
	}
	return nil
}
