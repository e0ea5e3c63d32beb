package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// billOfMaterials returns a bill of materials in CycloneDX JSON, from the build information of the
// binary: the command, Go, each module with the checksum of go.sum, those of this repository, and
// others. Its time is that of the commit, and it has no serial number, so that it can be
// reproduced.
func billOfMaterials(info *buildinfo.BuildInfo, version, platform string, binary []byte, at time.Time, others ...cdx.Component) ([]byte, error) {
	goos, goarch, _ := strings.Cut(platform, "/")
	sum := sha256.Sum256(binary)
	bom := cdx.NewBOM()
	main := cdx.Component{
		BOMRef: purl(info.Main.Path, "v"+version), Type: cdx.ComponentTypeApplication, Name: path.Base(info.Path), Version: "v" + version,
		PackageURL: purl(info.Main.Path, "v"+version) + "?goarch=" + goarch + "&goos=" + goos + "#cmd/" + path.Base(info.Path),
		Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
		Licenses:   &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}
	var settings []cdx.Property
	for _, s := range info.Settings {
		settings = append(settings, cdx.Property{Name: "go:build:" + s.Key, Value: s.Value})
	}
	main.Properties = &settings
	bom.Metadata = &cdx.Metadata{Timestamp: at.Format(time.RFC3339), Component: &main}
	standard := purl("std", info.GoVersion)
	components := []cdx.Component{{BOMRef: standard, Type: cdx.ComponentTypeLibrary, Name: "std", Version: info.GoVersion, PackageURL: standard}}
	refs := []string{standard}
	for _, m := range thirdParty(info) {
		ref := purl(m.Path, m.Version)
		c := cdx.Component{BOMRef: ref, Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: ref}
		digest, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:"))
		if err != nil || len(digest) != sha256.Size {
			return nil, fmt.Errorf("module %s %s has the checksum %q, which is none of go.sum", m.Path, m.Version, m.Sum)
		}
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(digest)}}
		components, refs = append(components, c), append(refs, ref)
	}
	for _, dep := range info.Deps {
		if own(dep.Path) { // of the tree, so that go.sum has no checksum
			ref := purl(dep.Path, "v"+version)
			components = append(components, cdx.Component{BOMRef: ref, Type: cdx.ComponentTypeLibrary, Name: dep.Path, Version: "v" + version,
				PackageURL: ref, Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}}})
			refs = append(refs, ref)
		}
	}
	for _, c := range others {
		components, refs = append(components, c), append(refs, c.BOMRef)
	}
	bom.Components = &components
	bom.Dependencies = &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &refs}}
	var out bytes.Buffer
	if err := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// billOfCommand returns the bill of materials of a strata command, with the packages of npm that it
// embeds.
func billOfCommand(o options, src, platform, binary string, at time.Time) ([]byte, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	npm, err := npmComponents(src)
	if err != nil {
		return nil, err
	}
	return billOfMaterials(info, o.version, platform, content, at, npm...)
}

// purl returns the package URL of a Go module.
func purl(path, version string) string {
	return "pkg:golang/" + path + "@" + strings.ReplaceAll(version, "+", "%2B")
}
