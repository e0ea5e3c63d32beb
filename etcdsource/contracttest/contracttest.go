// Package contracttest tests the requirements of the engine on a store that speaks etcd's protocol:
// docs/etcd-contract.md lists them by number, with the reason and with the effect of a store that
// lacks one.
package contracttest

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Answer is the result of a requirement's test on a store.
type Answer string

// Yes and No are the answers of most requirements; others are named by the requirement.
const (
	Yes Answer = "yes"
	No  Answer = "no"
)

// Requirement is one requirement on a store.
type Requirement struct {
	// ID is its number in docs/etcd-contract.md and in the comments of the code that relies on it.
	ID, Name string
	// Test returns the answer of a store. An error is a broken promise without a degradation, or a
	// failure of the test. It writes keys below the store's prefix, and E13 the compaction key.
	Test func(context.Context, *Store) (Answer, error)
}

// Requirements returns all requirements in the order of their numbers. The tests may run on one
// store one after the other, not concurrently; E6 compacts it.
func Requirements() []Requirement {
	return []Requirement{
		{"E1", "linearizable revision", linearizableRevision},
		{"E2", "one watch of a range, complete and in order", orderedWatch},
		{"E3", "a revision is delivered whole", wholeRevisions},
		{"E4", "fragments of large responses", fragments},
		{"E5", "watch from an old revision", watchFromPast},
		{"E6", "a compaction to R keeps R, and cancels watches below", compaction},
		{"E7", "progress on request, after all events", progress},
		{"E8", "progress for one stream only", progressOfStream},
		{"E9", "the newest revision arrives as an event", newestIsEvent},
		{"E10", "count of writes to a key", versions},
		{"E11", "ranges without values", keysOnly},
		{"E12", "identity of the cluster", clusterID},
		{"E13", "compare-and-put of the compaction key", compareAndPut},
		{"E14", "pages of one revision", pages},
		{"E15", "a range in one stream", rangeStream},
		{"E16", "several keys in one transaction", manyKeys},
	}
}

// Store is a store under test.
type Store struct {
	// Client and Other are two clients of the store.
	Client, Other *clientv3.Client
	// Prefix is that of the keys that the tests may write. It ends with a slash.
	Prefix string

	names int
}

// key returns a key that no test has used.
func (s *Store) key(name string) string {
	s.names++
	return fmt.Sprintf("%s%s-%04d", s.Prefix, name, s.names)
}

// dir returns a prefix that no test has used.
func (s *Store) dir(name string) string { return s.key(name) + "/" }

// put writes a key in the transaction of upstream's etcd3 store, the only form that kine accepts:
// it has to be at the revision last, 0 for a key that does not exist. It returns the revision of
// the write.
func (s *Store) put(ctx context.Context, key, value string, last int64) (int64, error) {
	return s.transact(ctx, key, last, clientv3.OpPut(key, value))
}

// remove deletes a key that is at the revision last, and returns the revision of the deletion.
func (s *Store) remove(ctx context.Context, key string, last int64) (int64, error) {
	return s.transact(ctx, key, last, clientv3.OpDelete(key))
}

func (s *Store) transact(ctx context.Context, key string, last int64, op clientv3.Op) (int64, error) {
	txn := s.Client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", last)).Then(op)
	if last > 0 {
		txn = txn.Else(clientv3.OpGet(key))
	}
	resp, err := txn.Commit()
	if err == nil && !resp.Succeeded {
		err = fmt.Errorf("%s is not at revision %d", key, last)
	}
	if err != nil {
		return 0, fmt.Errorf("write %s: %w", key, err)
	}
	return resp.Header.Revision, nil
}

// fill creates n keys below dir, and returns them with their revisions, which ascend.
func (s *Store) fill(ctx context.Context, dir string, n int, value string) (keys []string, revisions []int64, err error) {
	for i := range n {
		key := fmt.Sprintf("%sk%04d", dir, i)
		rev, err := s.put(ctx, key, value, 0)
		if err != nil {
			return nil, nil, err
		}
		if i > 0 && rev <= revisions[i-1] {
			return nil, nil, fmt.Errorf("write of %s has revision %d, after %d", key, rev, revisions[i-1])
		}
		keys, revisions = append(keys, key), append(revisions, rev)
	}
	return keys, revisions, nil
}

// revision reads the revision of the store, linearizably, as a source does.
func revision(ctx context.Context, client *clientv3.Client, key string) (int64, error) {
	resp, err := client.Get(ctx, key, clientv3.WithCountOnly())
	if err != nil {
		return 0, fmt.Errorf("read the revision: %w", err)
	}
	return resp.Header.Revision, nil
}

// answerTimeout bounds the wait for an answer that a store may owe. A guess, far above the time
// that a store needs.
const answerTimeout = 10 * time.Second

// askInterval is the interval of requests for progress: a store may drop one.
const askInterval = 50 * time.Millisecond

// events returns the events of a watch until n have arrived. Errors: those of the watch, and the
// end of ctx.
func events(ctx context.Context, responses clientv3.WatchChan, n int) (all []*clientv3.Event, err error) {
	for len(all) < n {
		resp, err := next(ctx, responses)
		if err != nil {
			return all, fmt.Errorf("after %d of %d events: %w", len(all), n, err)
		}
		all = append(all, resp.Events...)
	}
	return all, nil
}

var errNoAnswer = errors.New("the watch delivered nothing in time")

// next returns the next response of a watch. Errors: that of the watch, its end, and errNoAnswer
// after answerTimeout.
func next(ctx context.Context, responses clientv3.WatchChan) (clientv3.WatchResponse, error) {
	return nextWithin(ctx, responses, answerTimeout)
}

// nextWithin is next with another timeout.
func nextWithin(ctx context.Context, responses clientv3.WatchChan, timeout time.Duration) (clientv3.WatchResponse, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case resp, ok := <-responses:
		if err := resp.Err(); err != nil {
			return resp, err
		}
		if !ok {
			return resp, errors.New("the watch has ended")
		}
		return resp, nil
	case <-timer.C:
		return clientv3.WatchResponse{}, errNoAnswer
	case <-ctx.Done():
		return clientv3.WatchResponse{}, context.Cause(ctx)
	}
}
