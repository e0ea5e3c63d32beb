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

// retrySeconds is the Retry-After of a request while tokens cannot be sealed or opened.
const retrySeconds = 1

// tokenKeys is the key in etcd of the keys of continue tokens, below the prefix of a cluster. No
// API shows it: built-in resources are stored below their names, and custom ones below a group,
// which has a dot.
const tokenKeys = "strata/continue-token-keys"

// TokenOptions configures the continue tokens of a cluster.
type TokenOptions struct {
	Seal        bool              // the gate SealedContinueTokens
	RefusePlain bool              // plain tokens from clients are refused
	ReadOnly    bool              // keys are read, and never made
	Transformer value.Transformer // of secrets, for the keys in etcd; nil stores them as they are
	Rotation    time.Duration     // how long a key seals; 0 disables rotation
	Keep        time.Duration     // how long it still opens after that, see continuetoken.Options
	Logger      *slog.Logger
}

// Tokens converts continue tokens between upstream's plain form and the form that clients see (D8).
// The engine uses the plain form internally, so upstream's checks (path traversal, contradictions
// with other options) apply to every token. All methods may be called concurrently.
type Tokens struct {
	opts   TokenOptions
	prefix string // of every key in etcd, with a slash at both ends
	keeper *continuetoken.Keeper
}

// NewTokens returns the tokens of the etcd cluster of kv, whose keys begin with keyPrefix. With
// opts.Seal it starts to read the keys, or makes them, in the background. Without it etcd is read
// when a client sends a sealed token.
func NewTokens(kv clientv3.KV, keyPrefix string, opts TokenOptions) *Tokens {
	return &Tokens{opts: opts, prefix: keyPrefix, keeper: continuetoken.NewKeeper(continuetoken.Options{
		KV:          kv,
		Key:         keyPrefix + tokenKeys,
		Transformer: opts.Transformer,
		Seal:        opts.Seal,
		ReadOnly:    opts.ReadOnly,
		Rotation:    opts.Rotation,
		Keep:        opts.Keep,
		Logger:      opts.Logger,
	})}
}

// Close ends all reads of the keys and waits for them.
func (t *Tokens) Close() { t.keeper.Close() }

// Scope is the list of the keys below a prefix in etcd, with or without the slash at its end.
func (t *Tokens) Scope(resource schema.GroupResource, prefix string) continuetoken.Scope {
	return continuetoken.Scope{
		Group:    resource.Group,
		Resource: resource.Resource,
		Prefix:   strings.TrimSuffix(strings.TrimPrefix(prefix, t.prefix), "/"),
	}
}

// Open returns upstream's plain form of a client's token for a list of the keys below prefix, which
// is an etcd key prefix, that of the request. Plain tokens are validated where they are
// decoded. Errors: 400, 410, 429, ctx's.
func (t *Tokens) Open(ctx context.Context, resource schema.GroupResource, prefix, token string) (plain string, err error) {
	switch {
	case token == "":
		return "", nil
	case !continuetoken.Sealed(token):
		if t.opts.RefusePlain {
			return "", apierrors.NewBadRequest("continue key is not valid: this server accepts only sealed tokens; restart the list")
		}
		return token, nil
	}
	c, err := t.keeper.Open(ctx, t.Scope(resource, prefix), token)
	if err != nil {
		return "", tokenError(ctx, err)
	}
	// EncodeContinue removes the prefix again.
	return storage.EncodeContinue(prefix+c.Start, prefix, c.Revision)
}

// Seal returns the client's form of a plain token for the list of the keys below prefix, which is
// plain itself if sealing is off. "" stays "". Errors: 429, ctx's.
func (t *Tokens) Seal(ctx context.Context, resource schema.GroupResource, prefix, plain string) (string, error) {
	if plain == "" || !t.opts.Seal {
		return plain, nil
	}
	c, err := decodePlain(plain)
	if err != nil {
		return "", fmt.Errorf("seal continue token: %w", err)
	}
	token, err := t.keeper.Seal(ctx, t.Scope(resource, prefix), c)
	if err != nil {
		return "", tokenError(ctx, err)
	}
	return token, nil
}

// decodePlain decodes a plain token made by this server or upstream's store. DecodeContinue would
// return a cleaned key, not the original start.
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

// rebase converts a plain token for the keys below prefix to one for the keys below scope, which is
// shorter or equal. Both may end with a slash. "" stays "".
//
// Upstream's store makes tokens relative to the prefix of its read. When a field selector for one
// namespace has narrowed that prefix, the request for the next page has the client's original
// scope, all namespaces.
func rebase(plain, prefix, scope string) (string, error) {
	prefix, scope = strings.TrimSuffix(prefix, "/")+"/", strings.TrimSuffix(scope, "/")+"/"
	if plain == "" || prefix == scope {
		return plain, nil
	}
	c, err := decodePlain(plain)
	if err != nil {
		return "", fmt.Errorf("rebase continue token: %w", err)
	}
	return storage.EncodeContinue(prefix+strings.TrimPrefix(c.Start, "/"), scope, c.Revision)
}

// tokenError converts an error of continuetoken to one for the client.
func tokenError(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, continuetoken.ErrInvalid):
		return apierrors.NewBadRequest(err.Error())
	case errors.Is(err, continuetoken.ErrExpired):
		return apierrors.NewResourceExpired(err.Error() + "; restart the list without it")
	case errors.Is(err, continuetoken.ErrUnavailable) && ctx.Err() == nil:
		return apierrors.NewTooManyRequests(err.Error(), retrySeconds)
	}
	return err
}
