package pages

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/continuetoken"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
)

// retrySeconds is the pause in the answer to a request that came while tokens cannot be sealed or opened.
const retrySeconds = 1

// TokenKeys is where the keys of continue tokens are stored, below the prefix of a cluster. No
// API shows it: built-in resources are stored below names of their own, and custom ones below a
// group, which has a dot.
const TokenKeys = "strata/continue-token-keys"

// TokenOptions configures the continue tokens of a cluster.
type TokenOptions struct {
	Seal        bool              // the gate SealedContinueTokens
	RefusePlain bool              // plain tokens from clients are refused
	Transformer value.Transformer // of secrets, for the keys in etcd; nil stores them as they are
	Rotation    time.Duration     // how long a key seals; 0: for ever
	Keep        time.Duration     // how long it still opens after that, see continuetoken.Options
	Logger      *slog.Logger
}

// Tokens gives continue tokens the form that clients see, and reads it (D8). Inside the engine
// they have upstream's plain form, whose checks (path traversal, contradictions with other options)
// so hold for every token. All methods may be called concurrently.
type Tokens struct {
	opts   TokenOptions
	prefix string // of every key in etcd, with a slash at both ends
	keeper *continuetoken.Keeper
}

// NewTokens returns the tokens of the etcd cluster that kv talks to, whose keys begin with keyPrefix.
// With opts.Seal it begins to read the keys, or makes them, in the background. Without it etcd is
// asked when a client sends a sealed token.
func NewTokens(kv clientv3.KV, keyPrefix string, opts TokenOptions) *Tokens {
	return &Tokens{opts: opts, prefix: keyPrefix, keeper: continuetoken.NewKeeper(continuetoken.Options{
		KV:          kv,
		Key:         keyPrefix + TokenKeys,
		Transformer: opts.Transformer,
		Seal:        opts.Seal,
		Rotation:    opts.Rotation,
		Keep:        opts.Keep,
		Logger:      opts.Logger,
	})}
}

// Close ends everything and waits for it.
func (t *Tokens) Close() { t.keeper.Close() }

// Scope is the list of the keys below a prefix in etcd, with or without the slash at its end.
func (t *Tokens) Scope(resource schema.GroupResource, prefix string) continuetoken.Scope {
	return continuetoken.Scope{
		Group:    resource.Group,
		Resource: resource.Resource,
		Prefix:   strings.TrimSuffix(strings.TrimPrefix(prefix, t.prefix), "/"),
	}
}

// Open returns upstream's plain form of a token that a client has sent for a list of the keys
// below prefix, which is a prefix in etcd as in Reading. What is wrong with a plain token, those who
// decode it find. Errors: 400, 410, 429, ctx's.
func (t *Tokens) Open(ctx context.Context, resource schema.GroupResource, prefix, token string) (plain string, err error) {
	switch {
	case token == "":
		return "", nil
	case !continuetoken.Sealed(token):
		if t.opts.RefusePlain {
			return "", apierrors.NewBadRequest("continue key is not valid: this server takes sealed ones only; start the list over")
		}
		return token, nil
	}
	c, err := t.keeper.Open(ctx, t.Scope(resource, prefix), token)
	if err != nil {
		return "", tokenError(ctx, err)
	}
	// The prefix is what EncodeContinue takes away again.
	return storage.EncodeContinue(prefix+c.Start, prefix, c.Revision)
}

// Seal returns what a client is sent for upstream's plain form of a token for the list of the keys
// below prefix: the same if sealing is off. "" stays "". Errors: 429, ctx's.
func (t *Tokens) Seal(ctx context.Context, resource schema.GroupResource, prefix, plain string) (string, error) {
	if plain == "" || !t.opts.Seal {
		return plain, nil
	}
	c, err := decodePlain(plain)
	if err != nil {
		return "", fmt.Errorf("seal a continue token: %w", err)
	}
	token, err := t.keeper.Seal(ctx, t.Scope(resource, prefix), c)
	if err != nil {
		return "", tokenError(ctx, err)
	}
	return token, nil
}

// decodePlain reads a plain token that we have made; DecodeContinue would return a key, cleaned,
// in place of what is to be kept.
func decodePlain(plain string) (continuetoken.Token, error) {
	var c struct {
		Revision int64  `json:"rv"`
		Start    string `json:"start"`
	}
	data, err := base64.RawURLEncoding.DecodeString(plain)
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	return continuetoken.Token{Revision: c.Revision, Start: c.Start}, err
}

// Rebase makes a plain token for the keys below prefix one for the keys below scope, which is
// shorter or equal; either is with or without the slash at its end. "" stays "".
//
// Upstream's store makes tokens relative to what it read. When a field selector for one namespace
// has narrowed that, the next page comes for what the client asked for, all namespaces.
func Rebase(plain, prefix, scope string) (string, error) {
	prefix, scope = strings.TrimSuffix(prefix, "/")+"/", strings.TrimSuffix(scope, "/")+"/"
	if plain == "" || prefix == scope {
		return plain, nil
	}
	c, err := decodePlain(plain)
	if err != nil {
		return "", fmt.Errorf("rebase a continue token: %w", err)
	}
	return storage.EncodeContinue(prefix+strings.TrimPrefix(c.Start, "/"), scope, c.Revision)
}

// tokenError turns an error of continuetoken into one for the client.
func tokenError(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, continuetoken.ErrInvalid):
		return apierrors.NewBadRequest(err.Error())
	case errors.Is(err, continuetoken.ErrExpired):
		return apierrors.NewResourceExpired(err.Error() + "; start the list over without it")
	case errors.Is(err, continuetoken.ErrUnavailable) && ctx.Err() == nil:
		return apierrors.NewTooManyRequests(err.Error(), retrySeconds)
	}
	return err
}
