package kubectlcmd

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/datadir"
)

// ofUp is a kubeconfig as `strata up --ha` writes it, with a namespace and a context that the user
// has added.
const ofUp = `apiVersion: v1
kind: Config
preferences: {}
clusters:
- {name: strata, cluster: {server: "https://127.0.0.1:6443", certificate-authority-data: Y2E=}}
- {name: strata-replicas, cluster: {server: "https://localhost:6444", certificate-authority-data: Y2E=}}
users:
- {name: strata-admin, user: {client-certificate-data: Y2VydA==, client-key-data: a2V5}}
- {name: bob, user: {token: secret}}
contexts:
- {name: strata, context: {cluster: strata, user: strata-admin, namespace: kube-system}}
- {name: replicas, context: {cluster: strata-replicas, user: strata-admin}}
current-context: strata
`

// writeImplicit writes a kubeconfig to the data directory below the working directory.
func writeImplicit(t *testing.T, content string) (path string) {
	t.Helper()
	return writeImplicitIn(t, t.TempDir(), content)
}

// writeImplicitIn is writeImplicit with a working directory.
func writeImplicitIn(t *testing.T, workDir, content string) (path string) {
	t.Helper()
	t.Chdir(workDir)
	path, err := filepath.Abs(datadir.Kubeconfig("strata-data"))
	testcheck.NoError(t, err)
	testcheck.NoError(t, os.Mkdir(filepath.Dir(path), 0o700))
	testcheck.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// requireRefused requires that the implicit kubeconfig is refused with a text, for a user, unless
// the user names it.
func requireRefused(t *testing.T, path string, user int, want string) {
	t.Helper()
	got, err := kubeconfig([]string{"get", "pods"}, func(string) string { return "" }, user)
	if err == nil {
		t.Fatalf("%q is used, want an error with %q", got, want)
	}
	for _, part := range []string{path, want, "--kubeconfig", "KUBECONFIG", "STRATA_DATA"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %v, want %q in it", err, part)
		}
	}
	named := func(name string) string { return map[string]string{"STRATA_DATA": "strata-data"}[name] }
	if got, err := kubeconfig(nil, named, user); got != path || err != nil {
		t.Errorf("with STRATA_DATA: %q, %v; want %q", got, err, path)
	}
}

func TestKubeconfig_ImplicitOfUp_IsUsed(t *testing.T) {
	path := writeImplicit(t, ofUp)
	if got, err := kubeconfig(nil, func(string) string { return "" }, os.Geteuid()); got != path || err != nil {
		t.Errorf("%q, %v; want %q", got, err, path)
	}
}

func TestKubeconfig_ImplicitOfAnotherOwner_IsRefused(t *testing.T) {
	stranger := os.Geteuid() + 1
	requireRefused(t, writeImplicit(t, ofUp), stranger, fmt.Sprintf("its owner is user %d, not user %d", os.Geteuid(), stranger))
}

func TestKubeconfig_ImplicitThatOthersReach_IsRefused(t *testing.T) {
	elsewhere := t.TempDir()
	for name, test := range map[string]struct {
		change func(path string) error
		want   string
	}{
		"writable file":      {func(path string) error { return os.Chmod(path, 0o620) }, "kubeconfig has the mode 0620"},
		"readable file":      {func(path string) error { return os.Chmod(path, 0o644) }, "kubeconfig has the mode 0644"},
		"writable directory": {func(path string) error { return os.Chmod(filepath.Dir(path), 0o770) }, "strata-data has the mode 0770"},
		"linked file": {func(path string) error {
			other := filepath.Join(elsewhere, "file")
			if err := os.Rename(path, other); err != nil {
				return err
			}
			return os.Symlink(other, path)
		}, "kubeconfig is a link"},
		"linked directory": {func(path string) error {
			other := filepath.Join(elsewhere, "dir")
			if err := os.Rename(filepath.Dir(path), other); err != nil {
				return err
			}
			return os.Symlink(other, filepath.Dir(path))
		}, "strata-data is a link"},
		"directory in place of the file": {func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Mkdir(path, 0o700)
		}, "is no regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			path := writeImplicit(t, ofUp)
			testcheck.NoError(t, test.change(path))
			requireRefused(t, path, os.Geteuid(), test.want)
		})
	}
}

// TestKubeconfig_ImplicitThatOthersCanReplace_IsRefused: the kubeconfig is read again after the
// check, so nobody else may be able to put another directory in the place of strata-data, or of a
// directory above it.
func TestKubeconfig_ImplicitThatOthersCanReplace_IsRefused(t *testing.T) {
	const replace = "other users can replace its files"
	for name, test := range map[string]struct {
		workDir string
		changed string // a directory at or above workDir
		mode    os.FileMode
		want    string // none: the kubeconfig is used
	}{
		"private":                           {"work", "work", 0o700, ""},
		"readable":                          {"work", "work", 0o755, ""},
		"writable by the user's own group":  {"work", "work", 0o775, ""},
		"writable by all":                   {"work", "work", 0o777, replace},
		"sticky":                            {"work", "work", 0o777 | os.ModeSticky, ""},
		"further up":                        {"shared/work", "shared", 0o757, replace},
		"a name that separates kubeconfigs": {"work:sub", "work:sub", 0o700, "separates the files of KUBECONFIG"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			workDir := filepath.Join(dir, test.workDir)
			testcheck.NoError(t, os.MkdirAll(workDir, 0o700))
			testcheck.NoError(t, os.Chmod(filepath.Join(dir, test.changed), test.mode))
			path := writeImplicitIn(t, workDir, ofUp)
			if test.want != "" {
				requireRefused(t, path, os.Geteuid(), test.want)
				return
			}
			if got, err := kubeconfig(nil, func(string) string { return "" }, os.Geteuid()); got != path || err != nil {
				t.Errorf("%q, %v; want %q", got, err, path)
			}
		})
	}
}

