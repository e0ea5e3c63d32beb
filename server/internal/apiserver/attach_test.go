package apiserver

import (
	"strings"
	"testing"

	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/storagebackend"
)

func TestAttachmentFromEnvironment_SelectsEngine(t *testing.T) {
	for value, want := range map[string]engineKind{"": engineUpstream, "upstream": engineUpstream, "strata": engineStrata} {
		t.Setenv(EngineVariable, value)
		a, err := AttachmentFromEnvironment()
		if err != nil {
			t.Fatal(err)
		}
		etcd := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry", nil))
		interval := etcd.StorageConfig.CompactionInterval
		if err := a.Options(etcd); err != nil {
			t.Fatal(err)
		}
		// The engine compacts in place of upstream's storages, and only then.
		if took := etcd.StorageConfig.CompactionInterval == 0 && a.compaction == interval; interval == 0 || took != (want == engineStrata) {
			t.Errorf("%s=%q: the engine compacts: %t, want %t", EngineVariable, value, took, want == engineStrata)
		}
		a.Close() // no engine is attached
	}
	t.Setenv(EngineVariable, "other")
	if _, err := AttachmentFromEnvironment(); err == nil || !strings.Contains(err.Error(), EngineVariable) {
		t.Errorf("%s=other: error %v, want one that names the variable", EngineVariable, err)
	}
}
