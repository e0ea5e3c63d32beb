package replica

import (
	"fmt"
	"slices"

	"k8s.io/apiserver/pkg/apis/apiserver/load"
	"k8s.io/kubernetes/pkg/kubeapiserver/authorizer/modes"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"github.com/stratakube/strata/server/internal/cli"
)

// checkAuthorization returns an error if the flags name no authorizer, or one that permits every
// read. kube-apiserver's default is AlwaysAllow. A replica answers reads from memory without its
// primaries, so with that default every user could read every Secret. The file of
// --authorization-config is read once: kube-apiserver reloads it later without this check.
func checkAuthorization(o *kubeoptions.BuiltInAuthorizationOptions, alwaysAllow bool) error {
	if o.AuthorizationConfigurationFile == "" && len(o.Modes) == 0 {
		return cli.Misusef("authorization is not configured, so that every user could read everything: " +
			"set --authorization-mode or --authorization-config as on the API servers of --primary, or --delegate-auth")
	}
	if alwaysAllow {
		return nil
	}
	where, permitsAll := "--authorization-mode", slices.Contains(o.Modes, modes.ModeAlwaysAllow)
	if file := o.AuthorizationConfigurationFile; file != "" {
		config, err := load.LoadFromFile(file)
		if err != nil {
			return fmt.Errorf("read --authorization-config: %w", err)
		}
		for _, each := range config.Authorizers {
			if string(each.Type) == modes.ModeAlwaysAllow {
				where, permitsAll = "--authorization-config="+file, true
			}
		}
	}
	if permitsAll {
		return cli.Misusef("%s contains %s: every user could read everything, Secrets included; name other authorizers, or add --%s",
			where, modes.ModeAlwaysAllow, flagAlwaysAllow)
	}
	return nil
}
