package replica

import (
	"fmt"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// chainFigures measures a replica that reads from another one, beside that one: reads while
// ConfigMaps of 1 KB are written, the time by which its events are later, and the cost to etcd and
// to the replica above.
func chainFigures(t *testing.T, table *harness.Figures) {
	ctx := harness.Context(t, 8*time.Minute)
	e := harness.New(t).DefaultGC()
	etcd, front, feed := e.Etcd(), e.FrontProxy(), e.Feed()
	primary := e.APIServer(etcd, append(front.TrustFlags(), harness.Unchecked(unchecked))...)
	upper := e.Replica(etcd, front, []*harness.Server{primary}, append(feed.Flags(), harness.Unchecked(unchecked))...)
	lower := e.Replica(feed.Etcd(), front, []*harness.Server{primary}, harness.Unchecked(unchecked))
	_, err := primary.API().Create(ctx, "/api/v1/namespaces/default/secrets", object{"metadata": object{"name": "quiet"}})
	harness.Check(t, err)
	client := etcd.Client()

	changes := startChanges(t, ctx, client, figureWrites)
	watches, stopWatches := watchBoth(t, ctx, upper, lower)
	below := listTimes(t, ctx, lower.API())
	above := listTimes(t, ctx, upper.API())
	behind := stopWatches(watches)
	changes.stop(t)
	for _, percent := range []int{50, 99} {
		table.Row(fmt.Sprintf("a replica of a replica: consistent LIST of a quiet resource beside %d writes/s, p%d; and the replica above", figureWrites, percent),
			part(below, percent).String(), part(above, percent).String())
	}
	for _, percent := range []int{50, 99} {
		table.Row(fmt.Sprintf("a replica of a replica: an event of a watch after the same event above, p%d of %d", percent, len(behind)), part(behind, percent).String(), "-")
	}
	harness.Check(t, lower.Stop())

	changes = startChanges(t, ctx, client, etcdWrites)
	defer changes.stop(t)
	var without, with []etcdLoad
	var alone, feeding []float64 // cores of the replica above
	for pair, second := range harness.Phases(figurePairs) {
		if second {
			lower.Restart()
			awaitCaughtUp(t, ctx, client, lower)
		}
		before, err := upper.CPU()
		harness.Check(t, err)
		began := time.Now()
		load := loadOver(t, ctx, etcd, changes)
		after, err := upper.CPU()
		harness.Check(t, err)
		cores := (after - before).Seconds() / time.Since(began).Seconds()
		if second {
			with, feeding = append(with, load), append(feeding, cores)
			harness.Check(t, lower.Stop())
		} else {
			without, alone = append(without, load), append(alone, cores)
		}
		t.Logf("pair %d, with %v: etcd %.3f, the replica above %.3f of a core", pair+1, second, load, cores)
	}
	for i := range feeding {
		feeding[i] -= alone[i]
	}
	cpu := func(l etcdLoad) float64 { return 100 * l.Cores }
	at := fmt.Sprintf("at %.0f writes/s to etcd", harness.Median(valuesOf(with, func(l etcdLoad) float64 { return l.Writes })))
	table.Row("CPU of etcd for a replica of a replica "+at, fmt.Sprintf("%.1f %% of a core", harness.Median(differences(without, with, cpu))), "-")
	table.Row("CPU of the replica above for it "+at, fmt.Sprintf("%.1f %% of a core", 100*harness.Median(feeding)), "-")
	table.Row("watch streams, and watches, of etcd for it", fmt.Sprintf("%.0f, %.0f",
		harness.Median(differences(without, with, func(l etcdLoad) float64 { return l.Streams })),
		harness.Median(differences(without, with, func(l etcdLoad) float64 { return l.Watches }))), "-")
}
