package up

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/server/internal/pki"
)

func TestServerFlags_UserFlags_TakePrecedence(t *testing.T) {
	addr := address{net.IPv4(127, 0, 0, 1), 6443}
	args := serverFlags("unix:///etcd.sock", nil, addr, &pki.Files{}, "upstream", []string{"--anonymous_auth=true", "--authorization-mode", "AlwaysAllow"})
	for _, want := range []string{"--etcd-servers=unix:///etcd.sock", "--secure-port=6443", "--engine=upstream", "--endpoint-reconciler-type=none"} {
		if !slices.Contains(args, want) {
			t.Errorf("%s is not in %q", want, args)
		}
	}
	for _, name := range []string{"anonymous", "authorization-mode"} {
		if n := strings.Count(strings.Join(args, " "), "--"+name); n != 1 {
			t.Errorf("--%s is given %d times in %q", name, n, args)
		}
	}
}

func TestCheckServerFlags_Engine(t *testing.T) {
	for name, test := range map[string]struct {
		deprecated string
		extra      []string
		want       string // in the error, "" for none
	}{
		"none":               {"", nil, ""},
		"after --":           {"", []string{"--engine=upstream"}, ""},
		"unknown after --":   {"", []string{"--engine=bogus"}, "must be strata or upstream"},
		"deprecated":         {"upstream", nil, ""},
		"unknown deprecated": {"bogus", nil, "must be strata or upstream"},
	} {
		err := checkServerFlags(test.deprecated, test.extra)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
}

func TestServerFlags_SealContinueTokensByDefault(t *testing.T) {
	const gate = "--strata-feature-gates=SealedContinueTokens="
	addr := address{net.IPv4(127, 0, 0, 1), 6443}
	extra := []string{"--strata-feature-gates=WatchBookmark=false", gate + "false"}
	args := serverFlags("unix:///etcd.sock", nil, addr, &pki.Files{}, "", extra)
	ours, theirs := slices.Index(args, gate+"true"), slices.Index(args, gate+"false")
	if ours < 0 || theirs < ours || !slices.Contains(args, extra[0]) {
		t.Errorf("ours at %d, the user's at %d in %q: the last one wins", ours, theirs, args)
	}
}

func TestServerFlags_CompactionInterval_IsLongUnlessGiven(t *testing.T) {
	const name = "--etcd-compaction-interval="
	for given, want := range map[string]string{"": name + "15m", name + "1h": name + "1h"} {
		var extra []string
		if given != "" {
			extra = []string{given}
		}
		var got []string
		for _, arg := range serverFlags("", nil, address{net.IPv4(127, 0, 0, 1), 1}, &pki.Files{}, "", extra) {
			if strings.HasPrefix(arg, name) {
				got = append(got, arg)
			}
		}
		if len(got) != 1 || got[0] != want {
			t.Errorf("extra %q: %q, want %s", extra, got, want)
		}
	}
}

func TestServerFlags_LoopbackAddress_IsNotAdvertised(t *testing.T) {
	for ip, want := range map[string]bool{"127.0.0.1": false, "::1": false, "0.0.0.0": true, "192.0.2.1": true} {
		args := serverFlags("", nil, address{net.ParseIP(ip), 1}, &pki.Files{}, "", nil)
		if got := !slices.Contains(args, "--endpoint-reconciler-type=none"); got != want {
			t.Errorf("bound to %s: advertised is %t", ip, got)
		}
	}
}

func TestAddressHosts_IncludeReachableNames(t *testing.T) {
	for ip, extra := range map[string][]string{"127.0.0.1": nil, "192.0.2.1": {"api.example.test"}, "0.0.0.0": {"192.0.2.7"}} {
		hosts := address{net.ParseIP(ip), 1}.hosts(extra)
		want := append([]string{"localhost", "127.0.0.1", "::1", "kubernetes.default.svc", "10.0.0.1"}, extra...)
		if ip != "0.0.0.0" {
			want = append(want, ip)
		}
		for _, host := range want {
			if !slices.Contains(hosts, host) {
				t.Errorf("bound to %s: %s is not in %q", ip, host, hosts)
			}
		}
		if slices.Contains(hosts, "0.0.0.0") {
			t.Errorf("bound to %s: %q has the unspecified address 0.0.0.0", ip, hosts)
		}
	}
}

func TestQuote_EscapesForShell(t *testing.T) {
	for path, want := range map[string]string{
		"/home/me/strata-data": "/home/me/strata-data",
		"/with space":          "'/with space'",
		"/it's":                `'/it'\''s'`,
		"/$HOME":               "'/$HOME'",
	} {
		if got := quote(path); got != want {
			t.Errorf("quote(%q) = %s, want %s", path, got, want)
		}
	}
}

// TestServerFlags_FrontProxy_NamesAllFieldsOfUsers: without the header of UIDs, requests through a
// replica would lose the UID of their user.
func TestServerFlags_FrontProxy_NamesAllFieldsOfUsers(t *testing.T) {
	args := serverFlags("unix:///etcd.sock", nil, address{net.IPv4(127, 0, 0, 1), 6443}, &pki.Files{}, "", nil)
	for _, want := range []string{"--requestheader-username-headers=X-Remote-User", "--requestheader-uid-headers=X-Remote-Uid", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-"} {
		if !slices.Contains(args, want) {
			t.Errorf("%s is not in %q", want, args)
		}
	}
}

func TestNoHosts_RangeOfServices_IsThatOfTheServer(t *testing.T) {
	has := func(extra []string, address string) bool {
		return slices.ContainsFunc(noHosts(extra), func(p string) bool { return netip.MustParsePrefix(p).Contains(netip.MustParseAddr(address)) })
	}
	if !has(nil, serviceIP) || !has(nil, "198.18.0.1") {
		t.Errorf("%v lack a service or a pod", noHosts(nil))
	}
	if other := []string{"--service_cluster_ip_range=192.0.2.0/24"}; has(other, serviceIP) || !has(other, "198.18.0.1") {
		t.Errorf("with a range of the user: %v", noHosts(other))
	}
}

// TestNoProxy_AddressesWithoutHost_AreAddedToThoseOfTheUser: net/http reads NO_PROXY, and no_proxy
// without it.
func TestNoProxy_AddressesWithoutHost_AreAddedToThoseOfTheUser(t *testing.T) {
	other := []string{"--service-cluster-ip-range=192.0.2.0/24"}
	for _, test := range []struct {
		env   map[string]string
		extra []string
		want  string
	}{
		{nil, nil, "198.18.0.0/15,10.0.0.0/24,.svc"},
		{map[string]string{"no_proxy": "a"}, nil, "198.18.0.0/15,10.0.0.0/24,.svc,a"},
		{map[string]string{"no_proxy": "a", "NO_PROXY": "b,c"}, other, "198.18.0.0/15,b,c"},
	} {
		if got := noProxy(func(name string) string { return test.env[name] }, test.extra); got != test.want {
			t.Errorf("%v, %q: got %q, want %q", test.env, test.extra, got, test.want)
		}
	}
}
