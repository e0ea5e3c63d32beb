package stratatest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNew_BadInput_NamesObjectAndCause(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	definition := func(version, scope string) string {
		return "apiVersion: apiextensions.k8s.io/" + version + "\nkind: CustomResourceDefinition\nmetadata: {name: things.test.strata}\n" +
			"spec: {group: test.strata, scope: " + scope + ", names: {kind: Thing, plural: things}, " +
			"versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]}\n"
	}
	for name, tc := range map[string]struct {
		option Option
		want   []string
	}{
		"missing file":     {WithCRDs(filepath.Join(dir, "none.yaml")), []string{"none.yaml", "no such file"}},
		"no YAML":          {WithCRDs(write("tabs.yaml", "kind: CustomResourceDefinition\n\tx: 1\n")), []string{"tabs.yaml", "document 1"}},
		"no definition":    {WithCRDs(write("other.yaml", "kind: ConfigMap\napiVersion: v1\n")), []string{"other.yaml has none"}},
		"old version":      {WithCRDs(write("old.yaml", definition("v1beta1", "Cluster"))), []string{"old.yaml", "v1beta1", "want apiextensions.k8s.io/v1"}},
		"invalid":          {WithCRDs(write("invalid.yaml", definition("v1", "Galaxy"))), []string{"things.test.strata", "invalid.yaml", "Galaxy"}},
		"unknown flag":     {WithFlags("--nonsense"), []string{"unknown flag: --nonsense"}},
		"flag of the host": {WithFlags("--etcd-servers=http://127.0.0.1:1"), []string{"--etcd-servers", "cannot be changed"}},
		"no flag":          {WithFlags("nonsense"), []string{`"nonsense"`, "--name=value"}},
		"invalid flag":     {WithFlags("--runtime-config=nonsense/v1=true"), []string{"nonsense", "last lines of its log"}},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := New(t.Context(), tc.option)
			if err == nil {
				p.Stop()
				t.Fatal("no error")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error is %q, want %q in it", err, want)
				}
			}
			if !strings.HasPrefix(err.Error(), "stratatest: ") {
				t.Errorf("error is %q, want the package first", err)
			}
		})
	}
}

func TestStartGuest_NoStrataProgram_NamesNextStep(t *testing.T) {
	for name, tc := range map[string]struct{ binary, path, want string }{
		"none":           {"", "", "install a release"},
		"missing":        {"/nonexistent/strata", "", "$STRATA_BINARY"},
		"not executable": {"testdata/crds/widgets.yaml", "", "is not a program"},
		"directory":      {t.TempDir(), "", "is not a program"},
		"other program":  {"/bin/true", "", "another program, or an older release"},
		"other output":   {"/bin/echo", "", `printed "testserver`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(binaryEnv, tc.binary)
			t.Setenv("PATH", tc.path)
			t.Setenv("TMPDIR", t.TempDir())
			_, err := startTestServer(t.Context(), nil)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error is %v, want %q in it", err, tc.want)
			}
			if left, err := os.ReadDir(os.Getenv("TMPDIR")); err != nil || len(left) > 0 {
				t.Errorf("files left: %v (error %v)", left, err)
			}
		})
	}
}

func TestProcess_GuestIsKilled_ErrorSaysSoAndNextStartWorks(t *testing.T) {
	flags := WithFlags("--v=1") // a process of its own
	p, err := New(t.Context(), flags)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.server.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	await(t, "the failure of a call", func() bool {
		_, err = p.User("jane")
		return err != nil
	})
	if !strings.Contains(err.Error(), "the process of strata ended") || !strings.Contains(err.Error(), "last lines of its log") {
		t.Errorf("error is %q, want the end of the process and its log", err)
	}
	if _, err := os.Stat(p.server.dir); !os.IsNotExist(err) {
		t.Errorf("the directory of the process: %v, want none", err)
	}
	next, err := New(t.Context(), flags)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Stop(); err != nil {
		t.Error(err)
	}
}
