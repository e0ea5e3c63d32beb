package target

import (
	"os"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

// TestWriteKubeconfig_RelativeDirectory_NamesItsFiles: the default of -data is relative.
func TestWriteKubeconfig_RelativeDirectory_NamesItsFiles(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.Mkdir("run", 0o700); err != nil {
		t.Fatal(err)
	}
	credentials, err := NewCredentials("run")
	if err != nil {
		t.Fatal(err)
	}
	engine := &Engine{baseURL: "https://127.0.0.1:1", credentials: credentials}
	if _, _, err := engine.WriteKubeconfig("run/kubeconfig"); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", "run/kubeconfig")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(config.CAFile); err != nil || config.BearerToken == "" {
		t.Errorf("certificate authority: %v; token of %d bytes", err, len(config.BearerToken))
	}
}
