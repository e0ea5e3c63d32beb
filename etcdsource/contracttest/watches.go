package contracttest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/stratakube/strata/etcdsource"
)

// orderedWatch is E2: several writers write below a prefix; one watch returns all their writes,
// once, in revision order.
func orderedWatch(ctx context.Context, s *Store) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const writers, writes = 4, 25
	dir := s.dir("ordered")
	start, err := revision(ctx, s.Client, dir)
	if err != nil {
		return No, err
	}
	responses := s.Client.Watch(ctx, dir, clientv3.WithPrefix(), clientv3.WithRev(start+1), clientv3.WithFragment())
	var wg sync.WaitGroup
	written := make([]map[string]int64, writers) // the newest revision of each key
	errs := make([]error, writers)
	for i := range writers {
		wg.Go(func() {
			written[i] = map[string]int64{}
			for n := range writes {
				key := fmt.Sprintf("%sw%d-%d", dir, i, n%3)
				rev, err := s.put(ctx, key, fmt.Sprint(n), written[i][key])
				if err != nil {
					errs[i] = err
					return
				}
				written[i][key] = rev
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return No, err
	}
	got, err := events(ctx, responses, writers*writes)
	if err != nil {
		return No, err
	}
	last := start
	newest := map[string]int64{}
	for _, e := range got {
		if e.Kv.ModRevision <= last {
			return No, fmt.Errorf("event of %s at revision %d follows one at %d", e.Kv.Key, e.Kv.ModRevision, last)
		}
		last = e.Kv.ModRevision
		newest[string(e.Kv.Key)] = last
	}
	for _, keys := range written {
		for key, rev := range keys {
			if newest[key] != rev {
				return No, fmt.Errorf("the newest event of %s is at revision %d, want %d", key, newest[key], rev)
			}
		}
	}
	return Yes, nil
}

// oneKey is the answer to E3 and E16 of a store that refuses transactions of several keys.
const oneKey Answer = "one key"

// wholeRevisions is E3: the events of a transaction arrive in one response. A store without such
// transactions has one event for each revision.
func wholeRevisions(ctx context.Context, s *Store) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir := s.dir("whole")
	start, err := revision(ctx, s.Client, dir)
	if err != nil {
		return No, err
	}
	responses := s.Client.Watch(ctx, dir, clientv3.WithPrefix(), clientv3.WithRev(start+1), clientv3.WithFragment())
	const keys = 20
	var ops []clientv3.Op
	for i := range keys {
		ops = append(ops, clientv3.OpPut(fmt.Sprintf("%sk%02d", dir, i), "x"))
	}
	resp, err := s.Client.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		if _, err := s.put(ctx, dir+"alone", "x", 0); err != nil { // the store answers
			return No, err
		}
		return oneKey, nil
	}
	first, err := next(ctx, responses)
	if err != nil {
		return No, err
	}
	for _, e := range first.Events {
		if e.Kv.ModRevision != resp.Header.Revision {
			return No, fmt.Errorf("event of %s at revision %d, want %d", e.Kv.Key, e.Kv.ModRevision, resp.Header.Revision)
		}
	}
	if len(first.Events) != keys {
		return No, fmt.Errorf("a response has %d of the %d events of a revision", len(first.Events), keys)
	}
	return Yes, nil
}

// fragments is E4: a response of many megabytes arrives in parts. The protocol's own messages are
// read, because the client joins them.
func fragments(ctx context.Context, s *Store) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir := s.dir("fragments")
	const writes, size = 6, 1 << 20
	_, revisions, err := s.fill(ctx, dir, writes, strings.Repeat("x", size))
	if err != nil {
		return No, err
	}
	// as the client
	stream, err := pb.NewWatchClient(s.Client.ActiveConnection()).Watch(ctx, grpc.MaxCallRecvMsgSize(math.MaxInt32))
	if err != nil {
		return No, err
	}
	err = stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
		Key: []byte(dir), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(dir)), StartRevision: revisions[0], Fragment: true,
	}}})
	if err != nil {
		return No, err
	}
	fragmented := false
	for got := 0; got < writes; {
		resp, err := stream.Recv()
		if err != nil {
			return No, fmt.Errorf("after %d of %d events: %w", got, writes, err)
		}
		got += len(resp.Events)
		fragmented = fragmented || resp.Fragment
	}
	if !fragmented {
		return No, nil
	}
	return Yes, nil
}

// watchFromPast is E5: a watch that begins in the past returns every event since then.
func watchFromPast(ctx context.Context, s *Store) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir := s.dir("past")
	keys, revisions, err := s.fill(ctx, dir, 20, "x")
	if err != nil {
		return No, err
	}
	deleted, err := s.remove(ctx, keys[3], revisions[3])
	if err != nil {
		return No, err
	}
	want := append(revisions[5:], deleted)
	got, err := events(ctx, s.Client.Watch(ctx, dir, clientv3.WithPrefix(), clientv3.WithRev(revisions[5])), len(want))
	if err != nil {
		return No, err
	}
	for i, e := range got {
		if e.Kv.ModRevision != want[i] || (e.Type == clientv3.EventTypeDelete) != (want[i] == deleted) {
			return No, fmt.Errorf("event %d is %s of %s at revision %d, want revision %d", i, e.Type, e.Kv.Key, e.Kv.ModRevision, want[i])
		}
	}
	return Yes, nil
}

