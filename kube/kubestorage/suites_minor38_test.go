//go:build apiserver_v0_38

package kubestorage

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"

	"github.com/stratakube/strata/kube/kind"
)

// suitePod is the pod of upstream's benchmarks.
type suitePod = corev1.Pod

var suitePods = kind.Kind{
	GroupResource: storagetesting.StoreConfigForBenchmarks().GroupResource,
	NewFunc:       storagetesting.StoreConfigForBenchmarks().NewFunc,
	NewListFunc:   storagetesting.StoreConfigForBenchmarks().NewListFunc,
	GetAttrs:      storagetesting.StoreConfigForBenchmarks().GetAttrsFunc,
}

func suiteCodec() runtime.Codec { return storagetesting.StoreConfigForBenchmarks().Codec }

// rawInvalid is a storage whose GET and WATCH return the error of an invalid resource version as it
// is parsed. Upstream's API server answers that error with 500, the engine returns 400 (D-GETRV).
type rawInvalid struct{ storage.Interface }

func invalidVersions(s storage.Interface) storage.Interface { return rawInvalid{s} }

func (s rawInvalid) Get(ctx context.Context, key string, opts storage.GetOptions, into runtime.Object) error {
	if _, err := s.Versioner().ParseResourceVersion(opts.ResourceVersion); err != nil {
		return err
	}
	return s.Interface.Get(ctx, key, opts, into)
}

func (s rawInvalid) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	if _, err := s.Versioner().ParseResourceVersion(opts.ResourceVersion); err != nil {
		return nil, err
	}
	return s.Interface.Watch(ctx, key, opts)
}
