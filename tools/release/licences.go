package main

import (
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

// goPackage is a package that the command links, as go list prints it.
type goPackage struct {
	ImportPath string
	Dir        string
	Root       string // of a package of Go's own: GOROOT
	Standard   bool
	Module     *struct {
		Path    string
		Version string
		Dir     string // also of a replacement
		Replace *struct{ Path, Version string }
	}
}

// linkedPackages returns the packages that a command links on the platform of env.
func linkedPackages(src string, env []string, command string) (packages []goPackage, err error) {
	text, err := output(src, env, "go", "list", "-deps", "-json=ImportPath,Dir,Root,Standard,Module", command)
	if err != nil {
		return nil, err
	}
	for decoder := json.NewDecoder(strings.NewReader(text)); ; {
		var p goPackage
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return packages, nil
		} else if err != nil {
			return nil, err
		}
		packages = append(packages, p)
	}
}

// ofLicence matches names of files with the terms of a licence, and with notices that it requires
// to be passed on.
var (
	ofLicence = regexp.MustCompile(`(?i)^(un)?(licen[cs]e|copying|copyright)([-._].*)?$`)
	ofNotice  = regexp.MustCompile(`(?i)^(notice|authors|patents)([-._].*)?$`)
	ofSource  = regexp.MustCompile(`(?i)\.(go|s|c|h|py|sh)$`)
)

// collectLicences returns the texts of the licences of Go and of all modules in the binary, by path
// below the directory of licences: of each module its own, and those beside the linked packages of
// it, for code that it has copied. Errors: a module has no licence, or a module of the binary has
// no linked package, and its directory is unknown.
func collectLicences(info *buildinfo.BuildInfo, packages []goPackage) (map[string][]byte, error) {
	found := map[string][]byte{}
	covered := map[string]bool{}
	for _, p := range packages {
		switch {
		case p.Standard:
			if err := addTexts(found, "go", p.Root); err != nil {
				return nil, err
			}
		case p.Module == nil:
			return nil, fmt.Errorf("package %s belongs to no module", p.ImportPath)
		default:
			name := nameOf(p)
			covered[p.Module.Path] = true
			for dir := p.Dir; ; dir = filepath.Dir(dir) {
				below, err := filepath.Rel(p.Module.Dir, dir)
				if err != nil || strings.HasPrefix(below, "..") {
					return nil, fmt.Errorf("package %s in %s is not below its module in %s", p.ImportPath, dir, p.Module.Dir)
				}
				if err := addTexts(found, filepath.ToSlash(filepath.Join(name, below)), dir); err != nil {
					return nil, err
				}
				if below == "." {
					break
				}
			}
			if !own(p.Module.Path) && !hasLicence(found, name) {
				return nil, fmt.Errorf("module %s has no licence in %s", name, p.Module.Dir)
			}
		}
	}
	if !hasLicence(found, "go") {
		return nil, errors.New("the Go distribution has no licence in GOROOT")
	}
	for _, dep := range info.Deps {
		if !covered[dep.Path] {
			return nil, fmt.Errorf("module %s of the binary has no linked package", dep.Path)
		}
	}
	return found, nil
}

// own reports whether a module belongs to this repository, whose licence is in the archive's top
// directory.
func own(module string) bool {
	return module == "github.com/stratakube/strata" || strings.HasPrefix(module, "github.com/stratakube/strata/")
}

// nameOf returns the directory of a module's licences.
func nameOf(p goPackage) string {
	version := p.Module.Version
	if p.Module.Replace != nil && p.Module.Replace.Version != "" {
		version = p.Module.Replace.Version
	}
	if version == "" {
		return p.Module.Path
	}
	return p.Module.Path + "@" + version
}

// addTexts adds the licences and notices of a directory.
func addTexts(found map[string][]byte, name, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || ofSource.MatchString(e.Name()) || !ofLicence.MatchString(e.Name()) && !ofNotice.MatchString(e.Name()) {
			continue
		}
		path := name + "/" + e.Name()
		if found[path] != nil {
			continue
		}
		if found[path], err = os.ReadFile(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// hasLicence reports whether a module's top directory has a licence that is not empty.
func hasLicence(found map[string][]byte, name string) bool {
	for path, text := range found {
		if dir, file, ok := cutLast(path); ok && dir == name && ofLicence.MatchString(file) && len(strings.TrimSpace(string(text))) > 0 {
			return true
		}
	}
	return false
}

func cutLast(path string) (dir, file string, ok bool) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", path, false
	}
	return path[:i], path[i+1:], true
}

// thirdParty returns the modules of the binary that are not of this repository, with replacements
// in place of the replaced ones.
func thirdParty(info *buildinfo.BuildInfo) (modules []*debug.Module) {
	for _, dep := range info.Deps {
		if own(dep.Path) {
			continue
		}
		if dep.Replace != nil {
			dep = dep.Replace
		}
		modules = append(modules, dep)
	}
	slices.SortFunc(modules, func(a, b *debug.Module) int { return strings.Compare(a.Path, b.Path) })
	return modules
}
