package harness

import (
	"context"
	"fmt"
)

// Kubectl runs `strata kubectl` as the administrator. An exit code other than 0 is not an error.
func (s *Server) Kubectl(ctx context.Context, stdin string, args ...string) (Result, error) {
	return s.KubectlAs(ctx, s.Kubeconfig, stdin, args...)
}

// KubectlAs is Kubectl with another kubeconfig.
func (s *Server) KubectlAs(ctx context.Context, kubeconfig, stdin string, args ...string) (Result, error) {
	return s.run(ctx, stdin, append([]string{"kubectl", "--kubeconfig=" + kubeconfig}, args...)...)
}

// Console runs `strata console` as the administrator.
func (s *Server) Console(ctx context.Context) (Result, error) {
	return s.run(ctx, "", "console", "--kubeconfig="+s.Kubeconfig)
}

// History runs `strata history` as the administrator.
func (s *Server) History(ctx context.Context, args ...string) (Result, error) {
	return s.run(ctx, "", append([]string{"history", "--kubeconfig=" + s.Kubeconfig}, args...)...)
}

func (s *Server) run(ctx context.Context, stdin string, args ...string) (Result, error) {
	s.Used(ctx)
	return s.env.Run(ctx, stdin, args...)
}

// StartKubectl starts a long-running kubectl, such as `get --watch`, as a process of the
// environment.
func (s *Server) StartKubectl(args ...string) *Process {
	return s.env.start("kubectl", append([]string{"kubectl", "--kubeconfig=" + s.Kubeconfig}, args...)...)
}

// Apply applies manifests as the administrator.
func (s *Server) Apply(ctx context.Context, manifests string) error {
	r, err := s.Kubectl(ctx, manifests, "apply", "--server-side", "-f", "-")
	if err != nil {
		return err
	}
	if r.Code != 0 {
		return fmt.Errorf("apply: exit code %d\n%s", r.Code, r.Stderr)
	}
	return nil
}
