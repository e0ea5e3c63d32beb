package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// setup-envtest unpacks regular files only, all into one directory.
func TestPack_ForEnvtest_FilesAreRegularAndExecutable(t *testing.T) {
	packed, err := pack(envtestDir, []file{{"kube-apiserver", []byte("s"), 0o755}, {"etcd", []byte("l"), 0o755}, {"kubectl", []byte("l"), 0o755}}, commitTime)
	if err != nil {
		t.Fatal(err)
	}
	uncompressed, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for archive := tar.NewReader(uncompressed); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg && h.Mode&0o111 == 0o111 {
			found[filepath.Base(h.Name)] = true
		}
	}
	if len(found) != 3 || !found["kube-apiserver"] || !found["etcd"] || !found["kubectl"] {
		t.Errorf("regular executable files are %v", found)
	}
}

func TestPackEnvtest_OtherProgram_IsRefused(t *testing.T) {
	o := options{version: "1.2.3", platforms: []string{"linux/amd64"}, root: "../..", out: t.TempDir(), binary: os.Args[0]}
	if err := packEnvtest(o, commitTime); err == nil {
		t.Error("a program without k8s.io/kubernetes was packed")
	}
	o.platforms = []string{"linux/amd64", "linux/arm64"}
	if err := packEnvtest(o, commitTime); err == nil {
		t.Error("one binary was packed for two platforms")
	}
}
