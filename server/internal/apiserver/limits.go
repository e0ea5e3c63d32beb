package apiserver

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/mirror"
)

// minProgressInterval is how often progress is asked for at most while reads wait.
const minProgressInterval = 100 * time.Millisecond

// engineLimits are the bounds of what the engine holds beside the present state (of history and of unclaimed values for
// each etcd cluster, of representations for the process), and of how long it leaves an idle etcd alone.
type engineLimits struct {
	historyAge     time.Duration
	historyBytes   resource.QuantityValue
	unclaimedBytes resource.QuantityValue
	keptBytes      resource.QuantityValue

	progressInterval time.Duration // 0: never
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

		progressInterval: mirror.DefaultIdleProgress,
	}
}

func (l *engineLimits) addFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&l.historyAge, "strata-history-age", l.historyAge, "How long a change stays in memory for watches "+
		"that resume and lists of the past; what is older is read from etcd, or gone (metric strata_mirror_history_floor_revision).")
	fs.Var(&l.historyBytes, "strata-history-bytes", "Bound of the replaced and deleted values that are kept for those, "+
		"for each etcd cluster (metric strata_mirror_history_bytes). Whichever bound is reached first holds.")
	fs.Var(&l.unclaimedBytes, "strata-unclaimed-bytes", "Bound of the values kept for resources that nobody has asked for, "+
		"such as custom resources that are not served yet, for each etcd cluster (metric strata_mirror_unclaimed_bytes); "+
		"what is beyond is read from etcd when it is asked for.")
	fs.Var(&l.keptBytes, "strata-representation-bytes", "Bound of what is kept of objects in the forms that clients ask for "+
		"(JSON, protobuf, metadata only, compressed, decoded), of all resources together (metric strata_representation_bytes); "+
		"what is beyond is encoded at each use.")
	fs.DurationVar(&l.progressInterval, "strata-progress-interval", l.progressInterval, "How often etcd is asked how far it has come "+
		"while no events come and there are watches that want bookmarks (metric strata_mirror_progress_requests_total); at least 100ms, 0 turns it off. "+
		"etcd's own notifications come every 10 minutes, unless it is configured otherwise.")
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
	if l.progressInterval != 0 && l.progressInterval < minProgressInterval {
		return fmt.Errorf("--strata-progress-interval must be 0 or at least %s, is %s", minProgressInterval, l.progressInterval)
	}
	return nil
}
