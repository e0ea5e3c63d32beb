//go:build !apiserver_v0_38

package kubestorage

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// suitePod is the pod of upstream's benchmarks.
type suitePod = example.Pod

var suitePods = podKind(schema.GroupResource{Resource: "pods"})

func suiteCodec() runtime.Codec { return testCodec() }

// invalidVersions returns the storage: the suites expect its errors.
func invalidVersions(s storage.Interface) storage.Interface { return s }
