package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

const (
	provenanceFile = "provenance.json"
	sumsFile       = "SHA256SUMS"

	// signatureNamespace is the namespace of the signature, which ssh-keygen -Y verify wants by -n.
	signatureNamespace = "strata-release"

	repository = "https://github.com/stratakube/strata"
)

// statement is an in-toto statement (https://in-toto.io/Statement/v1) with SLSA provenance
// (https://slsa.dev/spec/v1.0/provenance): the commit and the Go version that made the files. It
// has no time and no host, so the same commit makes the same statement.
type statement struct {
	Type          string     `json:"_type"`
	Subject       []resource `json:"subject"`
	PredicateType string     `json:"predicateType"`
	Predicate     provenance `json:"predicate"`
}

type resource struct {
	URI    string            `json:"uri,omitempty"`
	Name   string            `json:"name,omitempty"`
	Digest map[string]string `json:"digest,omitempty"`
}

type provenance struct {
	BuildDefinition struct {
		BuildType          string         `json:"buildType"`
		ExternalParameters map[string]any `json:"externalParameters"`
		Dependencies       []resource     `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	RunDetails struct {
		Builder struct {
			ID      string            `json:"id"`
			Version map[string]string `json:"version"`
		} `json:"builder"`
	} `json:"runDetails"`
}

// writeProvenance writes the provenance of all files of the release, which were built from the
// commit, to provenanceFile.
func writeProvenance(o options, commit string) error {
	entries, err := os.ReadDir(o.out) // sorted
	if err != nil {
		return err
	}
	s := statement{Type: "https://in-toto.io/Statement/v1", PredicateType: "https://slsa.dev/provenance/v1"}
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(o.out, e.Name()))
		if err != nil {
			return err
		}
		s.Subject = append(s.Subject, resource{Name: e.Name(), Digest: map[string]string{"sha256": fmt.Sprintf("%x", sha256.Sum256(content))}})
	}
	build := &s.Predicate.BuildDefinition
	build.BuildType = repository + "/blob/" + commit + "/docs/development/releases.md"
	build.ExternalParameters = map[string]any{"version": o.version, "platforms": o.platforms, "pluginPlatforms": o.plugins}
	build.Dependencies = []resource{{URI: "git+" + repository, Digest: map[string]string{"gitCommit": commit}}}
	builder := &s.Predicate.RunDetails.Builder
	builder.ID = repository + "/tools/release"
	builder.Version = map[string]string{"go": runtime.Version()} // go run uses the same for both
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.out, provenanceFile), append(text, '\n'), 0o644)
}

// sign writes the signature of the checksums with an SSH key: a file, or the public key of one that
// the SSH agent has.
func sign(o options) error {
	key, err := filepath.Abs(o.key)
	if err != nil {
		return err
	}
	_, err = output(o.out, nil, "ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", signatureNamespace, sumsFile)
	return err
}
