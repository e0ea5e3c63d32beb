package history

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericclioptions"
)

// Each message has the event, the object and the next step, once, on one line.
func TestMessage_Failures_HaveNextStep(t *testing.T) {
	request := func(err error) error {
		return fmt.Errorf("read the history of pods: %w", &url.Error{Op: "Get", URL: "https://10.0.0.1:6443/api/v1/pods?limit=500", Err: err})
	}
	dial := &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 6443}, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	pods := schema.GroupResource{Resource: "pods"}
	const unreachable = "read the history of pods: https://10.0.0.1:6443 cannot be reached: "
	for name, test := range map[string]struct {
		err  error
		want string
	}{
		"other error": {errors.New("one\n\ttwo"), "one two"},
		"refused":     {request(dial), unreachable + "connection refused; check that the server is running, and its address: --kubeconfig, --context, --server"},
		"timeout":     {request(context.DeadlineExceeded), unreachable + "context deadline exceeded; try again, or give it more time with --request-timeout"},
		"authority": {request(&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}), unreachable +
			"tls: failed to verify certificate: x509: certificate signed by unknown authority; check the certificate authority of the kubeconfig, or give one with --certificate-authority"},
		"expired": {request(&tls.CertificateVerificationError{Err: x509.CertificateInvalidError{Reason: x509.Expired, Detail: "now is later"}}), unreachable +
			"tls: failed to verify certificate: x509: certificate has expired or is not yet valid: now is later; compare the clocks of both machines, or renew the certificate of the server"},
		"unauthorized": {fmt.Errorf("read the history of pods: %w", apierrors.NewUnauthorized("Unauthorized")),
			"read the history of pods: Unauthorized; check the credentials of the kubeconfig, which may have expired"},
		"forbidden": {fmt.Errorf("read the history of pods: %w", apierrors.NewForbidden(pods, "", errors.New("no rule"))),
			"read the history of pods: pods is forbidden: no rule; get needs the right to list the resource, the other commands also that to watch it"},
		"forbidden metrics": {fmt.Errorf("read /metrics: %w", apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no rule"))),
			"read /metrics: forbidden: no rule; top needs the right to get the path /metrics"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := message(test.err, checkServer); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

func TestConnect_NoKubeconfig_IsNamedInErrors(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("HOME", dir)
	t.Setenv("KUBECONFIG", "")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	ours := filepath.Join(dir, "ours")
	config := "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]}"
	if err := os.WriteFile(ours, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	refused := &url.Error{Op: "Get", URL: "http://localhost:8080/api", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	const here = "run this in the working directory of strata up, or set STRATA_DATA"
	for name, c := range map[string]struct {
		kubeconfig     func() (string, error)
		server         string
		hint, fromHere bool
	}{
		"strata history, no kubeconfig": {func() (string, error) { return "", nil }, "", true, true},
		"plugin, no kubeconfig":         {nil, "", true, false},
		"kubeconfig of strata up":       {func() (string, error) { return ours, nil }, "", false, false},
		"address in a flag":             {nil, "http://127.0.0.1:1", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			flags := genericclioptions.NewConfigFlags(true)
			flags.APIServer = &c.server
			b := &base{Config: Config{DefaultKubeconfig: c.kubeconfig}, flags: flags}
			if _, err := b.connect(); err != nil {
				t.Fatal(err)
			}
			got := message(refused, b.start())
			if strings.Contains(got, "there is no kubeconfig: name one with --kubeconfig or KUBECONFIG") != c.hint || strings.Contains(got, here) != c.fromHere {
				t.Error(got)
			}
		})
	}
}
