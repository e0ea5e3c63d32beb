package replica

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/reconcilers"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/pki"
)

// optionsOf returns the options of a replica with the flags, and the error of setOptions.
func optionsOf(t *testing.T, files *pki.Files, more ...string) (*options.ServerRunOptions, error) {
	t.Helper()
	s, o := &server{}, options.NewServerRunOptions()
	flags := pflag.NewFlagSet("replica", pflag.ContinueOnError)
	for _, set := range o.Flags().FlagSets {
		flags.AddFlagSet(set)
	}
	s.addFlags(flags)
	check(t, flags.Parse(append([]string{"--primary=https://127.0.0.1:1", "--proxy-client-cert-file=" + files.FrontProxyClient,
		"--proxy-client-key-file=" + files.FrontProxyClient}, more...)))
	return o, s.setOptions(t.Context(), flags, o)
}

// TestOptions_FlagsOfFeed_NeedEachOther: without the authorities of its clients, a feed would serve
// Secrets to everyone.
func TestOptions_FlagsOfFeed_NeedEachOther(t *testing.T) {
	files, err := pki.Ensure(t.TempDir(), []string{"127.0.0.1"}, time.Now())
	check(t, err)
	for _, alone := range []string{"--feed-bind-address=127.0.0.1:0", "--feed-client-ca-file=" + files.CA} {
		_, err := optionsOf(t, files, "--authorization-mode=RBAC", alone)
		if !cli.IsMisuse(err) || !strings.Contains(err.Error(), "need each other") {
			t.Errorf("with %s alone: error %v, want a misuse of flags that need each other", alone, err)
		}
	}
}

// TestOptions_FlagsOfPeers_HaveNoEffect: upstream would make a client of etcd for the leases of
// peers.
func TestOptions_FlagsOfPeers_HaveNoEffect(t *testing.T) {
	files, err := pki.Ensure(t.TempDir(), []string{"127.0.0.1"}, time.Now())
	check(t, err)
	o, err := optionsOf(t, files, "--authorization-mode=RBAC", "--peer-ca-file="+files.CA, "--peer-advertise-ip=127.0.0.1", "--peer-advertise-port=1")
	check(t, err)
	if o.PeerCAFile != "" || o.PeerAdvertiseAddress != (reconcilers.PeerAdvertiseAddress{}) || utilfeature.DefaultFeatureGate.Enabled(features.UnknownVersionInteroperabilityProxy) {
		t.Errorf("the flags have the effects %q, %+v, and leases of peers", o.PeerCAFile, o.PeerAdvertiseAddress)
	}
}

func TestOptions_AuthorizationThatPermitsEveryRead_IsRefused(t *testing.T) {
	dir := t.TempDir()
	files, err := pki.Ensure(dir, []string{"127.0.0.1"}, time.Now())
	check(t, err)
	configuration := func(name string, authorizers ...string) string {
		text := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n"
		for _, each := range authorizers {
			text += "- {type: " + each + ", name: " + strings.ToLower(each) + "}\n"
		}
		path := filepath.Join(dir, name)
		check(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	safe, open := configuration("safe.yaml", "Node", "RBAC"), configuration("open.yaml", "RBAC", "AlwaysAllow")
	const unset = "authorization is not configured"
	for name, test := range map[string]struct {
		flags []string
		want  []string // in the error; none: accepted
	}{
		"none":             {nil, []string{unset, "--authorization-mode", "--authorization-config", "--delegate-auth"}},
		"empty mode":       {[]string{"--authorization-mode="}, []string{unset}},
		"none, accepted":   {[]string{"--insecure-always-allow"}, []string{unset}},
		"RBAC":             {[]string{"--authorization-mode=Node,RBAC"}, nil},
		"delegated":        {[]string{"--delegate-auth"}, nil},
		"AlwaysAllow":      {[]string{"--authorization-mode=AlwaysAllow"}, []string{"--authorization-mode contains AlwaysAllow", "--insecure-always-allow"}},
		"at the end":       {[]string{"--authorization-mode=RBAC", "--authorization-mode=AlwaysAllow"}, []string{"--authorization-mode contains AlwaysAllow"}},
		"accepted":         {[]string{"--authorization-mode=AlwaysAllow", "--insecure-always-allow"}, nil},
		"file":             {[]string{"--authorization-config=" + safe}, nil},
		"open file":        {[]string{"--authorization-config=" + open}, []string{"--authorization-config=" + open + " contains AlwaysAllow", "--insecure-always-allow"}},
		"open file, taken": {[]string{"--authorization-config=" + open, "--insecure-always-allow"}, nil},
		"missing file":     {[]string{"--authorization-config=" + filepath.Join(dir, "none")}, []string{"--authorization-config", "no such file"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := optionsOf(t, files, test.flags...)
			switch {
			case len(test.want) == 0 && err != nil:
				t.Errorf("error %v, want none", err)
			case len(test.want) > 0 && err == nil:
				t.Errorf("accepted, want an error with %q", test.want)
			case len(test.want) > 0 && name != "missing file" && !cli.IsMisuse(err):
				t.Errorf("%v is no misuse", err)
			}
			for _, want := range test.want {
				if err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want %q in it", err, want)
				}
			}
		})
	}
}