func TestKubeconfig_WorkingDirectoryThroughLink_IsResolved(t *testing.T) {
	dir := t.TempDir()
	work, link := filepath.Join(dir, "work"), filepath.Join(dir, "link")
	testcheck.NoError(t, os.Mkdir(work, 0o700))
	testcheck.NoError(t, os.Symlink(work, link))
	path := writeImplicitIn(t, work, ofUp)
	t.Chdir(link)
	t.Setenv("PWD", link) // as a shell sets it; os.Getwd returns it
	if got, err := kubeconfig(nil, func(string) string { return "" }, os.Geteuid()); got != path || err != nil {
		t.Errorf("%q, %v; want %q, which the owner of the link cannot change", got, err, path)
	}
}

func TestKubeconfig_ImplicitWithContentOfOthers_IsRefused(t *testing.T) {
	const cluster, user, context = "certificate-authority-data: Y2E=", "client-key-data: a2V5", "namespace: kube-system"
	for name, test := range map[string]struct{ old, new, want string }{
		"exec":               {user, user + ", exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, interactiveMode: Never}", "the key users.user.exec"},
		"auth provider":      {user, user + ", auth-provider: {name: gcp, config: {cmd-path: sh}}", "the key users.user.auth-provider"},
		"token file":         {user, user + ", tokenFile: /etc/shadow", "the key users.user.tokenFile"},
		"certificate file":   {user, "client-certificate: /etc/c", "the key users.user.client-certificate"},
		"key file":           {user, "client-key: /etc/k", "the key users.user.client-key"},
		"password":           {user, user + ", username: a, password: b", "the key users.user.password"},
		"another case":       {user, user + ", Exec: {command: sh}", "the key users.user.Exec"},
		"extension of user":  {user, user + ", extensions: []", "the key users.user.extensions"},
		"authority file":     {cluster, "certificate-authority: /etc/ca", "the key clusters.cluster.certificate-authority"},
		"proxy":              {cluster, cluster + ", proxy-url: 'http://192.0.2.1:1'", "the key clusters.cluster.proxy-url"},
		"not verified":       {cluster, "insecure-skip-tls-verify: true", "the key clusters.cluster.insecure-skip-tls-verify"},
		"name of the server": {cluster, cluster + ", tls-server-name: x", "the key clusters.cluster.tls-server-name"},
		"extension":          {context, context + ", extensions: [{name: a, extension: {}}]", "the key contexts.context.extensions"},
		"unknown":            {"preferences: {}", "x: 1", "the key x"},
		"preference":         {"preferences: {}", "preferences: {colors: true}", "the key preferences.colors"},
		"another machine":    {"https://127.0.0.1:6443", "https://192.0.2.1:6443", `the server "https://192.0.2.1:6443" of the cluster "strata" is no address of this machine`},
		"a name":             {"https://127.0.0.1:6443", "https://localhost.example.com:6443", "is no address of this machine"},
		"not encrypted":      {"https://127.0.0.1:6443", "http://127.0.0.1:6443", "is no https URL"},
		"a user":             {"https://127.0.0.1:6443", "https://127.0.0.1:6443@192.0.2.1", "is no https URL"},
		"no server":          {`server: "https://127.0.0.1:6443"`, `server: ""`, "is no https URL"},
		"no YAML":            {"preferences: {}", "}", "is not a kubeconfig"},
		"another kind":       {"kind: Config", "kind: Secret", "is not a kubeconfig"},
		"too large":          {"preferences: {}", "#" + strings.Repeat("x", maxKubeconfig), "more than 1048576 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			content := strings.Replace(ofUp, test.old, test.new, 1)
			if content == ofUp {
				t.Fatalf("%q is not in the kubeconfig", test.old)
			}
			requireRefused(t, writeImplicit(t, content), os.Geteuid(), test.want)
		})
	}
}

func TestCheckServer_AddressOfAnInterface_IsOfThisMachine(t *testing.T) {
	addresses, err := net.InterfaceAddrs()
	if err != nil || len(addresses) == 0 {
		t.Fatalf("addresses %v, %v", addresses, err)
	}
	for _, each := range addresses {
		if err := checkServer("https://" + net.JoinHostPort(each.(*net.IPNet).IP.String(), "6443")); err != nil {
			t.Errorf("%s: %v", each, err)
		}
	}
}
