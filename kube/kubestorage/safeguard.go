package kubestorage

import (
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/client/v3/kubernetes"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror/driver"
)

// detectedSource is the data source of a cluster's mirror, and its detected capabilities.
type detectedSource struct {
	// source is nil if no resource is served from memory.
	source driver.Source
	// progressMode is the method by which the mirror finds the source's current revision.
	progressMode etcdsource.ProgressMode
	// eventsOnly: see mirror.Options.
	eventsOnly  bool
	latestReads latestReads
}

// rangeStream reports whether etcd may stream lists for memory: upstream's gate decides, which
// k8s.io/apiserver has since v0.37.
func rangeStream() bool {
	const gate featuregate.Feature = "EtcdRangeStream"
	if _, known := utilfeature.DefaultMutableFeatureGate.GetAll()[gate]; !known {
		return true
	}
	return utilfeature.DefaultFeatureGate.Enabled(gate)
}

// detectSource detects the capabilities of the servers behind the client. Error: a gate requires a
// capability that they lack.
func detectSource(client *kubernetes.Client, prefix string, opts Options) (detectedSource, error) {
	ctx, log, endpoints := context.Background(), opts.Logger, client.Endpoints()
	probe := prefix + "strata-probe" // a key that never exists
	source := etcdsource.New(client.Client, "feed", probe)
	if !rangeStream() {
		source = source.InPages()
	}
	freshness, err := etcdsource.Probe(ctx, client.Client, probe)
	if err != nil {
		log.Warn("Etcd capability probe failed; assuming that progress notifications work", "endpoints", endpoints, "reason", err.Error())
	}
	var versions error
	switch freshness {
	case etcdsource.ByProgress:
		versions = etcdsource.CheckVersions(ctx, client.Client)
	case etcdsource.ByEvents:
		log.Info("Server is not etcd or does not answer progress requests; the feed watches all keys", "endpoints", endpoints)
	case etcdsource.NoProgress:
		versions = fmt.Errorf("%w: server does not answer progress requests and rejects a watch on all keys", etcdsource.ErrProgressBug)
	}
	f := detectedSource{source: source, progressMode: freshness}
	if f.latestReads, f.eventsOnly, err = opts.safeguard(versions, endpoints); err != nil {
		return detectedSource{}, err
	}
	switch {
	case f.eventsOnly:
		f.source, f.progressMode = source.WithoutProgress(), etcdsource.NoProgress
	case freshness == etcdsource.ByEvents:
		f.source = source.OfAllKeys()
	}
	return f, nil
}

// safeguard settles the gates that depend on progress notifications, from the result of
// etcdsource.CheckVersions (KEP-2340):
//
//	new enough                     the gates decide
//	unknown                        the same, with a warning
//	too old, gate not set          off, with a warning
//	too old, gate set to true      error
//	too old, gate locked to true   error
//
// An etcd without any source of its current revision (etcdsource.NoProgress) counts as too old.
//
// On an etcd that is too old the published revision advances by events only, regardless of the
// gates. Without the gate EfficientWatchResumption it does so too: the gates that depend on
// progress are then off, and cannot be set to true.
func (o *Options) safeguard(versions error, endpoints []string) (p latestReads, eventsOnly bool, err error) {
	p = o.latestReads()
	relying := []featuregate.Feature{ConsistentListFromCache, ConsistentGetFromCache}
	switch {
	case !o.enabled(EfficientWatchResumption):
		for _, gate := range relying {
			if o.enabled(gate) && o.demanded(gate) {
				return p, true, fmt.Errorf("feature gate %s cannot be enabled while %s is disabled: it depends on etcd's progress notifications", gate, EfficientWatchResumption)
			}
		}
		return latestReads{}, true, nil
	case versions == nil:
		return p, false, nil
	case !errors.Is(versions, etcdsource.ErrProgressBug):
		o.Logger.Warn("Etcd version check failed; assuming that progress notifications are reliable", "endpoints", endpoints, "reason", versions.Error())
		return p, false, nil
	}
	for _, gate := range relying {
		if o.enabled(gate) && o.demanded(gate) {
			return p, true, fmt.Errorf("feature gate %s cannot be enabled: %w", gate, versions)
		}
	}
	o.Logger.Warn("Consistent reads are served from etcd: its progress notifications are unreliable",
		"endpoints", endpoints, "disabled", relying, "reason", versions.Error())
	return latestReads{}, true, nil
}
