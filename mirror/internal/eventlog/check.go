package eventlog

import "fmt"

// Check returns an error if the numbers do not ascend, or lie outside the retained range; end is
// the log's end. The writer calls it. Cost is O(n); for tests.
func (p *Postings) Check(end uint64) error {
	cur := p.cur.Load()
	if cur == nil {
		return nil
	}
	for i, seq := range cur.seqs[:cur.n.Load()] {
		if seq < cur.lost || seq >= end || i > 0 && seq <= cur.seqs[i-1] {
			return fmt.Errorf("posting %d has sequence number %d, which is outside %d to %d or not ascending", i, seq, cur.lost, end)
		}
	}
	return nil
}
