package clients

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// output is the output of one kubectl call.
type output struct {
	t    *testing.T
	args []string
	harness.Result
}

// run calls kubectl with input on its standard input.
func (u user) run(input string, args ...string) output {
	u.t.Helper()
	if u.namespace != "" {
		args = append([]string{"--namespace=" + u.namespace}, args...)
	}
	r, err := u.server.KubectlAs(u.ctx, u.kubeconfig, input, args...)
	harness.Check(u.t, err)
	return output{u.t, args, r}
}

// ok calls kubectl, which has to succeed.
func (u user) ok(args ...string) output {
	u.t.Helper()
	return u.okWith("", args...)
}

func (u user) okWith(input string, args ...string) output {
	u.t.Helper()
	o := u.run(input, args...)
	if o.Code != 0 {
		u.t.Fatalf("kubectl %s: exit code %d\n%s%s", strings.Join(args, " "), o.Code, o.Stdout, o.Stderr)
	}
	return o
}

// apply creates or changes the objects of manifests.
func (u user) apply(manifests string) {
	u.t.Helper()
	u.okWith(manifests, "apply", "-f", "-")
}

// fails calls kubectl, which has to fail with an error that contains each text.
func (u user) fails(want []string, args ...string) {
	u.t.Helper()
	u.failsWith("", want, args...)
}

func (u user) failsWith(input string, want []string, args ...string) {
	u.t.Helper()
	o := u.run(input, args...)
	if o.Code == 0 {
		u.t.Fatalf("kubectl %s succeeded, want an error with %q\n%s", strings.Join(args, " "), want, o.Stdout)
	}
	for _, text := range want {
		if !strings.Contains(o.Stderr, text) {
			u.t.Errorf("kubectl %s: the error is %q, want %q in it", strings.Join(args, " "), o.Stderr, text)
		}
	}
}

// prints checks the whole of standard output, without the final line break.
func (o output) prints(want string) {
	o.t.Helper()
	if got := strings.TrimSpace(o.Stdout); got != strings.TrimSpace(want) {
		o.t.Errorf("kubectl %s printed\n%s\nwant\n%s", strings.Join(o.args, " "), got, want)
	}
}

// shows checks that standard output contains all texts, in this order.
func (o output) shows(want ...string) {
	o.t.Helper()
	rest := o.Stdout
	for _, text := range want {
		_, after, found := strings.Cut(rest, text)
		if !found {
			o.t.Errorf("kubectl %s: no %q (after the previous match) in\n%s", strings.Join(o.args, " "), text, o.Stdout)
			return
		}
		rest = after
	}
}

// path writes input to a file and returns its path.
func (u user) path(name, input string) string {
	u.t.Helper()
	path := filepath.Join(u.t.TempDir(), name)
	harness.Check(u.t, os.WriteFile(path, []byte(input), 0o600))
	return path
}
