package apiserver

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/stratakube/strata/mirror"
)

// memoryLimits are the bounds of what the engine holds beside the present state, per etcd cluster.
type memoryLimits struct {
	historyAge     time.Duration
	historyBytes   resource.QuantityValue
	unclaimedBytes resource.QuantityValue
}

func defaultMemoryLimits() memoryLimits {
	bytes := func(n int64) resource.QuantityValue {
		return resource.QuantityValue{Quantity: *resource.NewQuantity(n, resource.BinarySI)}
	}
	return memoryLimits{
		historyAge:     mirror.DefaultWindow.MaxAge,
		historyBytes:   bytes(mirror.DefaultWindow.MaxBytes),
		unclaimedBytes: bytes(mirror.DefaultUnclaimedBytes),
	}
}

func (l *memoryLimits) addFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&l.historyAge, "strata-history-age", l.historyAge, "How long a change stays in memory for watches "+
		"that resume and lists of the past; what is older is read from etcd, or gone (metric strata_mirror_history_floor_revision).")
	fs.Var(&l.historyBytes, "strata-history-bytes", "Bound of the replaced and deleted values that are kept for those, "+
		"for each etcd cluster (metric strata_mirror_history_bytes). Whichever bound is reached first holds.")
	fs.Var(&l.unclaimedBytes, "strata-unclaimed-bytes", "Bound of the values kept for resources that nobody has asked for, "+
		"such as custom resources that are not served yet, for each etcd cluster (metric strata_mirror_unclaimed_bytes); "+
		"what is beyond is read from etcd when it is asked for.")
}

// validate returns an error that names the flag.
func (l *memoryLimits) validate() error {
	if l.historyAge <= 0 {
		return fmt.Errorf("--strata-history-age must be positive, is %s", l.historyAge)
	}
	if l.historyBytes.Value() <= 0 {
		return fmt.Errorf("--strata-history-bytes must be positive, is %s", l.historyBytes.String())
	}
	if l.unclaimedBytes.Value() <= 0 {
		return fmt.Errorf("--strata-unclaimed-bytes must be positive, is %s", l.unclaimedBytes.String())
	}
	return nil
}
