package kubectlcmd

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/server/internal/datadir"
)

// maxKubeconfig bounds the size of an implicit kubeconfig. That of strata up has 6 KB.
const maxKubeconfig = 1 << 20

// checkImplicit returns an error unless the kubeconfig at path, which no flag and no variable
// names, can be one of `strata up` of the user. A working directory may be one that others write
// to, or come from others. A kubeconfig can run commands, read files and send requests elsewhere.
// Therefore its directory and the file belong to the user, who alone has access, neither is a link,
// and the content is like that of `strata up`, with nothing but embedded certificates, tokens and
// addresses of this machine. The file is read again later, so nobody else can replace a directory
// of path, which has no links: see realPath.
func checkImplicit(path string, user int) error {
	err := checkPrivate(filepath.Dir(path), user, fs.FileMode.IsDir)
	if err == nil {
		err = checkPrivate(path, user, fs.FileMode.IsRegular)
	}
	if err == nil {
		err = checkContent(path)
	}
	if err == nil {
		err = checkParents(filepath.Dir(path), user)
	}
	if err == nil && strings.ContainsRune(path, filepath.ListSeparator) {
		err = fmt.Errorf("its path has a %q, which separates the files of KUBECONFIG", filepath.ListSeparator)
	}
	if err != nil {
		return fmt.Errorf("the kubeconfig %s of the working directory is not used: %w; if you trust it, name it with --kubeconfig or KUBECONFIG, or its directory with %s",
			path, err, datadir.EnvVar)
	}
	return nil
}

// checkPrivate returns an error unless path is of a type, and only its owner, the user, has
// permissions.
func checkPrivate(path string, user int, isType func(fs.FileMode) bool) error {
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		return err
	case info.Mode().Type() == fs.ModeSymlink:
		return fmt.Errorf("%s is a link", path)
	case !isType(info.Mode()):
		return fmt.Errorf("%s is no regular file in a directory", path)
	}
	if err := datadir.CheckOwner(info, user); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return fmt.Errorf("%s has the mode %04o, which gives permissions to other users", path, mode)
	}
	return nil
}

// realPath returns a path with the links of the working directory resolved: the owner of a link can
// let it lead elsewhere after a check. The name of the file and that of its directory remain.
func realPath(path string) (string, error) {
	dir := filepath.Dir(path)
	parent, err := filepath.EvalSymlinks(filepath.Dir(dir))
	return filepath.Join(parent, filepath.Base(dir), filepath.Base(path)), err
}

// checkParents returns an error if another user may replace the directory at path by another one,
// at one of the directories above it.
func checkParents(path string, user int) error {
	for parent := filepath.Dir(path); ; path, parent = parent, filepath.Dir(parent) {
		if parent == path {
			return nil
		}
		info, err := os.Lstat(parent)
		switch {
		case err != nil:
			return err
		case !info.IsDir():
			return fmt.Errorf("%s is no directory", parent)
		}
		if err := datadir.CheckParent(info, user); err != nil {
			return fmt.Errorf("%s: %w", parent, err)
		}
	}
}

// allowed are the keys of the kubeconfig of `strata up`, of the settings that a user may add with
// `kubectl config` without naming a file or a program, and nil for their values.
var allowed = map[string]any{
	"apiVersion": nil, "kind": nil, "preferences": map[string]any{}, "current-context": nil,
	"clusters": map[string]any{"name": nil, "cluster": map[string]any{"server": nil, "certificate-authority-data": nil}},
	"users":    map[string]any{"name": nil, "user": map[string]any{"client-certificate-data": nil, "client-key-data": nil, "token": nil}},
	"contexts": map[string]any{"name": nil, "context": map[string]any{"cluster": nil, "user": nil, "namespace": nil}},
}

// checkContent returns an error that names the first key or address that `strata up` does not
// write.
func checkContent(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxKubeconfig+1))
	if err != nil {
		return err
	}
	if len(data) > maxKubeconfig {
		return fmt.Errorf("it has more than %d bytes", maxKubeconfig)
	}
	var content any
	if err := yaml.Unmarshal(data, &content); err != nil {
		return fmt.Errorf("it is not a kubeconfig: %w", err)
	}
	if key := unknownKey(content, allowed); key != "" {
		return fmt.Errorf("it has the key %s, which strata up does not write", key)
	}
	config, err := clientcmd.Load(data)
	if err != nil {
		return fmt.Errorf("it is not a kubeconfig: %w", err)
	}
	for name, cluster := range config.Clusters {
		if err := checkServer(cluster.Server); err != nil {
			return fmt.Errorf("the server %q of the cluster %q %w", cluster.Server, name, err)
		}
	}
	return nil
}

// unknownKey returns the path of the first key, in the order of names, that is not in known, or "".
func unknownKey(value any, known map[string]any) string {
	switch value := value.(type) {
	case []any:
		for _, item := range value {
			if key := unknownKey(item, known); key != "" {
				return key
			}
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(value)) {
			below, ok := known[key]
			if !ok {
				return key
			}
			children, _ := below.(map[string]any)
			if inner := unknownKey(value[key], children); inner != "" {
				return key + "." + inner
			}
		}
	}
	return ""
}

// checkServer returns an error unless a server is an https URL of this machine, as `strata up`
// writes it.
func checkServer(server string) error {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "https" || u.User != nil {
		return errors.New("is no https URL")
	}
	if u.Hostname() == "localhost" {
		return nil
	}
	ip := net.ParseIP(u.Hostname())
	if ip == nil {
		return errors.New("is no address of this machine")
	}
	if ip.IsLoopback() {
		return nil
	}
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("may be another machine: %w", err)
	}
	for _, each := range addresses {
		if network, ok := each.(*net.IPNet); ok && network.IP.Equal(ip) {
			return nil
		}
	}
	return errors.New("is no address of this machine")
}
