package main

import (
	"context"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/bench/internal/dataset"
)

const (
	// fewWrites and manyWrites are the numbers of objects that change per second beside the
	// measured requests.
	fewWrites, manyWrites = 300, 1_000

	// besideObjects is the number of objects that these writes change.
	besideObjects = 1_000

	// writesAtOnce is the number of writes in flight, more than etcd needs to keep up.
	writesAtOnce = 32
)

// writes are writes beside the measured requests. They go to etcd directly, from this process, with
// values that were encoded before: so their only cost to an engine is its reaction to them, and
// their cost to the machine is minimal.
type writes struct {
	client *clientv3.Client
	keys   []string
	values []string
}

// newWrites makes n writes, each of the key and value that object returns for its index.
func newWrites(s *Sample, n int, object func(i int) (key string, value []byte, err error)) (*writes, error) {
	w := &writes{client: s.Etcd.Client, keys: make([]string, n), values: make([]string, n)}
	for i := range n {
		key, value, err := object(i)
		if err != nil {
			return nil, err
		}
		w.keys[i], w.values[i] = key, string(value)
	}
	return w, nil
}

// configMapWrites change ConfigMaps drawn at random.
func configMapWrites(s *Sample) (*writes, error) {
	drawn := s.Rand.Perm(s.Data.ConfigMaps)
	return newWrites(s, min(besideObjects, len(drawn)), func(i int) (string, []byte, error) {
		cm := s.Data.ConfigMap(drawn[i], 1+s.Number)
		value, err := dataset.Encode(cm)
		return dataset.ConfigMapKey(cm.Name), value, err
	})
}

// run writes at a rate: all of them in turn, repeatedly.
func (w *writes) run(ctx context.Context, rate int, duration time.Duration) error {
	return perSecond(rate, duration, writesAtOnce).run(ctx, w.put)
}

func (w *writes) put(ctx context.Context, i int) error {
	i %= len(w.keys)
	if _, err := w.client.Put(ctx, w.keys[i], w.values[i]); err != nil {
		return fmt.Errorf("write %s: %w", w.keys[i], err)
	}
	return nil
}
