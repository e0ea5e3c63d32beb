package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// operator is a project whose tests start a control plane with controller-runtime's envtest.
type operator struct {
	Name     string
	Path     string // of the module
	Version  string
	Edit     []string // arguments of go mod edit: the module may lack folders of its repository
	Packages []string
}

// operators are built in the workspace of the server, so that no second release of the libraries of
// Kubernetes is compiled. Their own go.mod files name older ones. Packages that do not compile with
// the newer ones (six of Gatekeeper's) are left out, and so is pkg/controller/export: its TestMain
// parses arguments of its own in place of the flags of a test program.
var operators = []operator{
	{
		Name: "cluster-api", Path: "sigs.k8s.io/cluster-api", Version: "v1.14.2",
		Edit: []string{"-dropreplace=sigs.k8s.io/cluster-api/api", "-require=sigs.k8s.io/cluster-api/api@v1.14.2"},
		Packages: []string{
			"controllers/clustercache", "controllers/crdmigrator", "core/reconcilers/clusterresourceset", "core/reconcilers/machinehealthcheck",
			"core/reconcilers/machineset", "internal/util/ssa/test", "util/controller", "util/deprecated/v1beta1/patch", "util/patch/test",
		},
	},
	{
		Name: "gatekeeper", Path: "github.com/open-policy-agent/gatekeeper/v3", Version: "v3.23.1",
		Packages: []string{
			"pkg/cachemanager", "pkg/cachemanager/cachemanager_test", "pkg/controller/connectionstatus", "pkg/controller/expansion",
			"pkg/controller/externaldata", "pkg/controller/externaldatastatus", "pkg/controller/mutators/core", "pkg/controller/syncset", "pkg/watch",
		},
	},
}

var operatorsSuite = Suite{
	Name:  "operators",
	Title: "Operators",
	About: "Packages of operators whose tests start a control plane, as for controller-runtime. Upstream is kube-apiserver itself, built from its unchanged source. " +
		"They are built with the libraries of Kubernetes of the server, which are newer than those that their own go.mod files name. " +
		"They are nine of the 23 packages of Cluster API that start a control plane, and nine of Gatekeeper's 16. Of the other seven, six do not compile with these libraries, and one ignores the flags of a test program.",
	Prepare: operatorUnits,
}

// operatorUnits copies the modules and builds the programs.
func operatorUnits(ctx context.Context, env *Env) ([]Unit, error) {
	assets, err := assets(ctx, env)
	if err != nil {
		return nil, err
	}
	if assets[Upstream], err = stockAssets(ctx, env, assets[Upstream]); err != nil {
		return nil, err
	}
	var units []Unit
	for _, o := range operators {
		source, err := env.download(ctx, o.Path, o.Version)
		if err != nil {
			return nil, err
		}
		dir := filepath.Join(env.Bin, "operators", o.Name)
		if err := replaceCopy(source, dir); err != nil {
			return nil, err
		}
		if len(o.Edit) > 0 {
			if err := env.goRun(ctx, dir, append([]string{"mod", "edit"}, o.Edit...)...); err != nil {
				return nil, err
			}
		}
		workspace, err := env.workspaceWith(ctx, dir)
		if err != nil {
			return nil, err
		}
		for _, pkg := range o.Packages {
			unit, err := controlPlaneUnit(env.in(workspace), o.Path+" "+o.Version, dir, pkg, assets)
			if err != nil {
				return nil, err
			}
			unit.Name = o.Name + "/" + pkg
			units = append(units, unit)
		}
	}
	return units, nil
}

// workspaceWith writes a workspace of the modules of the repository and of dir, beside dir.
func (e *Env) workspaceWith(ctx context.Context, dir string) (string, error) {
	own := e.inRepository()
	modules, err := own.goOutput(ctx, e.Root, "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return "", err
	}
	file := dir + ".work"
	if err := errors.Join(os.RemoveAll(file), copyFile(own.Workspace+".sum", file+".sum")); err != nil {
		return "", err
	}
	return file, e.in(file).goRun(ctx, e.Root, append([]string{"work", "init", dir}, strings.Fields(modules)...)...)
}

// stockAssets returns a directory with the programs of dir, but with kube-apiserver itself, of the
// version that the server is built from.
func stockAssets(ctx context.Context, env *Env, dir string) (string, error) {
	kubernetes, err := env.serverModule(ctx, "k8s.io/kubernetes")
	if err != nil {
		return "", err
	}
	program := filepath.Join(env.Bin, "programs", "kube-apiserver")
	flags := "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=" + kubernetes.Version
	if err := env.inRepository().goRun(ctx, filepath.Join(env.Root, "server"), "build", flags, "-o", program, "k8s.io/kubernetes/cmd/kube-apiserver"); err != nil {
		return "", err
	}
	stock := filepath.Join(env.Bin, "assets-stock")
	if err := replaceCopy(dir, stock); err != nil {
		return "", err
	}
	script := fmt.Sprintf("#!/bin/sh\nexec %q \"$@\"\n", program)
	if err := os.WriteFile(filepath.Join(stock, "kube-apiserver"), []byte(script), 0o755); err != nil {
		return "", err
	}
	return stock, nil
}
