package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	// firstGetKeys and maxGetKeys are the numbers of keys of the first and of the largest request.
	// etcd accepts 128 operations in a transaction by default.
	firstGetKeys = 32
	maxGetKeys   = 128
	// getRetry is the time before the first retry; it doubles.
	getRetry = 100 * time.Millisecond
)

// GetAll implements driver.Source. It reads the keys in transactions, whose number of keys follows
// the size of the values as a Pager's pages do. From a store that accepts no such transactions
// (kine; E16 of docs/etcd-contract.md), or fewer operations, it reads one key at a time.
func (s *Source) GetAll(ctx context.Context, keys []string, at mirror.Revision, found func(driver.KV) error) error {
	limit, failures := firstGetKeys, 0
	for len(keys) > 0 {
		n := min(limit, len(keys))
		kvs, err := s.get(ctx, keys[:n], at)
		if n > 1 && refusedTransaction(err) {
			limit = 1
			continue
		}
		if isTransient(err) && failures < pageAttempts { // the client retries no transactions
			select {
			case <-time.After(getRetry << failures):
				failures++
				continue
			case <-ctx.Done():
			}
		}
		if err != nil {
			return fmt.Errorf("read %d keys from %q at revision %d: %w", n, keys[0], at, translate(err))
		}
		failures = 0
		bytes := 1
		for _, kv := range kvs {
			bytes += len(kv.Key) + len(kv.Value)
			if err := found(fromKV(kv)); err != nil {
				return err
			}
		}
		if keys = keys[n:]; limit > 1 {
			limit = max(2, min(2*limit, pageBytes*n/bytes, maxGetKeys))
		}
	}
	return nil
}

// refusedTransaction reports whether reads of single keys may succeed where a transaction of
// several has failed.
func refusedTransaction(err error) bool {
	if err == nil || errors.Is(err, rpctypes.ErrCompacted) || errors.Is(err, rpctypes.ErrFutureRev) || isTransient(err) {
		return false
	}
	switch codeOf(err) {
	case codes.InvalidArgument, codes.Unimplemented, codes.Unknown, codes.ResourceExhausted:
		return true
	}
	return false
}

// isTransient reports whether a later request may succeed: a member restarts, has no leader, or is
// overloaded.
func isTransient(err error) bool {
	return errors.Is(err, rpctypes.ErrTooManyRequests) || codeOf(err) == codes.Unavailable
}

// codeOf returns the code of an error of gRPC, or of etcd's client, which hides it.
func codeOf(err error) codes.Code {
	var answer rpctypes.EtcdError
	if errors.As(err, &answer) {
		return answer.Code()
	}
	return status.Code(err)
}

// get returns those of the keys that exist at the revision, in one request.
func (s *Source) get(ctx context.Context, keys []string, at mirror.Revision) ([]*mvccpb.KeyValue, error) {
	if len(keys) == 1 {
		resp, err := attempts(ctx, pageTimeout, pageAttempts, func(ctx context.Context) (*clientv3.GetResponse, error) {
			return s.client.Get(ctx, keys[0], clientv3.WithRev(at))
		})
		if err != nil {
			return nil, err
		}
		return resp.Kvs, nil
	}
	ops := make([]clientv3.Op, len(keys))
	for i, key := range keys {
		ops[i] = clientv3.OpGet(key, clientv3.WithRev(at))
	}
	resp, err := attempts(ctx, pageTimeout, pageAttempts, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return s.client.Txn(ctx).Then(ops...).Commit()
	})
	if err != nil {
		return nil, err
	}
	var kvs []*mvccpb.KeyValue
	for _, r := range resp.Responses {
		kvs = append(kvs, r.GetResponseRange().GetKvs()...)
	}
	return kvs, nil
}
