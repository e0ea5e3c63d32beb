//go:build apiserver_v0_36

package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
)

// TestMinorSuites runs the suites that v0.36 exports in a different form.
func TestMinorSuites(t *testing.T) {
	onlyInItsProcess(t)
	suite(t, "WatchWithUnsafeDelete", func(t *testing.T) {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, true)
		swap := newSwappable(identity.NewEncryptCheckTransformer())
		f := setup(t, withTransformer(swap))
		storagetesting.RunTestWatchWithUnsafeDelete(contextFor(t), t, corruptibleStore{repeating{writeAndSee{f.engine(t)}}, swap})
	})
}

// BenchmarkMinorSuites runs the benchmarks that only v0.36 exports.
func BenchmarkMinorSuites(b *testing.B) {
	for _, match := range []metav1.ResourceVersionMatch{metav1.ResourceVersionMatchNotOlderThan, metav1.ResourceVersionMatchExact} {
		b.Run(fmt.Sprintf("StoreListCreate/match=%s", match), func(b *testing.B) {
			storagetesting.RunBenchmarkStoreListCreate(b.Context(), b, setup(b).engine(b), match)
		})
	}
}

// corruptibleStore lets a suite corrupt all stored objects.
type corruptibleStore struct {
	storage.Interface
	swap *swappable
}

func (s corruptibleStore) CorruptTransformer() func() {
	before := s.swap.get()
	s.swap.set(corrupting{before})
	return func() { s.swap.set(before) }
}

type corrupting struct{ value.Transformer }

func (corrupting) TransformFromStorage(context.Context, []byte, value.Context) ([]byte, bool, error) {
	return nil, false, errors.New("bits flipped")
}
