// Package etcdread reads from etcd the keys and revisions that memory cannot answer, within bounds
// (D7).
package etcdread

import (
	"context"
	"reflect"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/flight"
)

const (
	// patienceAtFirst is how long a GET waits for a member of etcd before it retries; it doubles.
	patienceAtFirst = time.Second
	// retrySeconds is the Retry-After of 504 and 429 responses.
	retrySeconds = 1
)

// Places bound the concurrent reads: each takes one place.
type Places chan struct{}

// Get reads one key with upstream's store, unless there is no place: then 429.
func (p Places) Get(ctx context.Context, etcd storage.Interface, key string, opts storage.GetOptions, out runtime.Object) error {
	select {
	case p <- struct{}{}:
		defer func() { <-p }()
		// A hanging member would block the request until its connection is closed. The client uses
		// members in turn, so one of two concurrent requests goes to another member.
		requests := 1
		for patience := patienceAtFirst; ; patience *= 2 {
			late, err := getWithin(ctx, etcd, patience, requests, key, opts, out)
			if err == nil || !late || ctx.Err() != nil {
				return err
			}
			requests = 2
		}
	default:
		return apierrors.NewTooManyRequests("too many reads are waiting for etcd", retrySeconds)
	}
}

// getWithin reads one key from etcd with so many concurrent requests. The first success counts, or
// else the last error. late: there was no answer within patience.
func getWithin(ctx context.Context, etcd storage.Interface, patience time.Duration, requests int, key string, opts storage.GetOptions, out runtime.Object) (late bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if requests == 1 {
		err = etcd.Get(ctx, key, opts, out)
		return ctx.Err() != nil, err
	}
	type answer struct {
		obj runtime.Object
		err error
	}
	answers := make(chan answer, requests)
	for range requests {
		obj := out.DeepCopyObject()
		go func() {
			answers <- answer{obj, flight.RecoverPanic(func() error { return etcd.Get(ctx, key, opts, obj) })}
		}()
	}
	for range requests {
		a := <-answers
		if err = a.err; err == nil || storage.IsNotFound(err) {
			reflect.ValueOf(out).Elem().Set(reflect.ValueOf(a.obj).Elem())
			return false, err
		}
	}
	return ctx.Err() != nil, err
}
