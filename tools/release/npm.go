package main

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// npmLock names the packages of npm whose files the command embeds. Their licences are beside those
// files, in the directory of a linked package, and collectLicences finds them there.
const npmLock = "server/internal/console/uplot/package-lock.json"

// npmComponents returns the packages of npm that the command embeds, with the checksums of the lock
// file.
func npmComponents(src string) (all []cdx.Component, err error) {
	data, err := os.ReadFile(filepath.Join(src, npmLock))
	if err != nil {
		return nil, err
	}
	var lock struct {
		Packages map[string]struct{ Version, Integrity, License string }
	}
	if err := json.Unmarshal(data, &lock); err != nil {
		return nil, fmt.Errorf("decode %s: %w", npmLock, err)
	}
	for path, p := range lock.Packages {
		name, ok := strings.CutPrefix(path, "node_modules/")
		if !ok {
			continue // of this repository
		}
		digest, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(p.Integrity, "sha512-"))
		if err != nil || len(digest) != 64 {
			return nil, fmt.Errorf("%s: package %s has the checksum %q, which is no SHA-512", npmLock, name, p.Integrity)
		}
		ref := "pkg:npm/" + name + "@" + p.Version
		all = append(all, cdx.Component{
			BOMRef: ref, Type: cdx.ComponentTypeLibrary, Name: name, Version: p.Version, PackageURL: ref,
			Hashes:   &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA512, Value: hex.EncodeToString(digest)}},
			Licenses: &cdx.Licenses{{License: &cdx.License{ID: p.License}}},
		})
	}
	slices.SortFunc(all, func(a, b cdx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	return all, nil
}
