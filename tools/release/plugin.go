package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	pluginCommand  = "./server/cmd/kubectl-strata"
	pluginManifest = "deploy/krew/strata.yaml" // without platforms
	versionLine    = "\n  version: v0.0.0\n"
	releases       = repository + "/releases/download/v"
)

// pluginArchives writes an archive of the kubectl plugin for each of its platforms, with the
// licences of the modules in it and a bill of materials, and the manifest with which krew installs
// them, krew.yaml.
func pluginArchives(o options, src, work string, at time.Time) error {
	text, err := os.ReadFile(filepath.Join(src, pluginManifest))
	if err != nil {
		return err
	}
	manifest := string(text)
	if strings.Count(manifest, versionLine) != 1 || !strings.HasSuffix(manifest, "\n  platforms:\n") {
		return fmt.Errorf("%s needs the line %q, and platforms as the last one", pluginManifest, strings.TrimSpace(versionLine))
	}
	manifest = strings.Replace(manifest, versionLine, "\n  version: v"+o.version+"\n", 1)
	if first, rest, ok := strings.Cut(manifest, "\n"); ok && strings.HasPrefix(first, "#") {
		manifest = rest // it describes the file without archives
	}
	url := strings.TrimSuffix(o.url, "/")
	if url == "" {
		url = releases + o.version
	}
	for _, platform := range o.plugins {
		goos, goarch, _ := strings.Cut(platform, "/")
		program := "kubectl-strata"
		if goos == "windows" {
			program += ".exe"
		}
		packed, err := pluginArchive(o, src, work, platform, program, at)
		if err != nil {
			return fmt.Errorf("%s: %w", platform, err)
		}
		name := fmt.Sprintf("kubectl-strata-%s-%s-%s.tar.gz", o.version, goos, goarch)
		if err := os.WriteFile(filepath.Join(o.out, name), packed, 0o644); err != nil {
			return err
		}
		manifest += fmt.Sprintf("  - selector:\n      matchLabels:\n        os: %s\n        arch: %s\n    uri: %s/%s\n    sha256: %x\n    bin: %s\n",
			goos, goarch, url, name, sha256.Sum256(packed), program)
	}
	return os.WriteFile(filepath.Join(o.out, "krew.yaml"), []byte(manifest), 0o644)
}

// pluginArchive builds the plugin for a platform and packs it, with the licences and the bill of
// materials, without a directory around them.
func pluginArchive(o options, src, work, platform, program string, at time.Time) ([]byte, error) {
	env, err := environment(platform, at)
	if err != nil {
		return nil, err
	}
	binary := filepath.Join(work, "plugin-"+strings.ReplaceAll(platform, "/", "-"))
	if _, err := output(src, env, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -buildid= -X "+stamp+"="+o.version, "-o", binary, pluginCommand); err != nil {
		return nil, err
	}
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	packages, err := linkedPackages(src, env, pluginCommand)
	if err != nil {
		return nil, err
	}
	licences, err := collectLicences(info, packages)
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile(filepath.Join(src, "LICENSE"))
	if err != nil {
		return nil, err
	}
	bill, err := billOfMaterials(info, o.version, platform, content, at)
	if err != nil {
		return nil, err
	}
	files := []file{{program, content, 0o755}, {"LICENSE", own, 0o644}, {billFile, bill, 0o644}}
	for path, text := range licences {
		files = append(files, file{"licenses/" + path, text, 0o644})
	}
	return pack("", files, at)
}

// packPlugin writes the files of the plugin from the working tree.
func packPlugin(o options, at time.Time) (err error) {
	work, err := os.MkdirTemp("", "strata-release-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	root, err := filepath.Abs(o.root)
	if err != nil {
		return err
	}
	return pluginArchives(o, root, work, at)
}