// Answers to E7, in addition to Yes: the feed then needs E9 or is used without progress.
const (
	noProgress  Answer = "not used"
	badProgress Answer = "unreliable"
)

// probes is the number of attempts to find progress: a busy machine may delay an answer for longer
// than a probe waits.
const probes = 5

// progress is E7: by the probes of the engine. Where it is used, progress at R follows every event
// up to R.
func progress(ctx context.Context, s *Store) (Answer, error) {
	if err := etcdsource.CheckVersions(ctx, s.Client); errors.Is(err, etcdsource.ErrProgressBug) {
		return badProgress, nil
	}
	dir := s.dir("progress")
	mode, err := etcdsource.Probe(ctx, s.Client, dir)
	for range probes - 1 {
		if err == nil && mode == etcdsource.ByProgress {
			break
		}
		mode, err = etcdsource.Probe(ctx, s.Client, dir)
	}
	if err != nil {
		return No, err
	}
	if mode != etcdsource.ByProgress {
		return noProgress, nil
	}
	ctx, cancel := context.WithCancel(named(ctx, "progress"))
	defer cancel()
	start, err := revision(ctx, s.Client, dir)
	if err != nil {
		return No, err
	}
	responses := s.Client.Watch(ctx, dir, clientv3.WithPrefix(), clientv3.WithRev(start), clientv3.WithProgressNotify())
	const rounds = 50
	reached, last := start, int64(0)
	for i := range rounds {
		key := fmt.Sprintf("%sk%d", dir, i)
		if last, err = s.put(ctx, key, "x", 0); err != nil {
			return No, err
		}
		if err := s.Client.RequestProgress(ctx); err != nil {
			return No, err
		}
	}
	for deadline := time.Now().Add(answerTimeout); reached < last; {
		resp, err := nextWithin(ctx, responses, askInterval)
		if errors.Is(err, errNoAnswer) && time.Now().Before(deadline) {
			if err = s.Client.RequestProgress(ctx); err == nil {
				continue
			}
		}
		if err != nil {
			return No, err
		}
		if resp.IsProgressNotify() {
			reached = max(reached, resp.Header.Revision)
			continue
		}
		for _, e := range resp.Events {
			if e.Kv.ModRevision <= reached {
				return No, fmt.Errorf("event at revision %d follows progress to %d", e.Kv.ModRevision, reached)
			}
			reached = max(reached, e.Kv.ModRevision-1)
		}
	}
	return Yes, nil
}

// named returns a context whose watches have a gRPC stream of their own.
func named(ctx context.Context, name string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "strata-stream", "contract-"+name)
}

// progressOfStream is E8: a request on one stream is not answered on another one.
func progressOfStream(ctx context.Context, s *Store) (Answer, error) {
	if answer, err := progress(ctx, s); answer != Yes {
		return noProgress, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir := s.dir("streams")
	start, err := revision(ctx, s.Client, dir)
	if err != nil {
		return No, err
	}
	asking := named(ctx, "asking")
	opts := []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithRev(start), clientv3.WithProgressNotify(), clientv3.WithCreatedNotify()}
	asked, silent := s.Client.Watch(asking, dir, opts...), s.Client.Watch(named(ctx, "silent"), dir, opts...)
	for _, responses := range []clientv3.WatchChan{asked, silent} {
		if resp, err := next(ctx, responses); err != nil || !resp.Created {
			return No, fmt.Errorf("create a watch: %v, %v", resp, err)
		}
	}
	if _, err := s.put(ctx, dir+"k", "x", 0); err != nil {
		// since 3.6.2 etcd reports no progress that is known
		return No, err
	}
	for i, responses := range []clientv3.WatchChan{asked, silent} {
		if _, err := events(ctx, responses, 1); err != nil {
			return No, fmt.Errorf("watch %d: %w", i, err)
		}
	}
	for deadline, answered := time.Now().Add(answerTimeout), false; !answered; {
		// A write elsewhere, so that there is progress to report.
		if _, err := s.put(ctx, s.key("elsewhere"), "x", 0); err != nil {
			return No, err
		}
		if err := s.Client.RequestProgress(asking); err != nil {
			return No, err
		}
		resp, err := nextWithin(ctx, asked, askInterval)
		if err != nil && (!errors.Is(err, errNoAnswer) || time.Now().After(deadline)) {
			return No, err
		}
		answered = resp.IsProgressNotify()
	}
	select {
	case resp := <-silent:
		return No, fmt.Errorf("a watch on another stream received %v", resp)
	default:
		return Yes, nil
	}
}

// newestIsEvent is E9: a watch of all keys receives an event at the newest revision, whichever key
// was written last.
func newestIsEvent(ctx context.Context, s *Store) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir := s.dir("newest")
	start, err := revision(ctx, s.Client, dir)
	if err != nil {
		return No, err
	}
	responses := s.Client.Watch(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithRev(start+1))
	reached := start
	for range 20 {
		if _, err := s.put(ctx, s.key("written"), "x", 0); err != nil {
			return No, err
		}
		newest, err := revision(ctx, s.Client, dir)
		if err != nil {
			return No, err
		}
		for reached < newest {
			resp, err := next(ctx, responses)
			if err != nil {
				return No, fmt.Errorf("at revision %d of %d: %w", reached, newest, err)
			}
			for _, e := range resp.Events {
				reached = max(reached, e.Kv.ModRevision)
			}
		}
	}
	return Yes, nil
}
