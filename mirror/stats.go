package mirror

import "sync/atomic"

type counters struct {
	ready            atomic.Bool
	events           atomic.Int64
	dropped          atomic.Int64
	listedKeys       atomic.Int64
	relists          atomic.Int64
	reconnects       atomic.Int64
	divergences      atomic.Int64
	revisionReads    atomic.Int64
	progressRequests atomic.Int64
	historyBytes     atomic.Int64
	historyFloor     atomic.Int64
	compacted        atomic.Int64
}

// Stats is a reading of a mirror's counters.
type Stats struct {
	Ready            bool     // the first list is in place
	Clock            Revision // the published revision
	Compacted        Revision // versions below were dropped because etcd was compacted
	HistoryFloor     Revision // history reaches back to here, 0 if nothing was dropped yet
	HistoryBytes     int64    // stored bytes that only history keeps alive
	HistoryLimit     int64    // their bound, Window.MaxBytes
	Events           int64    // events applied
	Dropped          int64    // events of excluded resources
	ListedKeys       int64    // keys listed, all lists together
	Relists          int64    // times the whole prefix had to be listed anew, or could not be listed
	Reconnects       int64    // times the feed was resumed
	Divergences      int64    // resources listed anew because the feed contradicted what was held
	RevisionReads    int64    // linearizable reads of etcd's revision
	ProgressRequests int64    // progress requests sent
}

// Stats returns the counters. Cost is a few loads; readings are not of one moment.
func (m *Mirror) Stats() Stats {
	c := &m.stats
	return Stats{
		Ready:            c.ready.Load(),
		Clock:            m.Clock(),
		Compacted:        c.compacted.Load(),
		HistoryFloor:     c.historyFloor.Load(),
		HistoryBytes:     c.historyBytes.Load(),
		HistoryLimit:     m.opts.Window.MaxBytes,
		Events:           c.events.Load(),
		Dropped:          c.dropped.Load(),
		ListedKeys:       c.listedKeys.Load(),
		Relists:          c.relists.Load(),
		Reconnects:       c.reconnects.Load(),
		Divergences:      c.divergences.Load(),
		RevisionReads:    c.revisionReads.Load(),
		ProgressRequests: c.progressRequests.Load(),
	}
}
