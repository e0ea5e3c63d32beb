package apiserver

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/component-base/featuregate"
	api "k8s.io/kubernetes/pkg/apis/core"

	"github.com/stratakube/strata/kube/kubestorage"
)

// minTokenKeyRotation is the minimum time for which a key seals continue tokens. Replicas read a
// new key within a minute, and the limit on stored keys (64) covers an hour of rotations at this
// interval.
const minTokenKeyRotation = time.Minute

// tokenSettings are the flags of continue tokens.
type tokenSettings struct {
	keyRotation time.Duration // 0: never
	refusePlain bool
}

// A week is a guess: far below the limit of a random nonce of 24 bytes, and short enough that a key
// leaked with an old backup opens no current tokens.
func defaultTokenSettings() tokenSettings { return tokenSettings{keyRotation: 7 * 24 * time.Hour} }

func (s *tokenSettings) addFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&s.keyRotation, "strata-continue-token-key-rotation", s.keyRotation, "How long a key seals continue tokens "+
		"(feature gate "+string(kubestorage.SealedContinueTokens)+"); at least 1m, 0 disables rotation. A replaced key opens tokens for twice --strata-history-age, at least 10m.")
	fs.BoolVar(&s.refusePlain, "strata-refuse-plain-continue-tokens", s.refusePlain, "Reject continue tokens that are not sealed, with 400. "+
		"Set it only after all servers seal their tokens (feature gate "+string(kubestorage.SealedContinueTokens)+").")
}

// validate returns an error that names the flag.
func (s *tokenSettings) validate(gates featuregate.FeatureGate) error {
	if s.keyRotation != 0 && s.keyRotation < minTokenKeyRotation {
		return fmt.Errorf("--strata-continue-token-key-rotation must be 0 or at least %s, is %s", minTokenKeyRotation, s.keyRotation)
	}
	if s.refusePlain && !gates.Enabled(kubestorage.SealedContinueTokens) {
		return fmt.Errorf("--strata-refuse-plain-continue-tokens needs --strata-feature-gates=%s=true: the server would refuse its own tokens", kubestorage.SealedContinueTokens)
	}
	return nil
}

// secretsTransformer returns the transformer that encrypts Secrets in etcd, nil if they are not
// encrypted. The transformer follows reloads of the encryption configuration.
func secretsTransformer(getter generic.RESTOptionsGetter) (value.Transformer, error) {
	secrets := schema.GroupResource{Resource: "secrets"}
	opts, err := getter.GetRESTOptions(secrets, &api.Secret{})
	if err != nil {
		return nil, fmt.Errorf("encryption of secrets: %w", err)
	}
	return opts.StorageConfig.Transformer, nil
}
