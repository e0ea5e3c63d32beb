package history

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// kubeconfigWriter returns a server that can only write kubeconfigs.
func kubeconfigWriter(t *testing.T) *pastServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	return &pastServer{listener: listener, token: "secret"}
}

func content(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	testcheck.NoError(t, err)
	return string(data)
}

func TestWriteKubeconfig_ExistingFileOrLink_IsRefusedAndUnchanged(t *testing.T) {
	s, dir := kubeconfigWriter(t), t.TempDir()
	existing, link, dangling, absent := filepath.Join(dir, "config"), filepath.Join(dir, "link"), filepath.Join(dir, "dangling"), filepath.Join(dir, "absent")
	for _, err := range []error{os.WriteFile(existing, []byte("mine"), 0o644), os.Symlink(existing, link), os.Symlink(absent, dangling)} {
		testcheck.NoError(t, err)
	}
	for _, path := range []string{existing, link, dangling, dir} {
		if _, _, err := s.writeKubeconfig(path, ""); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "--write-kubeconfig") {
			t.Errorf("%s: error %v, want one with the path and the flag", path, err)
		}
	}
	if got := content(t, existing); got != "mine" {
		t.Errorf("the existing file has %q", got)
	}
	if _, err := os.Lstat(absent); !os.IsNotExist(err) {
		t.Errorf("the link was followed: %v", err)
	}
}

func TestWriteKubeconfig_NewFile_IsPrivateAndRemovedAtTheEnd(t *testing.T) {
	s := kubeconfigWriter(t)
	t.Setenv("TMPDIR", t.TempDir())
	for _, path := range []string{"", filepath.Join(t.TempDir(), "new")} {
		written, remove, err := s.writeKubeconfig(path, "space")
		testcheck.NoError(t, err)
		if info, err := os.Lstat(written); err != nil || info.Mode() != 0o600 {
			t.Errorf("%q: mode %v, %v; want 0600", path, info.Mode(), err)
		}
		if config, err := clientcmd.LoadFromFile(written); err != nil || config.AuthInfos["strata-history"].Token != "secret" {
			t.Errorf("%q: %v", path, err)
		}
		remove()
		if _, err := os.Lstat(written); !os.IsNotExist(err) {
			t.Errorf("%q is still there: %v", path, err)
		}
	}
	if left, err := os.ReadDir(os.TempDir()); err != nil || len(left) > 0 {
		t.Errorf("temporary files are left: %v, %v", left, err)
	}
}

func TestWriteKubeconfig_ReplacedFile_RemainsAtTheEnd(t *testing.T) {
	s, dir := kubeconfigWriter(t), t.TempDir()
	for name, replace := range map[string]func(path string) error{
		"renamed": func(path string) error {
			other := path + ".new"
			if err := os.WriteFile(other, []byte("mine"), 0o600); err != nil {
				return err
			}
			return os.Rename(other, path)
		},
		"deleted and created": func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.WriteFile(path, []byte("mine"), 0o600)
		},
		"link": func(path string) error {
			target := path + ".target"
			if err := os.Rename(path, target); err != nil {
				return err
			}
			if err := os.WriteFile(target+".other", []byte("mine"), 0o600); err != nil {
				return err
			}
			return os.Symlink(target+".other", path)
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, strings.ReplaceAll(name, " ", "-"))
			_, remove, err := s.writeKubeconfig(path, "")
			testcheck.NoError(t, err)
			testcheck.NoError(t, replace(path))
			remove()
			if got := content(t, path); got != "mine" {
				t.Errorf("the file of the user has %q", got)
			}
		})
	}
}
