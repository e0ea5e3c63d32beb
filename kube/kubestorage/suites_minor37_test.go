//go:build apiserver_v0_37 || apiserver_v0_38

package kubestorage

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/utils/clock"
)

// TestMinorSuites runs the suites that v0.36 does not export, or in a different form.
func TestMinorSuites(t *testing.T) {
	onlyInItsProcess(t)
	unsafeDeletion := func(t *testing.T) {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, true)
	}
	corrupt := errors.New("bits flipped")

	suite(t, "WatchWithUnsafeDelete", func(t *testing.T) {
		unsafeDeletion(t)
		f, swap := overridable(t)
		storagetesting.RunTestWatchWithUnsafeDelete(contextFor(t), t, overrideStore{repeating{writeAndSee{f.engine(t)}}, swap}, corrupt)
	})
	suite(t, "GetListWithErrorAggregation", func(t *testing.T) {
		unsafeDeletion(t)
		f, swap := overridable(t, atRoot)
		storagetesting.RunTestGetListWithErrorAggregation(contextFor(t), t, overrideStore{repeating{f.engine(t)}, swap}, corrupt)
	})
	suite(t, "GetListWithoutErrorAggregation", func(t *testing.T) {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, false)
		f, swap := overridable(t, atRoot)
		storagetesting.RunTestGetListWithoutErrorAggregation(contextFor(t), t, overrideStore{repeating{f.engine(t)}, swap}, corrupt)
	})
	suite(t, "DeleteWithConflictAndMissingExpectedTransformOrDecodeError", func(t *testing.T) {
		unsafeDeletion(t)
		fail := &failing{Transformer: identity.NewEncryptCheckTransformer()}
		f := setup(t, withTransformer(fail))
		storagetesting.RunTestDeleteWithConflictAndMissingExpectedTransformOrDecodeError(contextFor(t), t, f.engine(t), fail.set)
	})
	suite(t, "DeleteExpectedTransformOrDecodeError/transform", func(t *testing.T) {
		unsafeDeletion(t)
		fail := &failing{Transformer: identity.NewEncryptCheckTransformer()}
		f := setup(t, withTransformer(fail))
		storagetesting.RunTestDeleteExpectedTransformOrDecodeError(contextFor(t), t, f.engine(t), fail.set)
	})
	suite(t, "DeleteExpectedTransformOrDecodeError/decode", func(t *testing.T) {
		unsafeDeletion(t)
		// the suite stores values that cannot be decoded
		etcd3.TestOnlySetFatalOnDecodeError(t, false)
		codec := &failingCodec{Codec: testCodec()}
		f := setup(t, func(o *options) { o.store.Codec = codec })
		storagetesting.RunTestDeleteExpectedTransformOrDecodeError(contextFor(t), t, f.engine(t), codec.set)
	})
	suite(t, "DeleteWithSuggestionAndMissingExpectedTransformOrDecodeError", func(t *testing.T) {
		unsafeDeletion(t)
		storagetesting.RunTestDeleteWithSuggestionAndMissingExpectedTransformOrDecodeError(contextFor(t), t, setup(t).engine(t))
	})
}

// BenchmarkMinorSuites runs the benchmarks that v0.36 does not export, on the engine and on
// upstream's cacher.
func BenchmarkMinorSuites(b *testing.B) {
	for _, name := range []string{"engine", "cacher"} {
		b.Run("WriteThroughput/"+name, func(b *testing.B) {
			f := setup(b, withSuitePods)
			s := storage.Interface(f.engine(b))
			if name == "cacher" {
				s = f.cacher(b)
			}
			storagetesting.RunBenchmarkWriteThroughput(b.Context(), b, s, storagetesting.PrepareBenchmarkData(ofSuites(50), 3000, ofSuites(5000)), true, trackLatency(b, s))
		})
	}
}

// trackLatency watches all pods and returns the tracker of the latency of their events.
func trackLatency(b *testing.B, s storage.Interface) *storagetesting.WatchLatencyTracker {
	b.Helper()
	tracker := storagetesting.NewWatchLatencyTracker(clock.RealClock{})
	w, err := s.Watch(b.Context(), "/pods/", everything())
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	b.Cleanup(func() { w.Stop(); <-done })
	go func() {
		defer close(done)
		for e := range w.ResultChan() {
			obj := e.Object
			if shared, ok := obj.(runtime.CacheableObject); ok {
				obj = shared.GetObject()
			}
			tracker.HandleEvent(obj)
		}
	}()
	return tracker
}

// overridable returns a fixture whose transformer a suite replaces.
func overridable(t *testing.T, opts ...func(*options)) (*fixture, *generations) {
	swap := &generations{}
	swap.load(identity.NewEncryptCheckTransformer())
	return setup(t, append(opts, withTransformer(swap))...), swap
}

// overrideStore lets a suite replace the transformer of a storage.
type overrideStore struct {
	storage.Interface
	swap *generations
}

func (s overrideStore) UpdateTransformer(modify storagetesting.TransformerModifier) func() {
	before := s.swap.get()
	s.swap.load(modify(before))
	return func() { s.swap.load(before) }
}

// failing is a transformer, and failingCodec a codec, that fails on request.
type failing struct {
	value.Transformer
	fails atomic.Bool
}

func (f *failing) set(fail bool) { f.fails.Store(fail) }

func (f *failing) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	if f.fails.Load() {
		return nil, false, errors.New("bits flipped")
	}
	return f.Transformer.TransformFromStorage(ctx, data, dataCtx)
}

type failingCodec struct {
	runtime.Codec
	fails atomic.Bool
}

func (f *failingCodec) set(fail bool) { f.fails.Store(fail) }

func (f *failingCodec) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if f.fails.Load() {
		return nil, nil, errors.New("bits flipped")
	}
	return f.Codec.Decode(data, defaults, into)
}
