package apiserver

import (
	"reflect"
	"strings"
	"testing"

	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestAttachmentFromEnvironment_SelectsEngine(t *testing.T) {
	for value, want := range map[string]engineKind{"": engineUpstream, "upstream": engineUpstream, "strata": engineStrata} {
		t.Setenv(EngineVariable, value)
		a, err := AttachmentFromEnvironment()
		testcheck.NoError(t, err)
		etcd := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry", nil))
		interval := etcd.StorageConfig.CompactionInterval
		testcheck.NoError(t, a.Options(etcd))
		// The engine compacts in place of upstream's storages, and only then.
		if took := etcd.StorageConfig.CompactionInterval == 0 && a.compaction == interval; interval == 0 || took != (want == engineStrata) {
			t.Errorf("%s=%q: the engine compacts: %t, want %t", EngineVariable, value, took, want == engineStrata)
		}
		a.follow = &followedInformers{} // as Chain does
		a.Close()                       // no engine is attached
		if !reflect.DeepEqual(*a, Attachment{settings: a.settings}) {
			t.Errorf("a closed attachment keeps %+v", *a)
		}
	}
	t.Setenv(EngineVariable, "other")
	if _, err := AttachmentFromEnvironment(); err == nil || !strings.Contains(err.Error(), EngineVariable) {
		t.Errorf("%s=other: error %v, want one that names the variable", EngineVariable, err)
	}
}
