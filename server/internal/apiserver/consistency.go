package apiserver

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"

	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/kubestorage"
)

// minCheckInterval is the minimum interval between two comparisons of a resource with etcd.
const minCheckInterval = time.Second

// checkSettings are the flags of consistency checks.
type checkSettings struct {
	interval time.Duration // 0: on demand only
}

func defaultCheckSettings() checkSettings {
	return checkSettings{interval: consistency.DefaultInterval}
}

func (s *checkSettings) addFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&s.interval, "strata-consistency-check-interval", s.interval, "Interval at which each resource in memory is compared with etcd, "+
		"up to half of it longer at random. At least 1s; 0 disables the schedule, not the checks on demand (POST "+consistency.Path+").")
}

// validate returns an error that names the flag.
func (s *checkSettings) validate() error {
	if s.interval != 0 && s.interval < minCheckInterval {
		return fmt.Errorf("--strata-consistency-check-interval must be 0 or at least %s, is %s", minCheckInterval, s.interval)
	}
	return nil
}

// orNever returns the interval in the engine's form, in which -1 means never.
func (s *checkSettings) orNever() time.Duration {
	if s.interval == 0 {
		return -1
	}
	return s.interval
}

// mountConsistency installs the consistency check endpoint in the outermost server, behind
// authentication and authorization.
func mountConsistency(server *aggregatorapiserver.APIAggregator, engine *kubestorage.Engine) {
	server.GenericAPIServer.Handler.NonGoRestfulMux.UnlistedHandle(consistency.Path, consistency.Handler(engine.Checkers))
}
