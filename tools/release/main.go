// Command release makes the files of a release from the commit that is checked out: for each
// platform an archive of the static strata command with the files of deploy/, the licences of the
// modules in it and a software bill of materials, an archive for setup-envtest, archives of the
// kubectl plugin with the manifest for krew, the provenance and the checksums of all, and with -key
// a signature of the checksums. The same commit, version and Go version make the same bytes, in any
// directory.
//
//	go run ./release -version 1.2.3 -out ../bin/release
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	command = "./server/cmd/strata"
	stamp   = "github.com/stratakube/strata/server/internal/version.strata"

	billFile = "sbom.cdx.json" // of an archive's program
)

// semantic matches a semantic version without build metadata, which the version is a part of
// (v1.37.2+strata.1.2.3).
var semantic = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$`)

// options are the flags of the command.
type options struct {
	version   string
	platforms []string // such as linux/amd64
	root      string   // the repository
	out       string
	key       string // SSH key that signs; "" for no signature
	binary    string // pack it for setup-envtest and make nothing else; "" for a release

	plugins    []string // platforms of the kubectl plugin
	url        string   // address below which the files are published
	onlyPlugin bool     // make the files of the plugin and nothing else, from the working tree
}

func main() {
	var o options
	platforms := flag.String("platforms", "linux/amd64,linux/arm64", "comma-separated platforms")
	flag.StringVar(&o.version, "version", "", "version of the release, without the leading v (required)")
	flag.StringVar(&o.root, "root", "..", "directory of the repository")
	flag.StringVar(&o.out, "out", "", "directory of the files, which is replaced (required)")
	flag.StringVar(&o.key, "key", "", "SSH key that signs the checksums, or the public key of one in the SSH agent (default no signature)")
	flag.StringVar(&o.binary, "binary", "", "strata command to pack for setup-envtest, in place of making a release")
	plugins := flag.String("plugin-platforms", "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64,windows/amd64,windows/arm64", "comma-separated platforms of the kubectl plugin")
	flag.StringVar(&o.url, "url", "", "address below which the files are published, for the manifest of krew (default that of the release)")
	flag.BoolVar(&o.onlyPlugin, "only-plugin", false, "make the kubectl plugin and its manifest, from the working tree, in place of making a release")
	flag.Parse()
	o.platforms, o.plugins = strings.Split(*platforms, ","), strings.Split(*plugins, ",")
	if err := release(o); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func release(o options) (err error) {
	if !semantic.MatchString(o.version) {
		return fmt.Errorf("version %q is not a semantic version without a leading v: make release VERSION=1.2.3", o.version)
	}
	if o.out == "" {
		return errors.New("no -out")
	}
	switch {
	case o.binary != "":
		if err := empty(o.out); err != nil {
			return err
		}
		return packEnvtest(o, time.Unix(0, 0).UTC())
	case o.onlyPlugin:
		if err := empty(o.out); err != nil {
			return err
		}
		return packPlugin(o, time.Unix(0, 0).UTC())
	}
	if err := modulesMatch(o); err != nil {
		return err
	}
	if changed, err := output(o.root, nil, "git", "status", "--porcelain"); err != nil {
		return err
	} else if changed != "" && o.key != "" && !strings.Contains(o.version, "-") {
		return errors.New("a release is not signed beside uncommitted changes")
	} else if changed != "" {
		fmt.Fprintln(os.Stderr, "release: uncommitted changes are not part of the release")
	}
	work, err := os.MkdirTemp("", "strata-release-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	// The files are those of the commit, whatever the checkout has besides.
	src := filepath.Join(work, "src")
	root, err := filepath.Abs(o.root)
	if err != nil {
		return err
	}
	if _, err := output(work, nil, "git", "clone", "-q", "--shared", root, src); err != nil {
		return err
	}
	text, err := output(src, nil, "git", "log", "-1", "--format=%ct %H")
	if err != nil {
		return err
	}
	unix, commit, _ := strings.Cut(text, " ")
	seconds, err := strconv.ParseInt(unix, 10, 64)
	if err != nil {
		return err
	}
	if err := empty(o.out); err != nil {
		return err
	}
	for _, platform := range o.platforms {
		if err := releasePlatform(o, src, work, platform, time.Unix(seconds, 0).UTC()); err != nil {
			return fmt.Errorf("%s: %w", platform, err)
		}
	}
	if err := pluginArchives(o, src, work, time.Unix(seconds, 0).UTC()); err != nil {
		return fmt.Errorf("kubectl plugin: %w", err)
	}
	if err := writeProvenance(o, commit); err != nil {
		return err
	}
	if err := writeSums(o.out); err != nil || o.key == "" {
		return err
	}
	return sign(o)
}

// empty makes an empty directory, in place of one that exists.
func empty(dir string) error {
	return errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755))
}

// importable are the directories of the modules that others import; each has tags of its own.
var importable = []string{"", "kube/", "stratatest/"}

// required is the requirement of the engine in kube/go.mod, which importers of kube/ follow; the
// replacement there is for this repository only.
var required = regexp.MustCompile(`(?m)^\s*(?:require )?github\.com/stratakube/strata (\S+)$`)

// section is the heading of a release in the changelog; the first one is the newest.
var section = regexp.MustCompile(`(?m)^## \[([^\]]+)\]`)

