package uplot

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrequire"
)

// unreachable matches the errors of npm for a registry that does not answer: those of names,
// connections and timeouts, of an overload and of the server.
var unreachable = regexp.MustCompile(`npm (error|ERR!) (code|errno) (ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ECONNABORTED|EPIPE|ENETUNREACH|EHOSTUNREACH|` +
	`ETIMEDOUT|ERR_SOCKET_TIMEOUT|ERR_STREAM_PREMATURE_CLOSE|E429|E5\d\d)\b`)

func TestUnreachable_OtherErrors_DoNotMatch(t *testing.T) {
	for text, want := range map[string]bool{
		"npm error code ENOTFOUND\nnpm error syscall getaddrinfo": true,
		"npm ERR! code ETIMEDOUT":                                 true,
		"npm error code EINTEGRITY":                               false,
		"npm error code E404":                                     false,
		"npm error code E503":                                     true,
		"npm error code EUSAGE\nnpm error `npm ci` can only install packages when your package.json and package-lock.json are in sync": false,
	} {
		if got := unreachable.MatchString(text); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// TestFiles_OfLockedVersion_EqualNpmPackage: the committed files are those of the npm package in
// package-lock.json. It is skipped without npm, or if no registry can be reached; every other error
// of npm fails it.
func TestFiles_OfLockedVersion_EqualNpmPackage(t *testing.T) {
	missing := func(why string) { testrequire.Missing(t, "npm", why) }
	npm, err := exec.LookPath("npm")
	if err != nil {
		missing(err.Error())
	}
	dir := t.TempDir()
	for _, name := range []string{"package.json", "package-lock.json"} {
		data, err := os.ReadFile(name)
		testcheck.NoError(t, err)
		testcheck.NoError(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	install := exec.CommandContext(t.Context(), npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		why := fmt.Sprintf("npm ci fails: %v\n%s", err, out)
		if !unreachable.Match(out) {
			t.Fatal(why)
		}
		missing(why)
	}
	for name, in := range map[string]string{"uPlot.esm.js": "dist", "uPlot.min.css": "dist", "LICENSE": ""} {
		want, err := os.ReadFile(filepath.Join(dir, "node_modules", "uplot", in, name))
		testcheck.NoError(t, err)
		got, err := Files.ReadFile(name)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s differs from the package (%v): run make console", name, err)
		}
	}
}

func TestLock_Version_IsThatOfTheFiles(t *testing.T) {
	data, err := os.ReadFile("package-lock.json")
	testcheck.NoError(t, err)
	var lock struct {
		Packages map[string]struct{ Version, Integrity, Resolved string }
	}
	testcheck.NoError(t, json.Unmarshal(data, &lock))
	locked := lock.Packages["node_modules/uplot"]
	if len(lock.Packages) != 2 || !strings.HasPrefix(locked.Integrity, "sha512-") || locked.Resolved != "" {
		t.Errorf("package-lock.json: %+v, want uplot with a checksum and without the address of a registry", lock.Packages)
	}
	code, err := Files.ReadFile("uPlot.esm.js")
	testcheck.NoError(t, err)
	if found := regexp.MustCompile(`uPlot \(v([0-9.]+)\)`).FindSubmatch(code); found == nil || string(found[1]) != Version || locked.Version != Version {
		t.Errorf("the version of the files is %q, that of the lock %s, that of the constant %s", found, locked.Version, Version)
	}
}
