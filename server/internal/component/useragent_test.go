package component

import (
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

func TestUserAgent_OfProcess_KeepsAllButItsName(t *testing.T) {
	config := rest.AddUserAgent(&rest.Config{}, "deployment-controller")
	got := UserAgent("kube-controller-manager", config.UserAgent)
	_, version, _ := strings.Cut(config.UserAgent, "/")
	if got != "kube-controller-manager/"+version || !strings.HasSuffix(got, "/deployment-controller") {
		t.Errorf("%q as kube-controller-manager is %q", config.UserAgent, got)
	}
}