// modulesMatch returns an error if kube/go.mod requires another version of the engine than that of
// the release, if the changelog has no section for it, or if a patch version has incompatible
// changes there. Tags that the commit lacks are an error for a signed release, otherwise a warning.
// A pre-release is not imported.
func modulesMatch(o options) error {
	if strings.Contains(o.version, "-") {
		return nil
	}
	mod, err := os.ReadFile(filepath.Join(o.root, "kube", "go.mod"))
	if err != nil {
		return err
	}
	if m := required.FindSubmatch(mod); m == nil || string(m[1]) != "v"+o.version {
		return fmt.Errorf("kube/go.mod does not require github.com/stratakube/strata v%s", o.version)
	}
	changes, err := os.ReadFile(filepath.Join(o.root, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	if m := section.FindSubmatch(changes); m == nil || string(m[1]) != o.version {
		return fmt.Errorf("the first section of CHANGELOG.md is not that of %s", o.version)
	}
	newest, _, _ := strings.Cut(string(changes[section.FindIndex(changes)[1]:]), "\n## [")
	if !strings.HasSuffix(o.version, ".0") && strings.Contains(newest, "\n### Incompatible changes") {
		return fmt.Errorf("%s is a patch version, and CHANGELOG.md has incompatible changes", o.version)
	}
	tags, err := output(o.root, nil, "git", "tag", "--points-at", "HEAD")
	if err != nil {
		return err
	}
	for _, module := range importable {
		tag := module + "v" + o.version
		switch {
		case slices.Contains(strings.Fields(tags), tag):
		case o.key != "":
			return fmt.Errorf("the commit has no tag %s, so that the release is not signed", tag)
		default:
			fmt.Fprintf(os.Stderr, "release: the commit has no tag %s\n", tag)
		}
	}
	return nil
}

// releasePlatform writes the archive and the bill of materials of one platform.
func releasePlatform(o options, src, work, platform string, at time.Time) error {
	env, err := environment(platform, at)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("strata-%s-%s", o.version, strings.ReplaceAll(platform, "/", "-"))
	binary := filepath.Join(work, name)
	if _, err := output(src, env, "go", "build", "-trimpath", "-buildvcs=true", "-ldflags", "-s -w -buildid= -X "+stamp+"="+o.version, "-o", binary, command); err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	if platform == runtime.GOOS+"/"+runtime.GOARCH {
		if err := checkVersion(binary, o.version, info); err != nil {
			return err
		}
	}
	packages, err := linkedPackages(src, env, command)
	if err != nil {
		return err
	}
	licences, err := collectLicences(info, packages)
	if err != nil {
		return err
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	bill, err := billOfCommand(o, src, platform, binary, at)
	if err != nil {
		return err
	}
	files := []file{{"strata", content, 0o755}, {billFile, bill, 0o644}}
	for path, text := range licences {
		files = append(files, file{"licenses/" + path, text, 0o644})
	}
	committed, err := committedFiles(src, "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "deploy")
	if err != nil {
		return err
	}
	if err := envtestArchive(o, src, work, platform, binary, env, licences, bill, at); err != nil {
		return fmt.Errorf("archive for setup-envtest: %w", err)
	}
	packed, err := pack(name, append(files, committed...), at)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, name+".tar.gz"), packed, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.out, name+".cdx.json"), bill, 0o644)
}

// environment returns the environment of the build for a platform.
func environment(platform string, at time.Time) ([]string, error) {
	goos, goarch, ok := strings.Cut(platform, "/")
	if !ok {
		return nil, errors.New("a platform is OS/ARCHITECTURE")
	}
	return []string{
		"GOOS=" + goos, "GOARCH=" + goarch, "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=", "GOEXPERIMENT=", "GOFIPS140=off", "GOAMD64=v1", "GOARM64=v8.0",
		fmt.Sprintf("SOURCE_DATE_EPOCH=%d", at.Unix()),
	}, nil
}

// checkVersion runs the binary: it must print the version of the release and the commit.
func checkVersion(binary, version string, info *buildinfo.BuildInfo) error {
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	if settings["vcs.revision"] == "" || settings["vcs.modified"] != "false" {
		return fmt.Errorf("the binary has commit %q, modified %q", settings["vcs.revision"], settings["vcs.modified"])
	}
	for _, args := range [][]string{{"version"}, {"--version"}, {"apiserver", "--version"}} {
		got, err := output(".", nil, binary, args...)
		if err != nil {
			return err
		}
		want := fmt.Sprintf("strata      v%s (commit %.12s of ", version, settings["vcs.revision"])
		if args[0] == "apiserver" {
			want = "+strata." + version
		}
		if !strings.Contains(got, want) {
			return fmt.Errorf("strata %s prints %q without %q", strings.Join(args, " "), got, want)
		}
	}
	return nil
}

// committedFiles returns the files below the paths that git tracks, relative to the repository.
func committedFiles(src string, paths ...string) (files []file, err error) {
	listed, err := output(src, nil, "git", append([]string{"ls-files", "-z", "--"}, paths...)...)
	if err != nil {
		return nil, err
	}
	for path := range strings.SplitSeq(strings.Trim(listed, "\x00"), "\x00") {
		if strings.HasPrefix(path, "docs/benchmarks/results/") {
			continue // reports of measurements; the tables made of them stay
		}
		info, err := os.Stat(filepath.Join(src, path))
		if err != nil {
			return nil, err
		}
		content, err := os.ReadFile(filepath.Join(src, path))
		if err != nil {
			return nil, err
		}
		mode := int64(0o644)
		if info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		files = append(files, file{path, content, mode})
	}
	return files, nil
}

// writeSums writes sumsFile, in the form that sha256sum -c reads.
func writeSums(dir string) error {
	entries, err := os.ReadDir(dir) // sorted
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(content), e.Name())
	}
	return os.WriteFile(filepath.Join(dir, sumsFile), []byte(sums.String()), 0o644)
}

// output runs a program and returns its standard output without the last newline.
func output(dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GIT_") }), env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSuffix(string(out), "\n"), nil
}
