package main

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// envtestDir is the directory in the archives of envtest's own binaries. setup-envtest ignores it.
const envtestDir = "controller-tools/envtest"

// envtestArchive writes an archive for setup-envtest: the strata command as kube-apiserver,
// launchers of it with the names etcd and kubectl, the bill of materials of the command, and the
// licences in one file, because setup-envtest unpacks all files into one directory. The launchers
// link the standard library only.
func envtestArchive(o options, src, work, platform, binary string, env []string, licences map[string][]byte, bill []byte, at time.Time) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	kubernetes := ""
	for _, dep := range info.Deps {
		if dep.Path == "k8s.io/kubernetes" {
			kubernetes = strings.TrimPrefix(dep.Version, "v")
		}
	}
	if kubernetes == "" {
		return fmt.Errorf("%s is not the strata command: it has no k8s.io/kubernetes", binary)
	}
	launcher := filepath.Join(work, "launcher-"+strings.ReplaceAll(platform, "/", "-"))
	if _, err := output(filepath.Join(src, "tools"), append(slices.Clone(env), "GOWORK=off"), "go", "build", "-trimpath", "-buildvcs=false",
		"-ldflags", "-s -w -buildid=", "-o", launcher, "./launcher"); err != nil {
		return err
	}
	server, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	launch, err := os.ReadFile(launcher)
	if err != nil {
		return err
	}
	var texts strings.Builder
	for _, path := range slices.Sorted(maps.Keys(licences)) {
		fmt.Fprintf(&texts, "==== %s\n\n%s\n", path, licences[path])
	}
	packed, err := pack(envtestDir, []file{
		{"kube-apiserver", server, 0o755}, {"etcd", launch, 0o755}, {"kubectl", launch, 0o755}, {"licenses.txt", []byte(texts.String()), 0o644},
		{billFile, bill, 0o644},
	}, at)
	if err != nil {
		return err
	}
	goos, goarch, _ := strings.Cut(platform, "/")
	name := fmt.Sprintf("strata-envtest-%s-kubernetes-%s-%s-%s.tar.gz", o.version, kubernetes, goos, goarch)
	return os.WriteFile(filepath.Join(o.out, name), packed, 0o644)
}

// packEnvtest writes the archive for setup-envtest of one platform with an existing binary, for
// tests of the archive.
func packEnvtest(o options, at time.Time) (err error) {
	if len(o.platforms) != 1 {
		return errors.New("-binary is of one platform")
	}
	work, err := os.MkdirTemp("", "strata-release-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	root, err := filepath.Abs(o.root)
	if err != nil {
		return err
	}
	env, err := environment(o.platforms[0], at)
	if err != nil {
		return err
	}
	own, err := os.ReadFile(filepath.Join(root, "LICENSE"))
	if err != nil {
		return err
	}
	bill, err := billOfCommand(o, root, o.platforms[0], o.binary, at)
	if err != nil {
		return err
	}
	return envtestArchive(o, root, work, o.platforms[0], o.binary, env, map[string][]byte{"strata": own}, bill, at)
}
